"""What a worker claims of each of its GPUs: what the file says, or else all that is to be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.config import memory
from servekit.config.scale import ReplicaRange
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from servekit.system.gpus import Gpu


class Misplaced(ConfigError):
    """The models do not fit this machine. `loc` leads to the value to blame in the file."""

    def __init__(self, message: str, *loc: str | int) -> None:
        super().__init__(message)
        self.loc = loc


def gib(size_bytes: int) -> str:
    """For people; what would be 0.0 GiB in smaller units."""
    if 0 < size_bytes < 2**30 / 20:
        return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes} bytes"
    return f"{size_bytes / 2**30:.1f} GiB"


def reserve_bytes(gpu: Gpu, reserve: str | None) -> int:
    """What `gpus.reserve` keeps of a GPU for other programs."""
    return 0 if reserve is None else min(gpu.total_bytes, memory.of(reserve, gpu.total_bytes))


def room_bytes(gpu: Gpu, reserve: str | None) -> int:
    """What models may claim of a GPU, all together."""
    return gpu.total_bytes - reserve_bytes(gpu, reserve)


def claim_bytes(model: ModelConfig, gpu: Gpu, reserve: str | None) -> int:
    """What one worker of `model` claims of `gpu`. Without `memory`, the whole of it."""
    if model.memory is None:
        return room_bytes(gpu, reserve)
    return memory.of(model.memory, gpu.total_bytes)


def claims_of(model: ModelConfig, slot: Sequence[Gpu], reserve: str | None) -> tuple[int, ...]:
    """The same of each GPU of a slot."""
    return tuple(claim_bytes(model, gpu, reserve) for gpu in slot)


def host_claim_bytes(model: ModelConfig, total_bytes: int) -> int:
    """What one worker of `model` on the CPU claims of the host's memory; 0: the file does not say.

    `total_bytes` is how much the host has, 0 where that is not known.
    """
    return 0 if model.memory is None else memory.of(model.memory, total_bytes)


def least(model: ModelConfig) -> int:
    """Replicas that it must have."""
    if isinstance(model.replicas, ReplicaRange):
        return model.replicas.least
    return 1 if model.replicas == "auto" else model.replicas


def most(model: ModelConfig) -> int:
    """Replicas that it may have; of `auto` on GPUs there may be more yet."""
    return model.replicas.max if isinstance(model.replicas, ReplicaRange) else least(model)


def settled(models: Sequence[ModelConfig], counts: Mapping[str, int]) -> list[ModelConfig]:
    """With a number of replicas for each that scales: what it has now, by `counts`, or the least.

    Then a number is all that there is to place.
    """
    return [
        one
        if not isinstance(one.replicas, ReplicaRange)
        else one.model_copy(update={"replicas": one.replicas.held(counts.get(one.name, 0))})
        for one in models
    ]
