"""The place of a worker, and the memory that it claims there: as configured, or all there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.config import memory
from servekit.config.schema import ModelConfig
from servekit.config.sections.scale import ReplicaRange
from servekit.errors import ConfigError
from servekit.system.gpu.gpus import Gpu, Slot, on_node
from servekit.units import format_bytes

#: A CUDA context with the kernels of torch's linear algebra.
CONTEXT_BYTES = 640 * 2**20


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of one worker: its GPUs (none: the CPU) and its number of CPU threads."""

    model: str
    index: int
    gpus: Slot
    threads: int | None
    claims: tuple[int, ...] = ()  # bytes, by GPU in `gpus`
    elsewhere: int = 0  # number of GPUs on another machine, which the launcher chooses

    @property
    def name(self) -> str:
        return f"{self.model}/{self.index}"

    @property
    def device(self) -> str:
        """The device as text; of a remote worker, until its launcher has placed it."""
        if self.elsewhere:
            return f"{self.elsewhere} GPU{'s' * (self.elsewhere > 1)} of another machine"
        return device(self.gpus)


def device(gpus: Sequence[Gpu]) -> str:
    """Return such as "cpu", "GPU 0 (NVIDIA H200)" or "GPUs 0, 1 (NVIDIA H200) on 10.0.0.5"."""
    if len(gpus) < 2:
        return str(gpus[0]) if gpus else "cpu"
    kinds = dict.fromkeys(gpu.name for gpu in gpus)
    indexes = ", ".join(str(gpu.index) for gpu in gpus)
    return f"GPUs {indexes} ({', '.join(kinds)}){on_node(gpus[0].node)}"


class Misplaced(ConfigError):
    """The models do not fit this machine. `loc` is the path of the offending value in the file."""

    def __init__(self, message: str, *loc: str | int) -> None:
        super().__init__(message)
        self.loc = loc


def reserve_bytes(gpu: Gpu, reserve: str | None) -> int:
    """Return the bytes of a GPU that `gpus.reserve` keeps for other programs."""
    return (
        0
        if reserve is None
        else min(gpu.total_bytes, memory.memory_bytes(reserve, gpu.total_bytes))
    )


def room_bytes(gpu: Gpu, reserve: str | None) -> int:
    """Return the bytes of a GPU that all models together may claim."""
    return gpu.total_bytes - reserve_bytes(gpu, reserve)


def claim_bytes(model: ModelConfig, gpu: Gpu, reserve: str | None) -> int:
    """Return the bytes that one worker of `model` claims of `gpu`; without `memory`, all of it."""
    if model.memory is None:
        return room_bytes(gpu, reserve)
    return memory.memory_bytes(model.memory, gpu.total_bytes)


def claims_of(model: ModelConfig, slot: Sequence[Gpu], reserve: str | None) -> tuple[int, ...]:
    """Return the claim of one worker on each GPU of a slot."""
    return tuple(claim_bytes(model, gpu, reserve) for gpu in slot)


def host_claim_bytes(model: ModelConfig, total_bytes: int) -> int:
    """Return the host memory that one CPU worker of `model` claims; 0 if not configured.

    `total_bytes` is the host's memory, 0 where unknown.
    """
    return 0 if model.memory is None else memory.memory_bytes(model.memory, total_bytes)


def least(model: ModelConfig) -> int:
    """Return the minimum number of replicas."""
    if isinstance(model.replicas, ReplicaRange):
        return model.replicas.least
    return 1 if model.replicas == "auto" else model.replicas


def max_replicas(model: ModelConfig) -> int:
    """Return the maximum number of replicas; `auto` on GPUs may get more."""
    return model.replicas.max if isinstance(model.replicas, ReplicaRange) else least(model)


def with_fixed_replicas(
    models: Sequence[ModelConfig], counts: Mapping[str, int]
) -> list[ModelConfig]:
    """Return the models with a fixed number of replicas in place of each range.

    The number is the current count in `counts`, or the minimum.
    """
    return [
        one
        if not isinstance(one.replicas, ReplicaRange)
        else one.model_copy(update={"replicas": one.replicas.clamp(counts.get(one.name, 0))})
        for one in models
    ]


def check_host_memory(
    models: Sequence[ModelConfig], places: Sequence[Assignment], total_bytes: int
) -> None:
    """Raise Misplaced, with the arithmetic, for the first CPU model that does not fit.

    Models loaded on start have to fit side by side, each model loaded on demand beside them. A
    `total_bytes` of 0 means unknown, and nothing is checked.
    """
    if not total_bytes:
        return
    rows = [
        (index, m, _claim_host_memory(m, places, total_bytes)) for index, m in enumerate(models)
    ]
    beside: list[tuple[str, int]] = []
    for index, model, claim in sorted(rows, key=lambda row: not _loads_on_start(row[1])):
        _fit_beside(index, model, claim, beside, total_bytes)
        if _loads_on_start(model) and claim:
            beside.append((model.name, claim))


def _fit_beside(
    index: int, model: ModelConfig, claim: int, beside: Sequence[tuple[str, int]], total_bytes: int
) -> None:
    """Raise Misplaced unless the claim fits beside the others."""
    short = claim + sum(size for _, size in beside) - total_bytes
    if claim and short > 0:
        less = "".join(f", less {format_bytes(size)} of {name}" for name, size in beside)
        message = f"model {model.name!r} claims {format_bytes(claim)} of this machine's memory, "
        message += f"which has {format_bytes(total_bytes)}{less}: {format_bytes(short)} too much"
        raise Misplaced(message, "models", index, "memory")


def _claim_host_memory(model: ModelConfig, places: Sequence[Assignment], total_bytes: int) -> int:
    """Return the claim of all CPU replicas of a model; 0 where the configuration has none."""
    replicas = sum(place.model == model.name and not place.gpus for place in places)
    return replicas * host_claim_bytes(model, total_bytes)


def _loads_on_start(model: ModelConfig) -> bool:
    return model.load == "on_start"
