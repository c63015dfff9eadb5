"""The specification that a worker loads, made from the configuration and its place."""

from __future__ import annotations

import hashlib
import json

from servekit.config.engines.options import KINDS
from servekit.config.engines.path_options import list_paths
from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import WorkerSpec
from servekit.protocol.types import Parallel
from servekit.supervisor.scheduling.memory_requests import Assignment, host_claim_bytes
from servekit.system import cgroup


def make_worker_spec(
    model: ModelConfig, place: Assignment, socket: str, adapters: tuple[AdapterSpec, ...] = ()
) -> WorkerSpec:
    """Return what the worker is to load, and how."""
    on_gpus = bool(place.gpus or place.elsewhere)
    return WorkerSpec(
        name=place.name,
        model=model.name,
        engine=model.engine,
        path=model.path,
        revision=model.revision,
        device="cuda" if on_gpus else "cpu",
        dtype=model.dtype,
        max_context=model.max_context,
        trust_remote_code=model.trust_remote_code,
        sampling=model.sampling.model_dump(exclude_none=True),
        options=model.engine_options().model_dump(exclude_none=True),
        socket=socket,
        tool_parser="" if model.tool_parser == "auto" else model.tool_parser,
        reasoning_parser="" if model.reasoning_parser == "auto" else model.reasoning_parser,
        adapters=adapters,
        gpus=count_devices(model, place),
        parallel=choose_parallel(model, place),
        memory_bytes=_limit_memory(model, place),
        host_memory_bytes=0 if on_gpus else host_claim_bytes(model, cgroup.total_memory_bytes()),
        sleeps=model.idle_sleep_s is not None,
        edition=digest_settings(model),
        chat_template=model.chat_template or "",
        files=_list_files(model),
    )


def digest_settings(model: ModelConfig) -> str:
    """Return a digest of the settings that determine a model's text, the first part of its
    generation.

    Memory, slots and places are left out: they do not change the text.
    """
    sampling = model.sampling.model_dump(exclude_none=True)
    sampling.pop("max_tokens", None)  # a length, which is fixed when an answer begins
    said = (
        *(model.engine, model.path, model.revision, model.dtype, model.trust_remote_code),
        *(model.tool_parser, model.reasoning_parser, model.chat_template, sampling, model.python),
        _options_of_text(model),
    )
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _options_of_text(model: ModelConfig) -> dict[str, object]:
    """Return the options that may change the generated text."""
    neutral = KINDS[model.engine].neutral
    found: dict[str, object] = {}
    for name, value in model.engine_options().model_dump(exclude_none=True).items():
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if f"{name}.{key}" not in neutral}
            if not value:
                continue
        if name not in neutral:
            found[name] = value
    return found


def _list_files(model: ModelConfig) -> tuple[str, ...]:
    """Return the files and folders among the options that may change the generated text."""
    kind = KINDS[model.engine]
    found = list_paths(kind.options, model.options)
    return tuple(path for place, path in found if place[0] not in kind.neutral)


def choose_parallel(model: ModelConfig, place: Assignment) -> Parallel:
    """Return how its engine spreads it over its devices; "" for one device."""
    return _choose_mode(model) if count_devices(model, place) > 1 else ""


def count_devices(model: ModelConfig, place: Assignment) -> int:
    """Return the number of devices over which its engine spreads it.

    On a CPU these are processes, one per device: a configuration for GPUs can be tried without any.
    """
    if place.gpus or place.elsewhere:
        return len(place.gpus) or place.elsewhere
    return model.gpus_per_replica if _choose_mode(model) == "tensor" else 1


def _choose_mode(model: ModelConfig) -> Parallel:
    known = KINDS[model.engine].parallel
    if model.parallel == "auto":
        return known[0] if known else ""
    return model.parallel if model.parallel in known else ""


def _limit_memory(model: ModelConfig, place: Assignment) -> int:
    """Return the bytes it may take of each GPU; 0 for all that it finds free.

    On a GPU without a reserve, a claim on the whole GPU is no limit.
    """
    whole = all(c >= gpu.total_bytes for c, gpu in zip(place.claims, place.gpus, strict=False))
    return 0 if model.memory is None and whole else min(place.claims, default=0)
