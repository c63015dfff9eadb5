"""Which worker runs on which GPUs. A pure function of the file and the machine.

    device   GPUs found   the model runs on
    cpu      any          the CPU
    cuda     some         GPUs, `gpus_per_replica` for each replica
    cuda     none         Misplaced
    auto     some         GPUs (engines that have no use for one: the CPU)
    auto     none         the CPU (where `gpus` names some, or the engine must have one: Misplaced)

First every model gets what it must have: its explicit number of replicas, or one. Then what is
left is dealt to the models with `replicas: auto` that are loaded on start, one at a time, always
to the one with the fewest.

Where each replica has one whole GPU, both steps look for augmenting paths (`matching`), so that a
placement is found whenever there is one, whatever GPUs the models insist on. Where models share
GPUs by `memory`, come and go, or have several GPUs each, it is searched for (`packing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.gpu_matching import match_whole
from servekit.supervisor.scheduling.memory_requests import Misplaced as Misplaced
from servekit.supervisor.scheduling.memory_requests import claims_of, least, most, settled
from servekit.supervisor.scheduling.shared_placement import share
from servekit.system.gpus import Gpu, Slot, match, on_node


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker's place: its GPUs, none for the CPU. `threads`: its share of the cores there."""

    model: str
    index: int
    gpus: Slot
    threads: int | None
    claims: tuple[int, ...] = ()  # bytes, of each of its GPUs
    elsewhere: int = 0  # GPUs of another machine, which the launcher gives

    @property
    def name(self) -> str:
        return f"{self.model}/{self.index}"

    @property
    def device(self) -> str:
        """As long as a launcher has not said on which."""
        if self.elsewhere:
            return f"{self.elsewhere} GPU{'s' * (self.elsewhere > 1)} of another machine"
        return device(self.gpus)


def place(
    models: Sequence[ModelConfig],
    gpus: Sequence[Gpu],
    cpus: int,
    held: Mapping[str, Sequence[Slot]] | None = None,
    reserve: str | None = None,
    counts: Mapping[str, int] | None = None,
) -> tuple[Assignment, ...]:
    """Give every worker a place, in the file's order. Raises Misplaced if they do not fit.

    `held` is where models have workers already: they stay, unless another could not be placed
    otherwise. `reserve` is what of each GPU no model gets. `counts` are the replicas that models
    with a range have now; without them they get the least.
    """
    wanted = {m.name: allowed(i, m, gpus) for i, m in enumerate(models) if _on_gpu(i, m, gpus)}
    threads = _threads(cpus, sum(most(m) for m in models if m.name not in wanted))
    models = settled(models, counts or {})
    if all(_has_whole_gpus(model) for model in models if model.name in wanted):
        slots = match_whole(models, wanted, gpus, held or {})
    else:
        slots = share(models, wanted, gpus, held or {}, reserve)
    placed: list[Assignment] = []
    for model in models:
        for index, slot in enumerate(slots.get(model.name) or [()] * least(model)):
            claims = claims_of(model, slot, reserve)
            placed.append(Assignment(model.name, index, slot, None if slot else threads, claims))
    return tuple(placed)


def placed_elsewhere(models: Sequence[ModelConfig], threads: int) -> tuple[Assignment, ...]:
    """As many workers of each model as it must have; a launcher says on which machine."""
    return tuple(Assignment(m.name, i, (), threads) for m in models for i in range(least(m)))


def _has_whole_gpus(model: ModelConfig) -> bool:
    alone = model.memory is None and model.load == "on_start"
    return alone and model.gpus_per_replica == 1


def device(gpus: Sequence[Gpu]) -> str:
    """ "cpu", "GPU 0 (NVIDIA H200)", "GPUs 0, 1 (NVIDIA H200) on 10.0.0.5"."""
    if len(gpus) < 2:
        return str(gpus[0]) if gpus else "cpu"
    kinds = dict.fromkeys(gpu.name for gpu in gpus)
    indexes = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPUs {indexes} ({', '.join(kinds)}){on_node(gpus[0].node)}"


def _on_gpu(index: int, model: ModelConfig, gpus: Sequence[Gpu]) -> bool:
    kind = KINDS[model.engine]
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
    """The GPUs that a model may use; `index` is its place in the file. Raises Misplaced."""
    if model.gpus is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for number, entry in enumerate(model.gpus):
        gpu = match(gpus, entry)
        if gpu is None:
            there = ", ".join(str(g) for g in gpus) or "no GPU at all"
            message = f"model {model.name!r} asks for GPU {entry!r}; there is {there}"
            raise Misplaced(message, "models", index, "gpus", number)
        if gpu not in found:
            found.append(gpu)
    return tuple(found)


def _threads(cpus: int, workers: int) -> int:
    # One core is left to the gateway and the rest: a CPU worker that fills every core makes
    # its own tokens wait for the process that sends them.
    return max(1, (cpus - 1) // max(1, workers))
