"""Loading of a model from its specification, up to a runner.

Tensor parallelism matters only here and in `tensor_parallel`: to the runner, a model is on one
device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from transformers import PreTrainedModel

from servekit.engines.api.base import Report
from servekit.engines.api.cpu_threads import HOST_THREADS, count_threads
from servekit.engines.api.load_phases import phase
from servekit.engines.api.speculation import get_speculation
from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.model_files.model_kind import ModelKind, find_model_kind
from servekit.engines.model_files.source import resolve_folder
from servekit.engines.text.pair_template import find_pair_template
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.transformers import fused_layers, packed_linear, preload, quantize, weights
from servekit.engines.transformers.decode.speculation_setup import (
    Draft,
    check_draft,
    check_tokenizers,
)
from servekit.engines.transformers.lora.module_clone import clone_modules
from servekit.engines.transformers.pooling_models import (
    classification,
    embedding,
    logit_score,
    pooling,
)
from servekit.engines.transformers.runner import Runner
from servekit.engines.transformers.runner_factory import (
    head_size,
    make_causal_runner,
    vocab_size,
)
from servekit.engines.transformers.sleep import weight_offload
from servekit.engines.transformers.speech import transcription
from servekit.engines.transformers.tensor_parallel import plan
from servekit.engines.transformers.tensor_parallel.controller import Ranks, threads_each
from servekit.engines.transformers.vision.image_runner import add_images
from servekit.errors import LoadError
from servekit.protocol.messages import ModelInfo, WorkerSpec
from servekit.units import format_bytes


@dataclasses.dataclass
class Loaded:
    """A loaded model with its runner and properties."""

    folder: Path
    kind: ModelKind
    tokenizer: Any
    processor: Any  # of a model with eyes, else None
    codec: TokenizerCodec
    model: PreTrainedModel
    attention: str  # the library's name of its implementation
    runner: Runner
    info: ModelInfo
    ranks: Ranks | None

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model)

    @property
    def head_size(self) -> int:
        return head_size(self.model)


def load_from_spec(spec: WorkerSpec, report: Report) -> Loaded:
    """Fetch and load a model. Raises LoadError."""
    threads = _count_threads(spec)
    torch.set_num_threads(threads)
    with phase("files"):
        folder = Path(resolve_folder(spec.path, spec.revision, report))
    kind = find_model_kind(folder, spec)
    if kind == "transcribe" and plan.is_spread(spec):
        raise LoadError(f"{spec.model} hears speech, and such a model runs on one GPU.")
    ranks = _start_ranks(folder, spec, kind)
    try:
        with phase("tokenizer"):
            tokenizer = preload.get_tokenizer(folder, spec)
            processor = preload.get_processor(folder, spec) if kind == "generate" else None
        if processor is not None:
            kind = "see"
            tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        with (
            phase("weights", file=str(folder)),
            weights.explain_errors(folder, spec),
            _with_all(ranks, folder, threads, kind),
        ):
            model = _load_model(folder, spec, report, kind)
        if ranks is not None:
            if kind == "see" and (why := plan.find_media_obstacle(model)):
                warn_unavailable(spec.model, why)
                processor, kind = None, "generate"
            ranks.mirror_forward(model, reads_media=kind == "see")
        pairs = find_pair_template(folder, spec, kind, tokenizer)
        codec = TokenizerCodec(tokenizer, completes_chats=processor is not None, pairs=pairs)
        codec.start_proof()
        attention = str(model.config._attn_implementation)
        with weights.explain_errors(folder, spec):
            packs = spec.device == "cpu" and kind != "transcribe" and not quantize.get_method(spec)
            packed = _pack_weights(model, spec, kind) if packs else ""
            draft = _load_draft(spec, kind, tokenizer, model, report)
            runner, info = _make_runner(folder, spec, model, codec, tokenizer, ranks, kind, draft)
        info = structs.replace(info, detail=info.detail + packed)
        if method := quantize.get_method(spec):
            info = structs.replace(
                info,
                dtype=method,
                parameters=model.num_parameters(),
                weights_bytes=weight_offload.count_model_bytes(model),
            )
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    return Loaded(folder, kind, tokenizer, processor, codec, model, attention, runner, info, ranks)


def explain_no_adapters(model: PreTrainedModel, spec: WorkerSpec) -> str:
    """Return why the model can have no adapters, or ""."""
    if plan.is_spread(spec):
        return plan.NO_ADAPTERS
    return quantize.NO_ADAPTERS if quantize.has_packed_weights(model) else ""


def make_weight_store(
    loaded: Loaded, spec: WorkerSpec, more: weight_offload.Tensors
) -> weight_offload.WeightStore:
    """Return the store for the model's tensors during sleep; on a GPU it also holds `more`."""
    again = partial(_load_model, loaded.folder, spec, lambda progress: None, loaded.kind)
    load_again = again if not loaded.ranks and quantize.can_reload(loaded.model) else None
    return weight_offload.weight_store(loaded.model, loaded.model.device, more, load_again)


def _count_threads(spec: WorkerSpec) -> int:
    if spec.device != "cpu":
        return HOST_THREADS
    threads = count_threads(spec.options.get("threads"), on_gpu=False)
    return threads_each(threads, spec.gpus) if plan.over_ranks(spec) else threads


def _start_ranks(folder: Path, spec: WorkerSpec, kind: ModelKind) -> Ranks | None:
    """Start the other ranks, if any; they import their modules while the tokenizer is loaded."""
    if not plan.over_ranks(spec):
        return None
    with weights.explain_errors(folder, spec):
        plan.check_spread(weights.outline_model(folder, spec, kind), spec)
    return Ranks(spec)


def _with_all(
    ranks: Ranks | None, folder: Path, threads: int, kind: ModelKind
) -> contextlib.AbstractContextManager[None]:
    if ranks is None:
        return contextlib.nullcontext()
    return ranks.loading(folder, threads, kind)


def _load_model(folder: Path, spec: WorkerSpec, report: Report, kind: ModelKind) -> PreTrainedModel:
    attention = spec.options.get("attention")
    model = weights.load_model(folder, spec, attention, report, kind=kind)
    fused = spec.gpus == 1 and spec.options.get("decode") != "eager"
    if fused and kind != "transcribe":
        with phase("kernels"):
            fused_layers.fuse_layers(model)
    return model


def _load_draft(
    spec: WorkerSpec, kind: ModelKind, tokenizer: Any, model: PreTrainedModel, report: Report
) -> Draft | None:
    """Return the draft model, if the options name one. Raises LoadError."""
    speculation = get_speculation(spec)
    if speculation is not None and kind not in ("generate", "see"):
        raise LoadError(f"options.speculative is for text, and {spec.model} generates none.")
    if speculation is None or speculation.model is None:
        return None
    name = f"the draft model {speculation.model}"
    options = {key: one for key, one in spec.options.items() if key != "quantization"}
    own = structs.replace(spec, model=name, path=speculation.model, revision=None, options=options)
    folder = Path(resolve_folder(own.path, None, report))
    if find_model_kind(folder, own) != "generate":
        raise LoadError(f"{name} generates no text.")
    check_tokenizers(tokenizer, weights.load_tokenizer(folder, own), name)
    with weights.explain_errors(folder, own):
        draft = _load_model(folder, own, report, "generate")
        check_draft(draft, name)
        if spec.device == "cpu":
            _pack_weights(draft, own, "generate")
    sizes = [weight_offload.count_model_bytes(one) for one in (draft, model)]
    return Draft(draft, sizes[0] / sizes[1])


def _pack_weights(model: PreTrainedModel, spec: WorkerSpec, kind: ModelKind) -> str:
    """Pack linear layers; return a description for people."""
    half = kind == "embed" and model.config.is_encoder_decoder
    with phase("packing"):
        size = packed_linear.pack_layers(model.get_encoder() if half else model, spec)
        if size:
            weight_offload.release_pages(
                weight_offload.unique_storages(weight_offload.tensors_of(model))
            )
    if not size:
        return ""
    return f"; weights packed, {format_bytes(size)}"


def _make_runner(
    folder: Path,
    spec: WorkerSpec,
    model: PreTrainedModel,
    codec: TokenizerCodec,
    tokenizer: Any,
    ranks: Ranks | None,
    kind: ModelKind,
    draft: Draft | None,
) -> tuple[Runner, ModelInfo]:
    instructs = codec.takes_instruction
    if kind == "classify":
        return classification.make_classification_runner(
            model, tokenizer, spec, instructs=instructs
        )
    if kind == "rerank":
        return logit_score.make_logit_score_runner(
            folder, model, tokenizer, spec, instructs=instructs
        )
    if kind == "transcribe":
        return transcription.make_transcription_runner(folder, model, tokenizer, spec)
    if kind == "embed":
        how = pooling.read_pooling(folder, model.device)
        return embedding.make_embedding_runner(model, how, tokenizer, spec)
    # Before a batch changes the model's attention, which is not the one for images.
    twin = clone_modules(model) if kind == "see" else None
    texts, info = make_causal_runner(model, spec, codec.chat, ranks, draft)
    if why := explain_no_adapters(model, spec):
        refused = {adapter.name: why for adapter in spec.adapters}
        info = structs.replace(info, refused_adapters=refused)
    return texts if twin is None else add_images(texts, model, twin, ranks), info
