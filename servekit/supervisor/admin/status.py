"""Conversion of the supervisor's state into status messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from servekit.config.engines.options import CommandOptions, OpenAIOptions
from servekit.config.schema import ModelConfig
from servekit.errors import did_you_mean
from servekit.protocol.control.admin_messages import ModelTraffic
from servekit.protocol.messages import GpuStatus, ModelStatus, Refused, ReplicaHistory, Why
from servekit.protocol.residency import ResidencyStatus
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.lifecycle.managed_process import ManagedProcess
from servekit.supervisor.presets import list_presets
from servekit.supervisor.workers.worker_process import WorkerProcess


def of_model(
    deployment: Deployment, created: int, residence: ResidencyStatus | None
) -> ModelStatus:
    """Return the status of one model."""
    model, replicas = deployment.model, deployment.replicas
    return ModelStatus(
        name=model.name,
        engine=model.engine,
        path=model.path,
        created=created,
        replicas=tuple(replica.replica_status() for replica in replicas),
        info=deployment.info,
        aliases=model.aliases,
        timeout_s=model.timeout_s,
        max_queue=model.max_queue,
        quarantine_s=model.quarantine_s,
        adapters=deployment.adapter_statuses(),
        standbys=tuple(standby.replica_status() for standby in deployment.fork_servers.standbys),
        residence=residence,
        routing=model.routing,
        scale=deployment.scale,
        changing=deployment.changing,
        endpoints=_list_endpoints(model),
        presets=list_presets(model),
        left_out=deployment.left_out,
        has_served=deployment.has_served,
    )


def _list_endpoints(model: ModelConfig) -> tuple[str, ...]:
    options = model.engine_options() if model.engine in ("command", "openai") else None
    return options.endpoints if isinstance(options, CommandOptions | OpenAIOptions) else ()


def traffic(served: Sequence[Deployment], gateways: Sequence[Gateway]) -> tuple[ModelTraffic, ...]:
    """Return the traffic of each model, summed over all gateways."""
    return tuple(
        ModelTraffic(
            name,
            sum(gateway.traffic.queued.get(name, 0) for gateway in gateways),
            sum(gateway.generated_tokens(name) for gateway in gateways),
        )
        for name in (deployment.model.name for deployment in served)
    )


def gpus(here: Sequence[GpuStatus], replicas: Sequence[WorkerProcess]) -> tuple[GpuStatus, ...]:
    """Return this machine's GPUs, and those that workers on other nodes were given."""
    there = {(one.node, one.uuid): one for replica in replicas for one in replica.gpu.in_use}
    return (*here, *sorted(there.values(), key=lambda one: (one.node, one.index)))


def explain_process(
    name: str,
    deployments: Sequence[Deployment],
    others: Sequence[ManagedProcess[Any]],
    residence: Callable[[Deployment, bool], ResidencyStatus | None],
) -> Why | Refused:
    """Return the history of a model (or of its alias, adapter or replica), or of a gateway."""
    for deployment in deployments:
        model, explained = deployment.model, deployment.circuit.explain()
        adapters = deployment.adapter_statuses()
        if named := tuple(adapter for adapter in adapters if adapter.name == name):
            return Why(model.name, explained, _stories(deployment), named)
        stories = _stories(deployment)
        if name in model.names:
            return Why(
                model.name,
                explained,
                stories,
                adapters,
                residence(deployment, True),
                deployment.scale,
            )
        if own := tuple(story for story in stories if story.name == name):
            return Why(name, explained, own)
    for life in others:
        if life.name == name:
            return Why(name, "closed", (life.make_history(),))
    known = [deployment.model.name for deployment in deployments]
    known += [one.name for deployment in deployments for one in deployment.adapter_statuses()]
    known += [replica.name for deployment in deployments for replica in deployment.replicas]
    known += [life.name for life in others]
    there = f"{', '.join(known)}{did_you_mean(name, known)}"
    return Refused(f"no model or process is called {name!r}; there are: {there}", True)


def _stories(deployment: Deployment) -> tuple[ReplicaHistory, ...]:
    return (*deployment.failed, *(replica.make_history() for replica in deployment.replicas))
