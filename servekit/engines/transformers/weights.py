"""Loading of a model and its tokenizer from a folder directly onto the device.

`model_files.source` has validated the folder. Only safetensors are read, the hub is never
contacted, and code in the folder runs only if the specification allows it. Every failure becomes a
LoadError that names a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging as library_logging

from servekit.engines.api.base import Report
from servekit.engines.model_files.model_kind import ModelKind
from servekit.engines.transformers import quantize
from servekit.engines.transformers.batching.kv_cache import context_of
from servekit.engines.transformers.sleep import device_memory
from servekit.engines.transformers.tensor_parallel import plan
from servekit.errors import LoadError
from servekit.protocol.messages import Progress, WorkerSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO: dict[ModelKind, Any] = {
    "generate": transformers.AutoModelForCausalLM,
    "embed": transformers.AutoModel,
    "classify": transformers.AutoModelForSequenceClassification,
    "rerank": transformers.AutoModelForCausalLM,
    "transcribe": transformers.AutoModelForSpeechSeq2Seq,
    "see": transformers.AutoModelForMultimodalLM,
}
#: Classes of the part that reads and writes text, of models that also speak, by their architecture.
_THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
#: Share of each GPU's free memory for weights; caches and activations need the rest.
_WEIGHTS_FRACTION = 0.9


def load_tokenizer(folder: Path, spec: WorkerSpec) -> Any:
    """Return the tokenizer, with the chat template of the configuration or else its own."""
    with explain_errors(folder, spec):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=spec.trust_remote_code
        )
    if spec.chat_template:
        tokenizer.chat_template = spec.chat_template
    return tokenizer


def load_model(
    folder: Path,
    spec: WorkerSpec,
    attention: str | None,
    report: Report,
    *,
    kind: ModelKind = "generate",
    device: torch.device | None = None,
) -> transformers.PreTrainedModel:
    """Return the model in evaluation mode, with every tensor loaded directly onto its device.

    The model is a causal language model, the bare transformer to embed, or one with a head to
    classify. `device` is the rank's, if there are several ranks; by default the first of
    `spec.device`.
    """
    device = device or torch.device("cuda:0" if spec.device == "cuda" else "cpu")
    for each in _list_devices(spec, device):
        device_memory.limit_memory(spec, each)
    # cuDNN's attention plans each length anew, in each thread: 25 ms for a generated token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kind in ("generate", "rerank", "see"):
        _require_a_head(folder)
    auto = _choose_auto(folder, kind)
    with explain_errors(folder, spec), _report_progress(report):
        model: transformers.PreTrainedModel
        model, told = auto.from_pretrained(
            folder,
            dtype=_choose_dtype(spec),
            **_placing_arguments(spec, device),
            attn_implementation=attention,
            **quantize.loading_arguments(folder, spec, kind),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    if auto is _AUTO["see"] and model.config.is_encoder_decoder:
        raise LoadError(
            f"{spec.model} has an encoder for its prompt, and servekit serves decoders."
        )
    # Of stored quantised weights the library makes others than are in the files.
    stored = kind != "classify" and quantize.read_stated_method(folder)
    if not stored and (missing := _find_missing(model, told["missing_keys"], kind)):
        raise LoadError(
            f"The files of {spec.model} have no {missing[0]}, and lack {len(missing)} tensors in"
            " all; the library would go on with random weights."
        )
    _require_devices(model, spec, device)
    if kind in ("generate", "see"):
        _fix_rotary_factors(model, spec)
    if plan.over_ranks(spec):
        model._device_mesh = None  # otherwise the library's batching would schedule in every rank
    model.eval()  # type: ignore[no-untyped-call]  # the library leaves it untyped
    return model


def _require_devices(
    model: transformers.PreTrainedModel, spec: WorkerSpec, device: torch.device
) -> None:
    """Raise LoadError if parameters are on other devices than the model's."""
    wanted = {str(each) for each in _list_devices(spec, device)}
    strays = {str(tensor.device) for tensor in model.parameters()} - wanted
    if "meta" in strays:
        raise LoadError(f"{spec.model} does not fit into the memory of its {spec.gpus} GPUs.")
    if strays:
        raise LoadError(
            f"Parameters of {spec.model} landed on {', '.join(strays)}, not {', '.join(wanted)}."
        )


@torch.no_grad()
def _fix_rotary_factors(model: transformers.PreTrainedModel, spec: WorkerSpec) -> None:
    """Have a model with LongRoPE use its long factors always, or never if its context is short.

    The library chooses by the longest request of each step. So a text would depend on its
    neighbours, and a prompt that is read in chunks, or found in the cache, would have both.
    """
    stated = context_of(model.config.get_text_config()) or 1
    last = min(stated, spec.max_context or stated) - 1
    for module in model.modules():
        rotary: Any = module
        kinds = getattr(rotary, "rope_type", None)  # by the types of layers, where these differ
        named = {None: kinds} if isinstance(kinds, str) else kinds or {}
        for layers in [layers for layers, kind in named.items() if kind == "longrope"]:
            place = torch.tensor([[last]], device=model.device)
            rotary(place.float(), place, **({} if layers is None else {"layer_type": layers}))
            rotary.rope_type = (
                "default" if layers is None else {**rotary.rope_type, layers: "default"}
            )


def _find_missing(
    model: transformers.PreTrainedModel, missing: Collection[str], kind: ModelKind
) -> list[str]:
    """Return the parameters that the files lack, without those that no embedding depends on."""
    embeds = kind == "embed"
    half = embeds and model.config.is_encoder_decoder
    used = {id(parameter) for parameter in (model.get_encoder() if half else model).parameters()}
    return sorted(
        name
        for name, parameter in model.named_parameters()
        if name in missing and id(parameter) in used and not (embeds and "pooler" in name)
    )


def _placing_arguments(spec: WorkerSpec, device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell the library where to place the weights."""
    if plan.over_ranks(spec):
        return {"distributed_config": DistributedConfig(tp_size=spec.gpus)}
    return _spread_layers(spec) if plan.over_layers(spec) else {"device_map": {"": device}}


def _spread_layers(spec: WorkerSpec) -> dict[str, Any]:
    """Return the arguments that make the library spread the layers evenly over the GPUs."""
    devices = [torch.device("cuda", index) for index in range(spec.gpus)]
    room = {
        device.index: int(device_memory.available_bytes(spec, device) * _WEIGHTS_FRACTION)
        for device in devices
    }
    # No other device: a part on the CPU or on disk would be a hundred times slower.
    return {"device_map": "balanced", "max_memory": room | {"cpu": 0}}


def _list_devices(spec: WorkerSpec, device: torch.device) -> list[torch.device]:
    if plan.over_layers(spec):
        return [torch.device("cuda", index) for index in range(spec.gpus)]
    return [device]


def outline_model(folder: Path, spec: WorkerSpec, kind: ModelKind = "generate") -> Any:
    """Return the model without weights, to import its class and shape its parameters."""
    trust = {"local_files_only": True, "trust_remote_code": spec.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(folder, **trust)
    auto = _choose_auto(folder, kind)
    with torch.device("meta"):
        if isinstance(auto, type) and issubclass(auto, transformers.PreTrainedModel):
            return auto._from_config(config.thinker_config)  # type: ignore[no-untyped-call]
        return auto.from_config(config, trust_remote_code=spec.trust_remote_code)


def _choose_auto(folder: Path, kind: ModelKind) -> Any:
    """Return the library's class that loads a model.

    Some language models exist only with a part for images or recordings, and then generate from
    texts with it. Of those that speak, only the thinker is loaded.
    """
    if thinker := getattr(transformers, _THINKERS.get(read_model_type(folder), ""), None):
        return thinker
    named, plain = read_model_type(folder), modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    seeing = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    alone = kind == "generate" and named not in plain and named in seeing
    return _AUTO["see" if alone else kind]


def read_model_type(folder: Path) -> str:
    """Return the library's name of the architecture, "" if none is stated."""
    try:
        return str(json.loads((folder / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _require_a_head(folder: Path) -> None:
    """Raise LoadError for an encoder or a headless model.

    The library would give it random weights for a head and generate random words.
    """
    named = _read_architectures(folder)
    heads = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    others = {
        *_flatten_names(modeling_auto.MODEL_MAPPING_NAMES.values()),
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(),
    }
    if named in others - heads:
        raise LoadError(
            f"{named} cannot generate text. If it is an embedding model, its folder needs the "
            "modules.json and 1_Pooling/config.json that say how its output becomes a vector."
        )


def _flatten_names(names: Iterable[Any]) -> Iterator[str]:
    for name in names:
        yield from [name] if isinstance(name, str) else name


def _choose_dtype(spec: WorkerSpec) -> torch.dtype | str:
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    return "auto" if spec.device == "cuda" else torch.float32


@contextmanager
def explain_errors(folder: Path, spec: WorkerSpec) -> Iterator[None]:
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise LoadError(
                f"{spec.model} does not fit into the memory of {spec.device}: {_first_line(error)}",
                permanent=False,
            ) from error
        raise LoadError(_explain_error(folder, spec, error)) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory is exhausted.

    torch has its own exception for a GPU, and a plain RuntimeError for the host.
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "can't allocate memory" in str(error)
    )


def _explain_error(folder: Path, spec: WorkerSpec, error: Exception) -> str:
    text = str(error)
    named = _read_architectures(folder)
    if "trust_remote_code" in text:
        return (
            f"{spec.model} comes with its own Python code. If you trust it, set "
            "`trust_remote_code: true` for this model."
        )
    if isinstance(error, ImportError) and (method := quantize.read_stated_method(folder)):
        return (
            f"{spec.model} is stored quantised ({method}), and a package for it is not installed:"
            f" {_first_line(error)}"
        )
    if "model type" in text or "Unrecognized" in text:
        return (
            f"transformers {transformers.__version__} does not know this model ({named}): "
            f"{_first_line(error)}"
        )
    return f"{spec.model} ({named}) cannot be loaded: {type(error).__name__}: {_first_line(error)}"


def _read_architectures(folder: Path) -> str:
    try:
        stated = json.loads((folder / "config.json").read_text())["architectures"]
        return ", ".join(stated) or "an unnamed architecture"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "an unnamed architecture"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


# ---------------------------------------------------------------- progress


@contextmanager
def _report_progress(report: Report) -> Iterator[None]:
    """Turn the library's progress bars into reports; none is drawn."""

    def hook(_factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bar:
        return _Bar(report, *args, **kwargs)

    previous = library_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        library_logging.set_tqdm_hook(previous)


class _Bar:
    """The subset of tqdm that the library uses, with about a hundred reports in all."""

    def __init__(self, report: Report, iterable: Any = None, **kwargs: Any) -> None:
        self._report = report
        self._iterable = iterable
        total = kwargs.get("total")
        self._total = int(total if total is not None else len(iterable or ()))
        self._loads = "weights" in str(kwargs.get("desc", "")).lower()
        self._done = 0
        self._report_done(0)

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update(1)

    def update(self, count: float = 1) -> None:
        step = max(1, self._total // 100)
        before, self._done = self._done, self._done + int(count)
        if self._done // step != before // step or self._done >= self._total:
            self._report_done(self._done)

    def _report_done(self, done: int) -> None:
        if self._loads:
            self._report(Progress("load", done, self._total, "tensors"))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None  # set_postfix, close, refresh, …
