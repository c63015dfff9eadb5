"""Memory that a worker claims of each of its GPUs: as configured, or all that is available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servekit.config import memory
from servekit.config.scale import ReplicaRange
from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from servekit.system.gpus import Gpu


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


def most(model: ModelConfig) -> int:
    """Return the maximum number of replicas; `auto` on GPUs may get more."""
    return model.replicas.max if isinstance(model.replicas, ReplicaRange) else least(model)


def settled(models: Sequence[ModelConfig], counts: Mapping[str, int]) -> list[ModelConfig]:
    """Return the models with a fixed number of replicas in place of each range.

    The number is the current count in `counts`, or the minimum.
    """
    return [
        one
        if not isinstance(one.replicas, ReplicaRange)
        else one.model_copy(update={"replicas": one.replicas.held(counts.get(one.name, 0))})
        for one in models
    ]
