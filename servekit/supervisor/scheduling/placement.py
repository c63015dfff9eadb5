"""Placement of workers on GPUs, as a pure function of the configuration and the machine.

    device   GPUs found   the model runs on
    cpu      any          the CPU
    cuda     some         GPUs, `gpus_per_replica` for each replica
    cuda     none         Misplaced
    auto     some         GPUs (engines that cannot use one: the CPU)
    auto     none         the CPU (with `gpus`, or an engine that needs a GPU: Misplaced)

Every model first gets its minimum: its explicit number of replicas, or one. The remaining GPUs go
to the models with `replicas: auto` that are loaded on start, one at a time, always to the model
with the fewest.

Where each replica has one whole GPU, both steps search augmenting paths (`gpu_matching`), which
find a placement whenever one exists, whatever `gpus` the models name. Where models share GPUs by
`memory`, are loaded on demand, or have several GPUs each, `bin_packing` searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.config.engines.environments import find_kind_in_environment
from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.gpu_matching import match_whole
from servekit.supervisor.scheduling.memory_requests import (
    Assignment,
    Misplaced,
    claims_of,
    least,
    max_replicas,
    with_fixed_replicas,
)
from servekit.supervisor.scheduling.shared_placement import place_shared
from servekit.system.gpu.gpus import Gpu, Slot, match_gpu


def place(
    models: Sequence[ModelConfig],
    gpus: Sequence[Gpu],
    cpus: int,
    held: Mapping[str, Sequence[Slot]] | None = None,
    reserve: str | None = None,
    counts: Mapping[str, int] | None = None,
) -> tuple[Assignment, ...]:
    """Give every worker a place, in the file's order. Raises Misplaced if they do not fit.

    `held` are the current places of workers: they stay, unless another worker could not be placed
    otherwise. `reserve` is the part of each GPU that no model gets. `counts` are the current
    replicas of models with a range; the default is their minimum.
    """
    wanted = {m.name: allowed(i, m, gpus) for i, m in enumerate(models) if _on_gpu(i, m, gpus)}
    threads = _threads(cpus, sum(max_replicas(m) for m in models if m.name not in wanted))
    models = with_fixed_replicas(models, counts or {})
    if all(_has_whole_gpus(model) for model in models if model.name in wanted):
        slots = match_whole(models, wanted, gpus, held or {})
    else:
        slots = place_shared(models, wanted, gpus, held or {}, reserve)
    placed: list[Assignment] = []
    for model in models:
        for index, slot in enumerate(slots.get(model.name) or [()] * least(model)):
            claims = claims_of(model, slot, reserve)
            placed.append(Assignment(model.name, index, slot, None if slot else threads, claims))
    return tuple(placed)


def placed_elsewhere(models: Sequence[ModelConfig], threads: int) -> tuple[Assignment, ...]:
    """Return the minimum number of workers of each model; a launcher chooses their machines."""
    return tuple(Assignment(m.name, i, (), threads) for m in models for i in range(least(m)))


def _has_whole_gpus(model: ModelConfig) -> bool:
    alone = model.memory is None and model.load == "on_start"
    return alone and model.gpus_per_replica == 1


def _on_gpu(index: int, model: ModelConfig, gpus: Sequence[Gpu]) -> bool:
    kind = find_kind_in_environment(model)
    if kind.gpu_here == "must" and (model.device == "cpu" or not gpus):
        reason = "it asks for device: cpu" if gpus else "no NVIDIA GPU was found here"
        message = f"model {model.name!r}: the engine {model.engine} needs a GPU, and {reason}"
        raise Misplaced(message, "models", index, "engine")
    if model.device == "cpu":
        if model.gpus is not None:
            message = f"model {model.name!r} names GPUs but asks for device: cpu"
            raise Misplaced(message, "models", index, "gpus")
        return False
    if model.device == "cuda" and not gpus:
        raise Misplaced(
            f"model {model.name!r} asks for device: cuda, and no NVIDIA GPU was found here; "
            "write device: auto to fall back to the CPU",
            *("models", index, "device"),
        )
    return (
        model.device == "cuda"
        or model.gpus is not None
        or (bool(gpus) and kind.gpu_here != "never")
    )


def allowed(index: int, model: ModelConfig, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that a model may use; `index` is its place in the file. Raises Misplaced."""
    if model.gpus is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for number, entry in enumerate(model.gpus):
        gpu = match_gpu(gpus, entry)
        if gpu is None:
            there = ", ".join(str(g) for g in gpus) or "no GPU at all"
            message = f"model {model.name!r} asks for GPU {entry!r}; there is {there}"
            raise Misplaced(message, "models", index, "gpus", number)
        if gpu not in found:
            found.append(gpu)
    return tuple(found)


def _threads(cpus: int, workers: int) -> int:
    # One core is left to the gateway and other processes: a CPU worker that fills every core delays
    # the process that sends its tokens.
    return max(1, (cpus - 1) // max(1, workers))
