"""What the supervisor knows, as the messages that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servekit.supervisor.fleet import Fleet
from servekit.supervisor.life import Life
from servekit.wire.messages import ModelStatus, Refused, ReplicaHistory, Why


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
        adapters=fleet.adapter_statuses(),
        standbys=tuple(standby.status() for standby in fleet.nursery.standbys),
        routing=model.routing,
    )


def why(name: str, fleets: Sequence[Fleet], others: Sequence[Life[Any]]) -> Why | Refused:
    """What became of a model, by its name, an alias, an adapter or a replica; or of a gateway."""
    for fleet in fleets:
        adapters = fleet.adapter_statuses()
        if named := tuple(adapter for adapter in adapters if adapter.name == name):
            return Why(fleet.model.name, fleet.circuit.explain(), _stories(fleet), named)
        stories = _stories(fleet)
        if name not in (fleet.model.name, *fleet.model.aliases):
            stories, adapters = tuple(story for story in stories if story.name == name), ()
        if stories:
            return Why(fleet.model.name, fleet.circuit.explain(), stories, adapters)
    for life in others:
        if life.name == name:
            return Why(name, "closed", (life.story(),))
    known = [fleet.model.name for fleet in fleets]
    known += [one.name for fleet in fleets for one in fleet.adapter_statuses()]
    known += [replica.name for fleet in fleets for replica in fleet.replicas]
    known += [life.name for life in others]
    return Refused(f"nothing here is called {name!r}; there are: {', '.join(known)}", True)


def _stories(fleet: Fleet) -> tuple[ReplicaHistory, ...]:
    return (*fleet.failed, *(replica.story() for replica in fleet.replicas))
