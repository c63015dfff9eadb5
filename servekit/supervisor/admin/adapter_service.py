"""Operations on adapters for operators, by `servekit adapter` and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from servekit.config import paths
from servekit.config.engines.options import KINDS
from servekit.config.schema import AdapterConfig, names_of
from servekit.errors import ConfigError, did_you_mean
from servekit.protocol.adapters import (
    Adapters,
    AdapterSpec,
    AddAdapter,
    GetAdapters,
    RemoveAdapter,
)
from servekit.protocol.messages import Accepted, Refused
from servekit.supervisor.adapters.state import Later, Refusal
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.gateway_process import Gateway, until_told

_RELATIVE = "the path of a folder has to be absolute, not '{}'"


class AdapterService:
    """Service for adapters; it replies when an operation is done, or with Refused."""

    def __init__(self, deployments: DeploymentManager, gateways: Sequence[Gateway] = ()) -> None:
        self._deployments = deployments
        self._gateways = gateways
        self._coming: dict[str, Deployment] = {}  # names being added, with their deployment

    async def handle_add(self, request: AddAdapter) -> Accepted | Refused:
        """Load an adapter on all workers of a model, or on none; if unloaded, with the model."""
        name = request.adapter.name
        try:
            deployment = self._deployment(request.model)
            spec = await asyncio.to_thread(_checked, request.adapter)
            self._check_name(name, deployment)
        except ConfigError as error:
            return Refused(error.message, True)
        self._coming[name] = deployment
        try:
            outcome = await deployment.adapters.add_adapter(spec, in_place=request.in_place)
        finally:
            self._coming.pop(name, None)
            await until_told(self._gateways)  # any gateway may be asked after the reply
        if isinstance(outcome, Refusal):
            return _refused(outcome)
        if isinstance(outcome, Later):
            return Accepted(
                f"{name} is loaded with {deployment.model.name}, which is not there now"
            )
        return Accepted(f"{name} serves on {deployment.model.name}, {outcome.mode}: {outcome.why}")

    async def handle_remove(self, request: RemoveAdapter) -> Accepted | Refused:
        """Unload an adapter from all workers, once its requests are done."""
        found = (
            (f, e) for f in self._deployments.served if (e := f.adapters.book.get(request.name))
        )
        deployment, entry = next(found, (None, None))
        if deployment is None or entry is None:
            return Refused(f"The lora adapter '{request.name}' cannot be found.", True)
        refusal = await deployment.adapters.remove_adapter(request.name)
        await until_told(self._gateways)
        if refusal is not None:
            return _refused(refusal)
        again = "; the file names it yet: a reload loads it again" if entry.from_file else ""
        return Accepted(f"{request.name} is unloaded from {deployment.model.name}{again}")

    def list_adapters(self, request: GetAdapters) -> Adapters | Refused:
        """Return the adapters of one model, or of all."""
        try:
            deployments = (
                [self._deployment(request.model)] if request.model else self._deployments.served
            )
        except ConfigError as error:
            return Refused(error.message, True)
        return Adapters(
            {deployment.model.name: deployment.adapter_statuses() for deployment in deployments}
        )

    def _deployment(self, model: str) -> Deployment:
        """Return the deployment of a model whose engine supports adapters. Raises ConfigError."""
        served = self._deployments.served
        for deployment in served:
            if model in deployment.model.names or (not model and len(served) < 2):
                if not KINDS[deployment.model.engine].adapters:
                    raise ConfigError(f"the engine {deployment.model.engine} has no adapters")
                return deployment
        there = ", ".join(deployment.model.name for deployment in served)
        if not model:
            raise ConfigError(f"name the model of the adapter; there are: {there}")
        likely = did_you_mean(model, [deployment.model.name for deployment in served])
        raise ConfigError(f"no model is called {model!r}; there are: {there}{likely}")

    def _check_name(self, name: str, deployment: Deployment) -> None:
        """Raise ConfigError if a model, a worker or another model's adapter has that name."""
        if self._coming.get(name, deployment) is not deployment:
            raise ConfigError(f"an adapter {name!r} is being loaded onto another model")
        base, _, rest = name.rpartition("/")
        if base == deployment.model.name and (rest.isdecimal() or rest.startswith("standby")):
            raise ConfigError(f"{name!r} is the name of a worker; choose another name")
        # a configured adapter of this model may have been removed, and may be added again
        filed = name in {adapter.name for adapter in deployment.model.adapters}
        own = filed or deployment.adapters.book.get(name) is not None
        if not own and name in self._names_in_use():
            raise ConfigError(f"the name {name!r} is taken; each model and adapter has its own")

    def _names_in_use(self) -> Iterator[str]:
        yield from names_of(self._deployments.plan.config)
        for deployment in self._deployments.served:
            yield from (entry.spec.name for entry in deployment.adapters.book)


def _checked(adapter: AdapterSpec) -> AdapterSpec:
    """Return the adapter with a usable path. Raises ConfigError."""
    fields = {"name": adapter.name, "path": adapter.path, "revision": adapter.revision}
    try:
        given = AdapterConfig.model_validate(fields)
        if given.path.startswith("."):
            raise ConfigError(_RELATIVE.format(given.path))
        path = paths.check_adapter_path(given.path, Path("/"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:
        raise ConfigError(f"{error}") from None
    if path.kind == "local" and not Path(given.path).expanduser().is_absolute():
        raise ConfigError(_RELATIVE.format(given.path))
    return AdapterSpec(given.name, path.text, given.revision, adapter.any_base)


def _refused(refusal: Refusal) -> Refused:
    return Refused(refusal.message, refusal.invalid, refusal.retry_after_s)
