"""What the supervisor knows, as the messages that carry it."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.config.schema import ModelConfig
from servekit.supervisor.replicas import Replica
from servekit.wire.messages import ModelStatus


def of_models(
    models: Sequence[ModelConfig], replicas: Sequence[Replica], created: int
) -> tuple[ModelStatus, ...]:
    """Every model of the file with its replicas, in the file's order."""
    return tuple(
        of_model(model, [r for r in replicas if r.model is model], created) for model in models
    )


def of_model(model: ModelConfig, replicas: Sequence[Replica], created: int) -> ModelStatus:
    """One model; what it can do is known from the first replica that came up."""
    return ModelStatus(
        name=model.name,
        engine=model.engine,
        path=model.path,
        created=created,
        replicas=tuple(replica.status() for replica in replicas),
        info=next((replica.info for replica in replicas if replica.info is not None), None),
        aliases=model.aliases,
        timeout_s=model.timeout_s,
        max_queue=model.max_queue,
        quarantine_s=model.quarantine_s,
    )
