"""Loading of a model from a worker's spec: fetch the file, fit it into memory, load it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from servekit.engines.api.base import Report
from servekit.engines.api.cpu_threads import count_threads
from servekit.engines.api.load_phases import phase
from servekit.engines.api.speculation import get_speculation
from servekit.engines.llamacpp import memory_fit
from servekit.engines.llamacpp.draft_model import Draft, check_draft
from servekit.engines.llamacpp.library.bindings import POOLINGS, Binding, Settings, open_binding
from servekit.engines.llamacpp.media.mtmd import Projector
from servekit.engines.llamacpp.media.projector_loading import find_projector, load_projector
from servekit.engines.llamacpp.model import Context, Model
from servekit.engines.model_files.source import resolve_file
from servekit.errors import LoadError
from servekit.model_metadata.gguf import Header
from servekit.model_metadata.projector import estimate_bytes
from servekit.protocol.messages import Progress, WorkerSpec
from servekit.system import cgroup
from servekit.units import format_bytes

#: Tokens in one pass. Small on a CPU, so that a long prompt does not hold up other requests.
CPU_BATCH_TOKENS = 256
CUDA_BATCH_TOKENS = 2048
SLOTS = 8
EMBEDDING_SLOTS = 32
#: More layers than any model has.
_ALL_LAYERS = 10_000
_DOTS = 100
#: Tensors of a classifier, of which a model that ranks has some.
HEADS = frozenset({"cls.weight", "cls.output.weight"})
#: Pooling types that a file may name, by llama.cpp's number.
_KNOWN_POOLINGS = frozenset(POOLINGS.values()) - {POOLINGS["none"]}


@dataclass(frozen=True)
class Loaded:
    """A loaded model with its context and settings."""

    binding: Binding
    model: Model
    context: Context
    plan: memory_fit.MemoryPlan
    header: Header
    pooling: int | None  # pooling type of embeddings; None: the model generates
    projector: Projector | None = None  # of a model that reads images or recordings
    draft: Draft | None = None  # of a model that decodes speculatively, with a smaller one

    def close(self) -> None:
        self.context.close()
        if self.draft is not None:
            self.draft.close()
        if self.projector is not None:
            self.projector.close()
        self.model.close()


def load_from_spec(spec: WorkerSpec, report: Report) -> Loaded:
    """Fetch and load a model. Raises LoadError."""
    with phase("files"):
        path = resolve_file(spec.path, spec.revision, report)
        headers = memory_fit.read_parts(path)
    with phase("library"):
        name = str(spec.options.get("binding", "auto"))
        binding = open_binding(name, spec.options.get("library"))
    if spec.device == "cuda" and not binding.library.call("llama_supports_gpu_offload"):
        raise LoadError(f"{binding.without_gpu} Or say `device: cpu`.")
    pooling = _choose_pooling(headers[0], spec)
    drafts = _find_draft(spec, pooling, report)
    media = None if pooling is not None else find_projector(path, headers[0], spec, report)
    plan = _plan_memory(binding, headers, spec, pooling, media and media[1], drafts)
    settings = _make_settings(path, plan, spec, pooling)
    with ExitStack() as opened:
        with phase("weights", file=str(path)):
            model = _load_model(binding, settings, spec, report)
            opened.callback(model.close)
        if get_speculation(spec) is not None and not model.rewinds:
            raise LoadError(
                "options.speculative: this model is recurrent, and proposed tokens cannot be taken "
                "back out of its state. Leave it out."
            )
        projector = media and load_projector(binding, media[0], model, settings, spec)
        if projector:
            opened.callback(projector.close)
        draft = None
        if drafts is not None:
            draft = _load_draft(binding, drafts, model, settings, spec, report)
            opened.callback(draft.close)
        with phase("cache"):
            context = _new_context(binding, model, settings, plan.cache_bytes)
        opened.pop_all()
    return Loaded(binding, model, context, plan, headers[0], pooling, projector, draft)


# ---------------------------------------------------------------- what is wanted


def _choose_pooling(header: Header, spec: WorkerSpec) -> int | None:
    """Return the pooling type of the configuration, or else of the file; None: it generates."""
    asked = spec.options.get("pooling", "auto")
    has_head = not HEADS.isdisjoint(header.sizes)
    if asked == "rank" and not has_head:
        raise LoadError("This file has no head to rank with; leave options.pooling out.")
    if asked != "auto":
        return None if asked == "none" else POOLINGS[asked]
    stated = header.metadata.get(f"{header.architecture}.pooling_type")
    if stated is None:
        return None
    if int(stated) not in _KNOWN_POOLINGS or (int(stated) == POOLINGS["rank"] and not has_head):
        return _no_pooling(header)
    return int(stated)


def _no_pooling(header: Header) -> int | None:
    if header.metadata.get(f"{header.architecture}.attention.causal") is False:
        raise LoadError(
            "This file neither generates nor says how to make embeddings; say options.pooling."
        )
    return None


def _count_slots(spec: WorkerSpec, pooling: int | None) -> int:
    return int(spec.options.get("slots") or (SLOTS if pooling is None else EMBEDDING_SLOTS))


def _count_batch_tokens(spec: WorkerSpec, pooling: int | None) -> int:
    """Return the tokens per pass, at least the slots: each slot has a token in every pass."""
    default = CPU_BATCH_TOKENS if spec.device == "cpu" else CUDA_BATCH_TOKENS
    return max(int(spec.options.get("batch_tokens") or default), _count_slots(spec, pooling))


def _plan_memory(
    binding: Binding,
    headers: list[Header],
    spec: WorkerSpec,
    pooling: int | None,
    projector: Header | None,
    drafts: DraftFile | None,
) -> memory_fit.MemoryPlan:
    cache_type = _cache_type(spec)
    most_tokens = spec.options.get("image_max_tokens")
    taken = 0 if projector is None else estimate_bytes(projector, most_tokens)
    options = memory_fit.FitOptions(
        slots=_count_slots(spec, pooling),
        batch=_count_batch_tokens(spec, pooling),
        max_context=spec.max_context,
        gpu_layers=spec.options.get("gpu_layers"),
        cache_type=cache_type,
        budgets=reserve_bytes(_gpu_budgets(binding, spec), taken),
        host_bytes=max(0, cgroup.available_memory_bytes() - taken),
        speculates=get_speculation(spec) is not None,
        draft=None if drafts is None else memory_fit.shape_of(drafts.headers, cache_type),
    )
    moe_layers = spec.options.get("cpu_moe_layers") or 0
    shape = memory_fit.shape_of(headers, cache_type, moe_layers)
    plan = memory_fit.fit_memory(shape, options)
    return dataclasses.replace(plan, cpu_moe_layers=min(moe_layers, len(shape.layers)))


def _gpu_budgets(binding: Binding, spec: WorkerSpec) -> tuple[int, ...]:
    """Return the memory for each GPU in bytes: the free memory, limited by the worker's claim."""
    if spec.device == "cpu":
        return ()
    free = binding.library.free_bytes()
    if not free:
        raise LoadError(f"{binding.library.binding} finds no GPU.", permanent=False)
    return tuple(min(one, spec.memory_bytes or one) for one in free[: spec.gpus])


def reserve_bytes(budgets: tuple[int, ...], taken: int) -> tuple[int, ...]:
    """Take the projector's memory from the first GPU, on which llama.cpp puts it."""
    return tuple(max(0, one - (taken if at == 0 else 0)) for at, one in enumerate(budgets))


def _cache_type(spec: WorkerSpec) -> str:
    return str(spec.options.get("cache_type", "f16"))


def _make_settings(
    path: Path, plan: memory_fit.MemoryPlan, spec: WorkerSpec, pooling: int | None
) -> Settings:
    options: dict[str, Any] = spec.options
    batch = _count_batch_tokens(spec, pooling)
    return Settings(
        path=str(path),
        gpu_layers=plan.gpu_layers,
        split=str(options.get("split", "layer")),
        context=plan.context,
        # A text to embed must fit into one pass.
        batch=batch if pooling is None else max(batch, plan.max_context),
        sequences=_count_slots(spec, pooling),
        threads=count_threads(options.get("threads"), on_gpu=plan.whole_on_gpu),
        flash_attention=str(options.get("flash_attention", "auto")),
        cache_type=_cache_type(spec),
        pooling=pooling,
        cpu_moe_layers=plan.cpu_moe_layers,
        speculates=get_speculation(spec) is not None,
    )


# ---------------------------------------------------------------- the load


def _load_model(binding: Binding, settings: Settings, spec: WorkerSpec, report: Report) -> Model:
    report(Progress("load", 0, _DOTS, "steps"))
    library = binding.library
    library.log.listen(_progress_counter(report))
    address = binding.load_model(settings)
    if not address:
        raise LoadError(f"llama.cpp cannot load {settings.path}: {library.log.complaints}.")
    library.log.listen()
    report(Progress("load", _DOTS, _DOTS, "steps"))
    model = Model(library, address)
    if settings.pooling is None and model.encodes:
        model.close()
        raise LoadError(
            f"{settings.path} is an encoder with a decoder, which engine llamacpp does not run."
        )
    return model


def _progress_counter(report: Report) -> Callable[[], None]:
    """Return a callback that reports progress: llama.cpp logs a dot per percent of the tensors."""
    done = 0

    def count() -> None:
        nonlocal done
        done = min(done + 1, _DOTS)
        report(Progress("load", done, _DOTS, "steps"))

    return count


def _new_context(binding: Binding, model: Model, settings: Settings, cache_bytes: int) -> Context:
    address = binding.new_context(model.address, settings)
    if not address:
        raise LoadError(
            f"llama.cpp makes no context of {settings.context} tokens "
            f"({format_bytes(cache_bytes)} of cache): {binding.library.log.complaints}."
        )
    return Context(binding, model, address, settings)


# ---------------------------------------------------------------- a draft model


@dataclass(frozen=True)
class DraftFile:
    """The file of a draft model; `name` is for messages."""

    name: str
    path: Path
    headers: list[Header]


def _find_draft(spec: WorkerSpec, pooling: int | None, report: Report) -> DraftFile | None:
    """Fetch the draft model that the options name, if they do. Raises LoadError."""
    speculation = get_speculation(spec)
    if speculation is not None and pooling is not None:
        raise LoadError(f"options.speculative is for text, and {spec.model} generates none.")
    if speculation is None or speculation.model is None:
        return None
    name = f"the draft model {speculation.model}"
    with phase("files"):
        path = resolve_file(speculation.model, None, report)
        headers = memory_fit.read_parts(path)
    try:
        generates = _choose_pooling(headers[0], structs.replace(spec, options={})) is None
    except LoadError:
        generates = False
    if not generates:
        raise LoadError(f"{name} generates no text.")
    return DraftFile(name, path, headers)


def _load_draft(
    binding: Binding,
    file: DraftFile,
    model: Model,
    settings: Settings,
    spec: WorkerSpec,
    report: Report,
) -> Draft:
    """Load a draft model whose cache has as many tokens and sequences as the model's."""
    own = dataclasses.replace(
        settings,
        path=str(file.path),
        gpu_layers=_ALL_LAYERS if spec.device == "cuda" else 0,
        cpu_moe_layers=0,
        speculates=False,
    )
    with phase("weights", file=own.path):
        draft = _load_model(binding, own, spec, report)
    try:
        check_draft(draft, model.vocabulary, file.name)
        shape = memory_fit.shape_of(file.headers, settings.cache_type)
        cache_bytes = shape.cached * len(shape.layers) * settings.context
        context = _new_context(binding, draft, own, cache_bytes)
    except LoadError:
        draft.close()
        raise
    return Draft(draft, context, shape.own_context or context.capacity)
