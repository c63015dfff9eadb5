"""What the supervisor knows, as the messages that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servekit.supervisor.fleet import Fleet
from servekit.supervisor.life import Life
from servekit.wire.messages import ModelStatus, Refused, Why


def of_model(fleet: Fleet, created: int) -> ModelStatus:
    """One model; what it can do is known from the newest replica that came up."""
    model, replicas = fleet.model, fleet.replicas
    known = [replica.info for replica in replicas if replica.info is not None]
    return ModelStatus(
        name=model.name,
        engine=model.engine,
        path=model.path,
        created=created,
        replicas=tuple(replica.status() for replica in replicas),
        info=known[-1] if known else None,
        aliases=model.aliases,
        timeout_s=model.timeout_s,
        max_queue=model.max_queue,
        quarantine_s=model.quarantine_s,
        standbys=tuple(standby.status() for standby in fleet.nursery.standbys),
    )


def why(name: str, fleets: Sequence[Fleet], others: Sequence[Life[Any]]) -> Why | Refused:
    """What became of a model, by its name, an alias, or one of its replicas; or of a gateway."""
    for fleet in fleets:
        stories = [*fleet.failed, *(replica.story() for replica in fleet.replicas)]
        if name not in (fleet.model.name, *fleet.model.aliases):
            stories = [story for story in stories if story.name == name]
        if stories:
            return Why(fleet.model.name, fleet.circuit.explain(), tuple(stories))
    for life in others:
        if life.name == name:
            return Why(name, "closed", (life.story(),))
    known = [fleet.model.name for fleet in fleets]
    known += [replica.name for fleet in fleets for replica in fleet.replicas]
    known += [life.name for life in others]
    return Refused(f"nothing here is called {name!r}; there are: {', '.join(known)}", True)
