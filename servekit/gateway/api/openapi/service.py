"""The service's own answers: liveness, readiness and version."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from servekit.protocol.residency import Residency


class Live(Struct):
    """The gateway answers."""

    status: Literal["ok"]


class Version(Struct):
    """servekit's version."""

    version: str


class LoadProgress(Struct):
    """How far a load is; `total` is 0 where that is not known."""

    phase: str
    done: int
    total: int
    unit: Literal["bytes", "tensors", "steps", ""]


class ReplicaHealth(Struct):
    """One worker of a model."""

    name: str
    state: str
    device: str
    restarts: int
    progress: LoadProgress | None
    reason: str | None


class ModelHealth(Struct):
    """Whether a model serves, and what each of its workers is doing."""

    ready: bool
    state: str
    running: int
    waiting: int
    replicas: list[ReplicaHealth]
    adapters: dict[str, Literal["loading", "serving", "unloading", "failed"]]
    residency: Residency
    reason: str | None  # why it is where it is, where it comes and goes


class Health(Struct):
    """The answer of /readyz, with 200 and with 503. With keys, `models` are those of the key."""

    status: Literal["ready", "not ready", "draining"]
    models: dict[str, ModelHealth] = {}
