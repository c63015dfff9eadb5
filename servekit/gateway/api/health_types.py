"""The answers of /livez, /readyz and /version."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import MODEL, doc
from servekit.protocol.residency import Residency


class Live(Struct):
    """The answer of /livez."""

    status: Literal["ok"]


class Version(Struct):
    """The answer of /version."""

    version: Annotated[str, doc("servekit's version", "0.1.0")]


class LoadProgress(Struct):
    """The progress of a load."""

    phase: Annotated[str, doc("The current step")]
    done: Annotated[int, doc("How much is done")]
    total: Annotated[int, doc("How much there is; 0 if that is unknown")]
    unit: Annotated[Literal["bytes", "tensors", "steps", ""], doc("The unit of both counts")]


class ReplicaHealth(Struct):
    """A worker of a model."""

    name: Annotated[str, doc("The name of the worker", f"{MODEL}/0")]
    state: Annotated[str, doc("The state of the worker", "ready")]
    device: Annotated[str, doc("The device that the worker runs on", "cpu")]
    restarts: Annotated[int, doc("The number of restarts")]
    progress: Annotated[LoadProgress | None, doc("The progress of the load, while it loads")]
    reason: Annotated[str | None, doc("Why the worker failed, or died the last time")]


class ModelHealth(Struct):
    """The health of a model, and the state of its workers."""

    ready: Annotated[bool, doc("Whether a request can complete", True)]
    state: Annotated[str, doc("The best state of the model's workers", "ready")]
    running: Annotated[int, doc("The number of running requests", 1)]
    waiting: Annotated[int, doc("The number of requests in the queue")]
    replicas: Annotated[list[ReplicaHealth], doc("The workers of the model")]
    adapters: Annotated[
        dict[str, Literal["loading", "serving", "unloading", "failed"]],
        doc("The states of the model's adapters, by name", {"sql": "serving"}),
    ]
    residency: Annotated[Residency, doc("Where the weights are", "resident")]
    reason: Annotated[str | None, doc("Why a model that is loaded on demand has this residency")]


class Health(Struct):
    """The answer of /readyz, with status 200 and 503."""

    status: Annotated[
        Literal["ready", "not ready", "draining"], doc("The state of the service", "ready")
    ]
    models: dict[Annotated[str, doc("A model's name", MODEL)], ModelHealth] | UnsetType = UNSET
    """The models that the key may use, by name; left out without a key that is needed."""
