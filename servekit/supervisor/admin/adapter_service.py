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


class AdapterDesk:
    """Service for adapters; it replies when an operation is done, or with Refused."""

    def __init__(self, fleets: DeploymentManager, gateways: Sequence[Gateway] = ()) -> None:
        self._fleets = fleets
        self._gateways = gateways
        self._coming: dict[str, Deployment] = {}  # names being added, with their deployment

    async def add(self, wish: AddAdapter) -> Accepted | Refused:
        """Load an adapter on all workers of a model, or on none; if unloaded, with the model."""
        name = wish.adapter.name
        try:
            fleet = self._fleet(wish.model)
            spec = await asyncio.to_thread(_checked, wish.adapter)
            self._check_name(name, fleet)
        except ConfigError as error:
            return Refused(error.message, True)
        self._coming[name] = fleet
        try:
            outcome = await fleet.adapters.add(spec, in_place=wish.in_place)
        finally:
            self._coming.pop(name, None)
            await until_told(self._gateways)  # any gateway may be asked after the reply
        if isinstance(outcome, Refusal):
            return _refused(outcome)
        if isinstance(outcome, Later):
            return Accepted(f"{name} is loaded with {fleet.model.name}, which is not there now")
        return Accepted(f"{name} serves on {fleet.model.name}, {outcome.mode}: {outcome.why}")

    async def remove(self, wish: RemoveAdapter) -> Accepted | Refused:
        """Unload an adapter from all workers, once its requests are done."""
        found = ((f, e) for f in self._fleets.served if (e := f.adapters.book.get(wish.name)))
        fleet, entry = next(found, (None, None))
        if fleet is None or entry is None:
            return Refused(f"The lora adapter '{wish.name}' cannot be found.", True)
        refusal = await fleet.adapters.remove(wish.name)
        await until_told(self._gateways)
        if refusal is not None:
            return _refused(refusal)
        again = "; the file names it yet: a reload loads it again" if entry.from_file else ""
        return Accepted(f"{wish.name} is unloaded from {fleet.model.name}{again}")

    def show(self, wish: GetAdapters) -> Adapters | Refused:
        """Return the adapters of one model, or of all."""
        try:
            fleets = [self._fleet(wish.model)] if wish.model else self._fleets.served
        except ConfigError as error:
            return Refused(error.message, True)
        return Adapters({fleet.model.name: fleet.adapter_statuses() for fleet in fleets})

    def _fleet(self, model: str) -> Deployment:
        """Return the deployment of a model whose engine supports adapters. Raises ConfigError."""
        served = self._fleets.served
        for fleet in served:
            if model in (fleet.model.name, *fleet.model.aliases) or (not model and len(served) < 2):
                if not KINDS[fleet.model.engine].adapters:
                    raise ConfigError(f"the engine {fleet.model.engine} has no adapters")
                return fleet
        there = ", ".join(fleet.model.name for fleet in served)
        if not model:
            raise ConfigError(f"say which model the adapter is for; there are: {there}")
        likely = did_you_mean(model, [fleet.model.name for fleet in served])
        raise ConfigError(f"no model is called {model!r}; there are: {there}{likely}")

    def _check_name(self, name: str, fleet: Deployment) -> None:
        """Raise ConfigError if a model, a worker or another model's adapter has that name."""
        if self._coming.get(name, fleet) is not fleet:
            raise ConfigError(f"an adapter {name!r} is being loaded onto another model")
        base, _, rest = name.rpartition("/")
        if base == fleet.model.name and (rest.isdecimal() or rest.startswith("standby")):
            raise ConfigError(f"{name!r} is the name of a worker; choose another name")
        # a configured adapter of this model may have been removed, and may be added again
        filed = name in {adapter.name for adapter in fleet.model.adapters}
        own = filed or fleet.adapters.book.get(name) is not None
        if not own and name in self._taken():
            raise ConfigError(f"the name {name!r} is taken; each model and adapter has its own")

    def _taken(self) -> Iterator[str]:
        yield from names_of(self._fleets.plan.config)
        for fleet in self._fleets.served:
            yield from (entry.spec.name for entry in fleet.adapters.book)


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
    if path.kind == "local" and not _is_absolute(given.path):
        raise ConfigError(_RELATIVE.format(given.path))
    return AdapterSpec(given.name, path.text, given.revision, adapter.any_base)


def _is_absolute(path: str) -> bool:
    return Path(path).expanduser().is_absolute()


def _refused(refusal: Refusal) -> Refused:
    return Refused(refusal.message, refusal.invalid, refusal.retry_after_s)
