"""Choice of a model's runner, with its batching mode, cache size, context and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as replace_fields
from typing import Any, NamedTuple

import structlog
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from servekit.engines.api.load_phases import phase
from servekit.engines.text.tool_format_detection import turn_ends
from servekit.engines.transformers.batching import kv_cache, paged_attention, self_check
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.decode_loop import StepOptions
from servekit.engines.transformers.decode.speculation_setup import Draft, make_speculator
from servekit.engines.transformers.runner import CausalRunner
from servekit.engines.transformers.sequential import StaticRunner
from servekit.engines.transformers.sleep import device_memory
from servekit.engines.transformers.tensor_parallel import plan
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.errors import LoadError
from servekit.protocol.messages import ModelInfo, WorkerSpec

log: Any = structlog.get_logger(__name__)

#: Context of a model that states none, such as a recurrent one.
UNSTATED_CONTEXT = 8192
#: A smaller context is of no use to anybody.
LEAST_CONTEXT = 16
#: Attributes of a configuration that some models state for each layer, such as Gemma 4.
_OF_HEADS = {"num_attention_heads", "num_key_value_heads", "head_dim"}
#: Errors of the library for layers that it cannot page, and of the self-check for wrong text.
_NOT_PAGEABLE = (ValueError, TypeError, AttributeError, LookupError, NotImplementedError)


def make_causal_runner(
    model: PreTrainedModel,
    spec: WorkerSpec,
    chat: bool,
    ranks: Ranks | None = None,
    draft: Draft | None = None,
) -> tuple[CausalRunner, ModelInfo]:
    """Return the runner for a model, and its properties. Raises LoadError."""
    batching = spec.options.get("batching", "auto")
    reason = (
        "the configuration says static" if batching == "static" else _find_obstacle(model, spec)
    )
    if not reason:
        attention = str(model.config._attn_implementation)
        for way in _list_ways(model, spec, draft):
            try:
                return _make_continuous(model, spec, chat, way, attention, ranks, draft)
            except LoadError:
                raise
            except Exception as error:
                if way.decode is None and not _not_pageable(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
                model.set_attn_implementation(attention)
                log.warning("batching_test_failed", model=spec.model, mode=str(way), reason=reason)
    if spec.options.get("speculative"):
        raise LoadError(f"options.speculative needs continuous batching, and {reason}.")
    if batching == "continuous":
        raise LoadError(f"{spec.model} cannot run with continuous batching: {reason}.")
    log.info("sequential_mode_chosen", model=spec.model, reason=reason)
    return _make_static(model, spec, chat, "" if batching == "static" else f": {reason}")


def _not_pageable(error: Exception) -> bool:
    """Return whether an error means that the model cannot be paged.

    torch raises a plain RuntimeError for shapes, such as keys wider than values. The error of a
    failed or full device is a subclass, and no reason to try another way.
    """
    return isinstance(error, _NOT_PAGEABLE) or type(error) is RuntimeError


class _Way(NamedTuple):
    """A way to run batches; `why` explains to people why the library decodes, if of interest."""

    by_request: bool
    decode: StepOptions | None = None
    why: str = ""

    def __str__(self) -> str:
        return "decoding by itself" if self.decode else "continuous batching"


def _list_ways(model: PreTrainedModel, spec: WorkerSpec, draft: Draft | None) -> Iterator[_Way]:
    """Yield the ways to try: attention per request, then the library's over the whole batch."""
    own = model.config._attn_implementation == "sdpa" and spec.options.get("attention") is None
    if own and paged_attention.has_full_attention(model.config.get_text_config()):
        why = ""
        try:
            context, size = _find_context(model, spec), _block_size(spec)
            with phase("kernels", lacks=LookupError):
                options = step_options(model, spec, context, size, draft)
            yield _Way(True, options)
            why = "its decoding failed its test"
        except LookupError as error:
            why = str(error)
        if why and spec.options.get("decode") == "graph":
            raise LoadError(f"options.decode is graph, and {why}.")
        if why and spec.options.get("speculative"):
            raise LoadError(f"options.speculative needs servekit's own decoding, and {why}.")
        yield _Way(True, None, why)
    yield _Way(False)


def step_options(
    model: PreTrainedModel,
    spec: WorkerSpec,
    context: int,
    block_size: int,
    draft: Draft | None = None,
) -> StepOptions:
    """Return how servekit itself runs this model's steps of one token per request.

    Raises LookupError with the reason if the library must decode it. On a CPU nothing is gained by
    starting steps early, so there the user must request it.
    """
    how = spec.options.get("decode") or "auto"
    if how == "eager":
        raise LookupError("")
    device: torch.device = model.device
    if device.type != "cuda" and how == "auto" and not spec.options.get("speculative"):
        raise LookupError("")
    config = model.config.get_text_config()
    if model.config._attn_implementation != "sdpa" or spec.options.get("attention"):
        raise LookupError("options.attention is set to one without pages")
    if spec.gpus > 1:
        raise LookupError("it is spread over several GPUs")
    if not paged_attention.has_full_attention(config):
        raise LookupError("some of its layers do not attend to the whole context")
    kernel = kernels.choose_for_model(model, spec, block_size)
    on_gpu = device.type == "cuda"
    graphs = on_gpu and kernel.captured
    chunk = spec.options.get("max_batch_tokens") or kv_cache.default_batch_tokens(spec.device)
    speculator = make_speculator(spec, draft, block_size, chunk, graphs=graphs)
    return StepOptions(kernel, context, graphs=graphs, ahead=on_gpu, speculator=speculator)


def _find_obstacle(model: PreTrainedModel, spec: WorkerSpec) -> str:
    """Return why this model cannot share a batch, or "".

    A missing obstacle here would produce wrong text.
    """
    if plan.over_layers(spec):
        return "its layers are on several GPUs, and the library's paged cache on one"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False):
        return "it is recurrent"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced by a paged one"
    varying = getattr(model.config.get_text_config(), "per_layer_attributes", None)
    if varying and not _OF_HEADS.isdisjoint(varying):  # the library's cache has one size
        return "the heads of its layers differ in number or size"
    return ""


def _make_continuous(
    model: PreTrainedModel,
    spec: WorkerSpec,
    chat: bool,
    way: _Way,
    attention: str,
    ranks: Ranks | None,
    draft: Draft | None,
) -> tuple[CausalRunner, ModelInfo]:
    context = _find_context(model, spec)
    size = _plan_cache(model, spec, context, ranks, draft)
    with phase("cache"):
        runner = _with_less_on_failure(
            lambda halvings: ContinuousRunner(
                model,
                size.halved(halvings),
                by_request=way.by_request,
                ranks=ranks,
                decode=way.decode,
            )
        )
    try:
        with phase("proof"):
            self_check.check_model(model, runner, attention)
            if way.decode and way.decode.speculator and (why := way.decode.speculator.failure):
                raise LoadError(f"options.speculative: no tokens can be proposed: {why}")
        with phase("graphs"):
            runner.record_graphs()
            if spec.device == "cuda":
                runner.warm_up(context)
    except BaseException:
        runner.close()
        raise
    size = runner.plan
    detail = f"continuous batching, {runner.attention}, {size.blocks} × {size.block_size} tokens"
    how = runner.decodes or (way.why and f"the library's, since {way.why}")
    detail += f"; decoding: {how}" if how else ""
    log.info("continuous_batching_chosen", model=spec.model, detail=detail)
    total = size.bytes * (1 if ranks is None else ranks.size)
    info = _describe_model(model, spec, chat, runner, size.slots, total, detail, context)
    if runner.shares_prefixes:
        info = replace(info, prefix_block=size.block_size, prefix_tokens=size.tokens)
    return runner, info


def _make_static(
    model: PreTrainedModel, spec: WorkerSpec, chat: bool, why: str
) -> tuple[CausalRunner, ModelInfo]:
    context = _find_context(model, spec)
    chunk = spec.options.get("max_batch_tokens") or kv_cache.default_batch_tokens(spec.device)
    runner = StaticRunner(model, context, chunk)
    detail = f"one request at a time, {model.config._attn_implementation or 'no attention'}{why}"
    return runner, _describe_model(model, spec, chat, runner, 1, 0, detail, context)


def _describe_model(
    model: PreTrainedModel,
    spec: WorkerSpec,
    chat: bool,
    runner: CausalRunner,
    slots: int,
    kv_bytes: int,
    detail: str,
    context: int,
) -> ModelInfo:
    context = min(context, runner.capacity)
    if context < LEAST_CONTEXT:
        raise LoadError(
            f"Memory is enough for a context of {context} tokens only.", permanent=False
        )
    return ModelInfo(
        max_context=context,
        slots=slots,
        chat=chat,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kv_cache_bytes=kv_bytes,
        detail=f"{detail}{spread_how(spec)}",
        sleeps=True,
    )


def spread_how(spec: WorkerSpec) -> str:
    """Return how the model is distributed over devices, for people; "" for a single one."""
    if plan.over_ranks(spec):
        return f"; tensor parallel, {spec.gpus} ranks"
    return f"; layers over {spec.gpus} GPUs" if plan.over_layers(spec) else ""


def _find_context(model: PreTrainedModel, spec: WorkerSpec) -> int:
    own = kv_cache.context_of(model.config.get_text_config()) or UNSTATED_CONTEXT
    return min(own, spec.max_context or own)


# ---------------------------------------------------------------- the cache's size


def _plan_cache(
    model: PreTrainedModel,
    spec: WorkerSpec,
    context: int,
    ranks: Ranks | None,
    draft: Draft | None,
) -> kv_cache.CachePlan:
    """Return the cache plan of one rank; configured sizes are totals of all ranks."""
    options, count = spec.options, 1 if ranks is None else ranks.size
    available = _available_bytes(model, spec, ranks)
    shape = kv_cache.shape_of(model.config.get_text_config(), model.dtype.itemsize)
    if draft is not None:
        shape = replace_fields(shape, draft_kv_bytes=draft.shape.token_kv_bytes)
        available -= draft.shape.fixed_bytes(0, options.get("slots") or kv_cache.CUDA_SLOTS)
    stated = options.get("kv_cache_bytes")
    return kv_cache.plan_cache(
        shape.part(count),
        cuda=spec.device == "cuda",
        available_bytes=available,
        max_context=context,
        block_size=_block_size(spec),
        slots=options.get("slots"),
        batch_tokens=options.get("max_batch_tokens"),
        cache_bytes=stated and stated // count,
    )


def _block_size(spec: WorkerSpec) -> int:
    return spec.options.get("block_size") or 32


def _available_bytes(model: PreTrainedModel, spec: WorkerSpec, ranks: Ranks | None) -> int:
    own = device_memory.available_bytes(spec, model.device)
    if ranks is None:
        return own
    if model.device.type == "cpu":
        return own // ranks.size
    return min(own, ranks.free_bytes or own)


def _with_less_on_failure(make: Callable[[int], ContinuousRunner]) -> ContinuousRunner:
    """Make the runner; retry twice with half the memory, as other processes may have taken some."""
    for halvings in range(3):
        try:
            return make(halvings)
        except (MemoryError, torch.OutOfMemoryError) as error:
            log.warning("kv_cache_allocation_failed", reason=str(error))
    raise LoadError("There is no room for the KV cache.", permanent=False)


# ---------------------------------------------------------------- properties of the model


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return all token ids that end a completion, from all places where the model names them."""
    found: list[Any] = []
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, (list, tuple)) else [value]
    known = range(head_size(model))
    stated = [token for token in found if isinstance(token, int)]
    return frozenset(token for token in (*stated, *turn_ends(tokenizer)) if token in known)


def vocab_size(model: PreTrainedModel) -> int:
    """Return the rows of the embedding: the number of token ids that the model can read."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def head_size(model: PreTrainedModel) -> int:
    """Return the rows of the head: the number of token ids that the model can generate.

    The embedding may have more rows: for example, ids that stand for images are only read.
    """
    library: Any = model  # untyped there
    rows = getattr(library.get_output_embeddings(), "out_features", None)
    size = vocab_size(model)
    return min(rows, size) if isinstance(rows, int) else size


def sampling_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sampling values of the model's generation config, by `Sampling` field."""
    config = model.generation_config
    stated = {} if config is None else config.to_diff_dict()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: stated[name] for name in names if stated.get(name) is not None}
