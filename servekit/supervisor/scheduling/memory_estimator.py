"""Estimate of a model's GPU memory, from the headers of its files.

    weights      exact: the tensors' types and shapes, converted as `dtype` says; those that read
                 images and recordings are on each GPU of a model of the transformers engine
    KV cache     exact for one request: layers × heads × sizes; the engine chooses their number
    workspace    CUDA's context, kernels and libraries (CONTEXT_BYTES), NCCL's buffers where several
                 processes share a model, vLLM's CUDA graphs, the activations of one pass, logits

A model is refused if its weights alone do not fit. `servekit check` shows the other parts beside
the claim; the engine keeps within it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servekit.config.engines.options import KINDS
from servekit.config.engines.quantization_checks import get_method
from servekit.config.engines.speculative_checks import get_speculative
from servekit.config.schema import ModelConfig
from servekit.model_metadata import (
    ctranslate2,
    gguf,
    kv_cache_shape,
    projector,
    safetensors,
    weight_quantization,
)
from servekit.model_metadata.kv_cache_shape import Attention
from servekit.supervisor.scheduling import local_model_files
from servekit.supervisor.scheduling.memory_requests import (
    CONTEXT_BYTES,
    Assignment,
    Misplaced,
    host_claim_bytes,
    reserve_bytes,
)
from servekit.system import cgroup
from servekit.units import format_bytes

#: NCCL's buffers for one group of ranks.
NCCL_BYTES = 512 * 2**20
#: vLLM's CUDA graphs for its batch sizes.
GRAPHS_BYTES = 2**30
#: Defaults: tokens in one pass, and concurrent requests.
_BATCH_TOKENS = 2048
_SLOTS = 256
#: Lengths of requests, in tokens, whose number is told.
_LENGTHS = (2048, 8192, 32768)
#: Options that a draft model does not share with its model.
_NOT_OF_DRAFTS = {"speculative", "quantization", "cpu_moe_layers"}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes per number in llama.cpp's caches: blocks of 32 with their scale.
_CACHE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
#: Names of the experts' tensors in a GGUF file.
_EXPERT = re.compile(r"blk\.(\d+)\..*exps\.")
#: A converted GGUF file with fewer numbers is stored as float32; see `gguf_convert`.
_FLOAT32_BELOW = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one replica; `on_each_` fields are per GPU. `unknown`: why there is no estimate."""

    weights_bytes: int = 0
    kv_1k_bytes: int = 0  # of 1024 tokens
    context: int = 0  # tokens, prompt and completion together
    on_each_weights_bytes: int = 0
    on_each_kv_bytes: int = 0  # of one request that fills the context
    on_each_workspace_bytes: int = 0
    on_each_requests: tuple[tuple[int, int], ...] = ()  # tokens, and bytes of one such request
    from_gguf: bool = False
    partly: bool = False  # what does not fit stays in the host's memory
    unknown: str = ""

    @property
    def on_each_least_bytes(self) -> int:
        """Bytes that each GPU needs for one request that fills the context."""
        known = self.on_each_weights_bytes + self.on_each_kv_bytes
        return known + self.on_each_workspace_bytes if known else 0

    @property
    def on_each_floor_bytes(self) -> int:
        """Bytes per GPU below which the model cannot even load; 0 where unknown."""
        if self.unknown or self.partly:
            return 0
        return self.on_each_weights_bytes + min(CONTEXT_BYTES, self.on_each_workspace_bytes)

    def describe_requests(self, claim_bytes: int) -> str:
        """Return how many requests of which length fit beside the weights at once, or ""."""
        free = claim_bytes - self.on_each_weights_bytes - self.on_each_workspace_bytes
        counts = [(free // size, tokens) for tokens, size in self.on_each_requests if size]
        told = [f"{count} of {tokens} tokens" for count, tokens in counts if count > 0]
        return ", or ".join(told)

    def describe_claim(self, claim_bytes: int) -> str:
        """Return a remark on a claim of `claim_bytes` per GPU, or ""."""
        if self.unknown:
            return self.unknown
        weights, least = self.on_each_weights_bytes, self.on_each_least_bytes
        if not claim_bytes or least <= claim_bytes:
            return ""
        if self.partly and weights > claim_bytes:
            return f"{format_bytes(weights - claim_bytes)} of the weights stay in the host's memory"
        return f"{format_bytes(least - claim_bytes)} too few for a request that fills the context"


def estimate(
    model: ModelConfig, place: Assignment, environ: Mapping[str, str], path: Path | None = None
) -> Estimate | None:
    """Return the estimate for a replica of `model` at `place`.

    `path` are its files, or files with their headers only; by default those on this machine. None
    if its engine has no files, or has a form of its own, or if a server's command loads them.
    """
    if not KINDS[model.engine].formats & {"folder", "gguf"} or model.engine == "command":
        return None
    path = path or local_model_files.find_model_files(
        model.path, model.revision, {**environ, **model.env}
    )
    if path is None:
        return Estimate(unknown="not fetched yet, so its size is not known")
    if path.is_dir() and not (path / "config.json").exists():
        return None  # of a plugin's engine, in a form of its own
    try:
        found = _of_gguf(model, place, path) if path.is_file() else _of_folder(model, place, path)
    except (ValueError, OSError, LookupError, TypeError, ArithmeticError) as error:
        return Estimate(unknown=str(error) or repr(error))
    if draft := get_speculative(model).get("model"):
        options = {key: model.options[key] for key in model.options.keys() - _NOT_OF_DRAFTS}
        options |= {"mmproj": False} if model.engine == "llamacpp" else {}
        small = model.model_copy(update={"path": draft, "revision": None, "options": options})
        return _add_draft(found, estimate(small, place, environ))
    return found


def _add_draft(found: Estimate, draft: Estimate | None) -> Estimate:
    """Return the estimate of a model together with its draft model's."""
    if draft is None or found.unknown:
        return found
    if draft.unknown:
        return replace(found, unknown=f"draft model: {draft.unknown}")
    workspace = max(0, draft.on_each_workspace_bytes - CONTEXT_BYTES)
    token_bytes = draft.kv_1k_bytes / 1024
    return replace(
        found,
        weights_bytes=found.weights_bytes + draft.weights_bytes,
        kv_1k_bytes=found.kv_1k_bytes + draft.kv_1k_bytes,
        on_each_weights_bytes=found.on_each_weights_bytes + draft.on_each_weights_bytes,
        on_each_kv_bytes=found.on_each_kv_bytes + int(found.context * token_bytes),
        on_each_workspace_bytes=found.on_each_workspace_bytes + workspace,
        on_each_requests=tuple(
            (tokens, size + int(tokens * token_bytes)) for tokens, size in found.on_each_requests
        ),
    )


def check_weights_fit(
    index: int, model: ModelConfig, place: Assignment, found: Estimate, reserve: str | None
) -> None:
    """Raise Misplaced if the weights alone exceed a claim; `index` is the model's in the file."""
    if found.unknown or found.partly:
        return
    weights = found.on_each_weights_bytes
    claim = 0 if place.gpus else host_claim_bytes(model, cgroup.total_memory_bytes())
    if claim and weights > claim:
        raise Misplaced(
            f"model {model.name!r} does not fit: its weights alone take {format_bytes(weights)} of "
            f"this machine's memory, and it claims {format_bytes(claim)}: "
            f"{format_bytes(weights - claim)} too few{_suggest(model, place, found, claim)}",
            *("models", index, "memory"),
        )
    for gpu, claim in zip(place.gpus, place.claims, strict=True):
        if weights <= claim:
            continue
        total = f"{format_bytes(found.weights_bytes)} in all, " if len(place.gpus) > 1 else ""
        has = f"it claims {format_bytes(claim)} of {gpu}"
        if model.memory is None:
            kept = reserve_bytes(gpu, reserve)
            less = f", less {format_bytes(kept)} reserved" if kept else ""
            has = f"{gpu} has {format_bytes(gpu.total_bytes)}{less}"
        raise Misplaced(
            f"model {model.name!r} does not fit: its weights alone take {total}"
            f"{format_bytes(weights)} of each GPU, and {has}: "
            f"{format_bytes(weights - claim)} too few{_suggest(model, place, found, claim)}",
            *("models", index, "path" if model.memory is None else "memory"),
        )


def _suggest(model: ModelConfig, place: Assignment, found: Estimate, claim: int) -> str:
    """Return clauses on how weights that exceed a claim would fit, or ""."""
    ways = []
    each, needed = found.on_each_weights_bytes, found.on_each_weights_bytes + CONTEXT_BYTES
    parts = model.gpus_per_replica
    if model.engine == "transformers" and found.from_gguf:
        ways.append("engine llamacpp loads this file as it is, quantised")
    elif model.engine == "faster_whisper" and "compute_type" not in model.options:
        ways.append("`options: {compute_type: int8}` takes a byte for a number of the weights")
    elif _could_quantise(model) and each // 2 < claim:
        method = "int4" if place.gpus else "int8"
        ways.append(f"`options: {{quantization: {method}}}` at least halves the linear layers")
    elif model.engine == "vllm" and not _quantization(model) and each // 2 < claim:
        ways.append(f"`options: {{quantization: fp8}}` takes about {format_bytes(each // 2)}")
    count = parts
    while place.gpus and count < 8 and needed * parts > claim * count:
        count *= 2
    if count > parts and needed * parts <= claim * count:
        split = format_bytes(each * parts // count)
        ways.append(f"`gpus_per_replica: {count}` takes {split} of each GPU")
    ways.append("a smaller model, or a quantised one of it (AWQ, GPTQ, GGUF)")
    return f". What would fit: {'; '.join(ways)}"


def _could_quantise(model: ModelConfig) -> bool:
    """Return whether the transformers engine could quantise the weights, and does not."""
    plain = model.gpus_per_replica == 1 and not model.adapters and not get_method(model)
    return model.engine == "transformers" and plain


# ---------------------------------------------------------------- by format


def _of_folder(model: ModelConfig, place: Assignment, folder: Path) -> Estimate:
    if model.engine == "faster_whisper":
        asked = model.options.get("compute_type", "auto")
        asked = "default" if (asked, model.dtype) == ("auto", "auto") else asked
        kind = model.dtype if asked == "auto" else asked
        if not ctranslate2.is_model(folder):
            raise ValueError("it is no model of CTranslate2")
        file = folder / ctranslate2.FILE
        weights = ctranslate2.count_bytes(file, kind, on_gpu=bool(place.gpus))
        return _spread(model, place, weights, None, 0.0)
    config = _config(folder)
    elements = safetensors.elements(folder)
    floats = _float_bytes(model, place, config)
    weights = safetensors.count_bytes(elements, floats)
    if (method := get_method(model)) and floats:
        shapes = safetensors.read_shapes(folder)
        weights = weight_quantization.count_quantized_bytes(method, shapes, floats)
    if (folder / "modules.json").is_file():  # an embedding model has no KV cache
        return _spread(model, place, weights, None, 0.0)
    try:
        shape: Attention | None = kv_cache_shape.of_config(config)
    except ValueError:  # recurrent, or an unknown architecture
        shape = None
    quantised = "quantization_config" in config or _quantization(model)
    number = _BYTES.get(_stated_dtype(config), 2) if quantised or floats is None else floats
    whole = 0
    shared = len(place.gpus) > 1 and model.parallel != "device_map"
    if shared and model.engine == "transformers":
        whole = safetensors.count_bytes(safetensors.media_elements(folder), floats)
    cached = _cached_bytes(model, number)
    return _spread(model, place, weights, shape, number, cached=cached, whole=whole)


def _cached_bytes(model: ModelConfig, number: float) -> float:
    """Return the bytes of a number in the KV cache, where others take `number`."""
    passed = model.options.get("engine_args") or {}
    kind = str(passed.get("kv_cache_dtype") or model.options.get("cache_type") or "")
    return 1.0 if model.engine == "vllm" and kind.startswith("fp8") else number


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it has to be a JSON object")
    return found


def _of_gguf(model: ModelConfig, place: Assignment, path: Path) -> Estimate:
    file = gguf.read_gguf(path)
    shape = kv_cache_shape.of_gguf(file)
    if model.engine == "llamacpp":
        number = _CACHE_BYTES[str(model.options.get("cache_type", "f16"))]
        weights_bytes = file.weights_bytes - _host_experts_bytes(model, path)
        found = _spread(model, place, weights_bytes, shape, number, partly=True)
        return replace(found, weights_bytes=found.weights_bytes + _projector_bytes(model, path))
    stored = 4 if file.elements < _FLOAT32_BELOW else 2
    number = _BYTES.get(model.dtype, stored if place.gpus else 4)
    found = _spread(model, place, int(file.elements * number), shape, number)
    return replace(found, from_gguf=True)


def _host_experts_bytes(model: ModelConfig, path: Path) -> int:
    """Return the size of the experts that `cpu_moe_layers` keeps in the host's memory."""
    layers = model.options.get("cpu_moe_layers") or 0
    if not layers:
        return 0
    sizes = [gguf.read_header(part, part=True).sizes for part in gguf.parts(path)]
    return sum(
        size
        for found in sizes
        for name, size in found.items()
        if (expert := _EXPERT.match(name)) and int(expert[1]) < layers
    )


def _projector_bytes(model: ModelConfig, path: Path) -> int:
    """Return the size of the projector of a model in llama.cpp, which a replica has once.

    0 if it has none, or if that is not here yet.
    """
    named = model.options.get("mmproj")
    beside = [] if named is False else projector.find_projectors(path)
    files = beside if named is None else [Path(str(named))]
    return files[0].stat().st_size if len(files) == 1 and files[0].is_file() else 0


def _quantization(model: ModelConfig) -> str | None:
    """Return how vLLM quantises the weights while it loads them."""
    if model.engine != "vllm":
        return None
    passed = model.options.get("engine_args") or {}
    found: str | None = model.options.get("quantization") or passed.get("quantization")
    return found


def _float_bytes(model: ModelConfig, place: Assignment, config: Mapping[str, Any]) -> float | None:
    """Return the bytes of a number stored as a float; None: unconverted."""
    how = _quantization(model)
    if how and "quantization_config" not in config:  # quantised while loading: 8 or 4 bits
        return 1 if how == "fp8" else 0.5
    if model.dtype != "auto":
        return _BYTES[model.dtype]
    if not place.gpus:
        return 4
    if "quantization_config" in config:
        return None
    stated = _BYTES.get(_stated_dtype(config))
    return 2 if model.engine == "vllm" and stated == 4 else stated


def _stated_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config") or {}
    found = (one.get(key) for one in (config, text) for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, found), "")).removeprefix("torch.")


def _spread(
    model: ModelConfig,
    place: Assignment,
    weights: int,
    shape: Attention | None,
    number: float,
    *,
    cached: float | None = None,
    whole: int = 0,
    partly: bool = False,
) -> Estimate:
    """Divide among the GPUs: weights evenly, KV caches by heads, at least one per GPU.

    Of the weights, `whole` bytes are on each GPU. A number takes `number` bytes, and in the KV
    cache `cached`, by default the same.
    """
    stored = number if cached is None else cached
    count = max(1, len(place.gpus))
    context = 0
    if shape is not None:
        context = min(filter(None, (shape.max_context, model.max_context)), default=0)

    def size_of(tokens: int) -> int:
        latent = model.engine == "vllm"
        return 0 if shape is None else int(stored * shape.numbers(tokens, latent=latent))

    lengths = sorted({length for length in _LENGTHS if length < context} | {context} - {0})
    parts = count if shape is None else min(count, shape.kv_heads)
    return Estimate(
        weights_bytes=weights,
        kv_1k_bytes=size_of(1024),
        context=context,
        on_each_weights_bytes=whole + (weights - whole) // count,
        on_each_kv_bytes=size_of(context) // parts,
        on_each_workspace_bytes=_workspace(model, place, shape, number) if place.gpus else 0,
        on_each_requests=tuple((length, size_of(length) // parts) for length in lengths),
        partly=partly,
    )


def _workspace(
    model: ModelConfig, place: Assignment, shape: Attention | None, number: float
) -> int:
    """Return the workspace per GPU, by the transformers engine's own arithmetic.

    See `kv_cache.Shape.fixed_bytes`.
    """
    options = model.options
    size = CONTEXT_BYTES
    size += NCCL_BYTES if len(place.gpus) > 1 and model.engine != "llamacpp" else 0
    size += GRAPHS_BYTES if model.engine == "vllm" and not options.get("enforce_eager") else 0
    if shape is not None:
        batch = options.get("max_batch_tokens") or options.get("batch_tokens") or _BATCH_TOKENS
        slots = min(options.get("slots") or _SLOTS, batch)
        size += int(batch * number * (8 * shape.hidden + 4 * shape.heads_width))
        size += 4 * slots * shape.vocabulary * 4
    return size
