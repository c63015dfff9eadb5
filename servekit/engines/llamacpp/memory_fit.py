"""The number of layers on the GPU and the size of the KV cache that fit into memory.

They are computed from the file's header before the load, because llama.cpp itself fails on an
allocation, or ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from servekit.engines.llamacpp.library.bindings import CACHE_TYPES, count_outputs
from servekit.errors import LoadError
from servekit.model_metadata import kv_cache_shape
from servekit.model_metadata.gguf import Gguf, Header, read_header
from servekit.units import format_bytes

#: Fraction of the host's available memory for the cache; weights and other processes need the rest.
HOST_FRACTION = 0.4
#: Cache per slot on a CPU; more only costs memory, because a CPU cannot decode that much at once.
HOST_TOKENS_PER_SLOT = 512
#: Kept free on each GPU for the CUDA context, workspaces of its libraries, and fragmentation.
HEADROOM_BYTES = 704 * 2**20
#: Bytes of the attention mask per token of a pass and cached token; each GPU has the whole mask.
_MASK_BYTES = 2
#: Passes in flight if layers are spread over GPUs: GGML_SCHED_MAX_COPIES.
_SPREAD_COPIES = 4
#: The smallest useful context.
LEAST_CONTEXT = 16
#: llama.cpp rounds contexts up to a multiple of it.
_ALIGNMENT = 256
#: Vocabulary size of a model that does not state it.
_VOCABULARY = 150_000
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Shape:
    """The memory needs of a model, in bytes."""

    architecture: str
    layers: tuple[int, ...]  # weights of each layer
    output: int  # weights that are on the GPU only if all layers are
    weights: int  # all weights
    cached: int  # cache of one token in one layer, on average
    activations: int  # activations of one token in a pass
    vocabulary: int  # logits of one token
    own_context: int


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The limits set by the configuration and the machine."""

    slots: int
    batch: int  # tokens in one pass
    max_context: int | None
    gpu_layers: int | None
    cache_type: str
    budgets: tuple[int, ...]  # bytes on each GPU; empty on a CPU
    host_bytes: int  # available memory of the host
    speculates: bool = False
    draft: Shape | None = None  # of a draft model, whose cache has as many tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned layers and context. `context` is the capacity of all sequences together.

    `cache_bytes` includes the draft model's cache.
    """

    gpu_layers: int
    max_context: int
    context: int
    cache_bytes: int
    whole_on_gpu: bool = False
    cpu_moe_layers: int = 0


def read_parts(path: Path) -> list[Header]:
    """Read the headers of all files of a model. Raises LoadError."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [read_header(path)]
    if found[2] != "00001":
        raise LoadError(f"{path} is one part of a model; name the first, {found[1]}-00001-of-….")
    names = [f"{found[1]}-{n:05d}-of-{found[3]}.gguf" for n in range(1, int(found[3]) + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise LoadError(f"{path} is one of {len(names)} parts, and {missing[0]} is missing.")
    return [read_header(path.parent / name, part=True) for name in names]


def shape_of(headers: Sequence[Header], cache_type: str, cpu_moe_layers: int = 0) -> Shape:
    """Compute the memory needs from the headers of all parts; the first has the metadata.

    The experts of the first `cpu_moe_layers` layers are no part of the layers' weights. Raises
    LoadError if there are none.
    """
    sizes = {name: size for header in headers for name, size in header.sizes.items()}
    file = Gguf(headers[0].metadata, sum(h.parameters for h in headers), sum(sizes.values()))

    def stated(key: str) -> int:
        value = file.of_architecture(key)
        return int(value) if isinstance(value, int | float) else 0

    layers, experts = [0] * max(stated("block_count"), 1), 0
    for name, size in sizes.items():
        block = _BLOCK.match(name)
        if block is None or int(block[1]) >= len(layers):
            continue
        if "exps." in name and int(block[1]) < cpu_moe_layers:
            experts += size
        else:
            layers[int(block[1])] += size
    if cpu_moe_layers and not experts:
        raise LoadError("options.cpu_moe_layers: this model has no experts; leave it out.")
    width, embedding = stated("embedding_length"), sizes.get("token_embd.weight", 0)
    return Shape(
        architecture=headers[0].architecture,
        layers=tuple(layers),
        output=sizes.get("output.weight", embedding),
        weights=file.weights_bytes,
        cached=int(_cached_elements(file) / len(layers) * CACHE_TYPES[cache_type][1]),
        activations=4 * (8 * width + 2 * (stated("feed_forward_length") or 4 * width)),
        vocabulary=4 * (stated("vocab_size") or _VOCABULARY),
        own_context=stated("context_length"),
    )


def _cached_elements(file: Gguf) -> int:
    """Return the cached elements per token in all layers; 0 for a recurrent model."""
    try:
        return kv_cache_shape.of_gguf(file).numbers(1)
    except ValueError:
        return 0


def fit_memory(shape: Shape, options: FitOptions) -> MemoryPlan:
    """Plan the layers and context that fit.

    Raises LoadError with the calculation if nothing does.
    """
    own = shape.own_context or 8192
    context = min(own, options.max_context or own)
    if options.budgets:
        return _on_gpus(shape, options, context)
    room = int(HOST_FRACTION * options.host_bytes) // max(_token_bytes(shape, options), 1)
    useful = max(options.slots * HOST_TOKENS_PER_SLOT, context)
    return _make_plan(shape, options, 0, context, min(useful, room))


def _on_gpus(shape: Shape, options: FitOptions, context: int) -> MemoryPlan:
    """Plan all layers if they fit with the cache of one full context; otherwise as many as fit."""
    count = len(shape.layers)
    room = sum(max(0, budget - _workspace_bytes(shape, options)) for budget in options.budgets)
    room = max(0, room - (options.draft.weights if options.draft else 0))
    per_layer = shape.cached * context
    masks = _mask_bytes(options) + _draft_token_bytes(options)
    layers = options.gpu_layers
    if layers is None:
        whole = sum(shape.layers) + shape.output + (per_layer * count + masks * context)
        some = room - masks * context
        layers = count + 1 if whole <= room else _layers_that_fit(shape, some, per_layer)
    on_gpu = sum(shape.layers[count - layers :] if layers < count else shape.layers)
    on_gpu += shape.output if layers > count else 0
    cached = shape.cached * min(layers, count)
    tokens = max(0, room - on_gpu) // (cached + masks) if cached else options.slots * context
    if on_gpu > room:
        raise LoadError(
            f"{layers} layers of {format_bytes(on_gpu)} do not fit: of "
            f"{format_bytes(sum(options.budgets))} on the GPU there are {format_bytes(room)} for "
            "weights. Lower options.gpu_layers, or raise `memory`."
        )
    return _make_plan(shape, options, layers, context, min(tokens, options.slots * context))


def _layers_that_fit(shape: Shape, room: int, per_layer: int) -> int:
    """Count the layers that fit from the last one on, as llama.cpp does."""
    fitting = 0
    for size in reversed(shape.layers):
        room -= size + per_layer
        if room < 0:
            break
        fitting += 1
    return fitting


def _make_plan(
    shape: Shape, options: FitOptions, gpu_layers: int, context: int, tokens: int
) -> MemoryPlan:
    if tokens < context and options.max_context is not None:
        raise LoadError(
            f"A context of {context} tokens takes "
            f"{format_bytes(context * _token_bytes(shape, options))} of "
            f"cache, and there is room for {tokens} tokens. Lower max_context, or "
            "options.cache_type."
        )
    context = min(context, tokens)
    if context < LEAST_CONTEXT:
        raise LoadError(f"Memory is enough for a context of {context} tokens only.")
    tokens = -(-tokens // _ALIGNMENT) * _ALIGNMENT
    whole = gpu_layers > len(shape.layers)
    return MemoryPlan(gpu_layers, context, tokens, tokens * _token_bytes(shape, options), whole)


def _token_bytes(shape: Shape, options: FitOptions) -> int:
    """Return the bytes of one cached token in all layers, of the model and of its draft."""
    return shape.cached * len(shape.layers) + _draft_token_bytes(options)


def _draft_token_bytes(options: FitOptions) -> int:
    return options.draft.cached * len(options.draft.layers) if options.draft else 0


def _workspace_bytes(shape: Shape, options: FitOptions) -> int:
    """Return the bytes on each GPU besides weights, cache and what grows with the cache."""
    logits = count_outputs(options.slots, speculates=options.speculates) * shape.vocabulary
    size = HEADROOM_BYTES + options.batch * shape.activations + logits
    if options.draft is not None:
        outputs = count_outputs(options.slots, speculates=False)
        size += options.batch * options.draft.activations + outputs * options.draft.vocabulary
    return size


def _mask_bytes(options: FitOptions) -> int:
    """Return the bytes of masks per cached token, on all GPUs."""
    copies = _SPREAD_COPIES if len(options.budgets) > 1 else 1
    models = 1 if options.draft is None else 2
    return _MASK_BYTES * options.batch * copies * len(options.budgets) * models
