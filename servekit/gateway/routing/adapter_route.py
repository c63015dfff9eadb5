"""An adapter at this gateway: a separate model to clients, served by its base's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from servekit.errors import ModelUnavailable
from servekit.gateway.routing.model_queue import ModelQueue, NamedRoute
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol import readiness
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.messages import ModelStatus
from servekit.protocol.types import MODALITIES

#: Interval at which an adapter that is no longer served is checked for remaining calls.
_LOOK_EVERY_S = 0.05


class AdapterRoute(NamedRoute):
    """The base's queue under the adapter's name.

    It only answers questions about the adapter's state; calls queue at `base`.
    """

    def __init__(self, base: ModelQueue, adapter: AdapterStatus) -> None:
        named = {"name": adapter.name, "path": adapter.path}
        info = base.status.info
        taken = adapter.info.virtual_tokens if adapter.info is not None else 0
        if info is not None and taken:  # virtual tokens, which have no media beside them
            serves = tuple(one for one in info.serves if one not in MODALITIES)
            info = replace(info, max_context=info.max_context - taken, serves=serves)
        created = max(base.status.created, int(adapter.since))
        super().__init__(base, replace(base.status, **named, info=info, created=created))
        self.adapter = adapter

    @property
    def ready(self) -> bool:
        return self.adapter.state == "serving" and super().ready

    @property
    def is_permanently_down(self) -> bool:
        return self.adapter.state == "failed" or super().is_permanently_down

    @property
    def available(self) -> bool:
        return self._is_loaded and super().available

    @property
    def _is_loaded(self) -> bool:
        """Return whether the adapter is loaded, or will be together with its base."""
        return readiness.adapter_able(self.base.status, self.adapter)

    def check_loaded(self) -> None:
        """Raise ModelUnavailable unless the adapter is served wherever its base is."""
        name, state = self.adapter.name, self.adapter.state
        if state == "failed":
            message = f"the adapter {name!r} cannot serve: {self.adapter.reason}"
            raise ModelUnavailable(message, retry_after_s=30.0, param="model")
        if not self._is_loaded:
            message = f"the adapter {name!r} is being loaded"
            raise ModelUnavailable(message, retry_after_s=5.0, param="model")

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the adapter is loaded and its base is or will be ready."""
        self.check_loaded()
        super().check_available()

    def adapt(self, call: InflightRequest) -> None:
        """Assign a call to this adapter. Raises ModelUnavailable."""
        self.check_available()
        call.more = {**call.more, "adapter": self.adapter.name}


def base_of(route: ModelQueue) -> str:
    """Return the name of a preset's or an adapter's base; "" for a model of its own."""
    return "" if route.base is route else route.base.status.name


def adapters_of(route: ModelQueue) -> tuple[AdapterRoute, ...]:
    """Return the routes of a model's adapters, except those that are being unloaded."""
    known = route.status.adapters
    return tuple(AdapterRoute(route, one) for one in known if one.state != "unloading")


class AdapterUsageTracker:
    """Reports adapters that are not served (or not yet) once no open call needs them.

    `tell` is called with the adapter's name; `calls` are all calls that wait or run.
    """

    def __init__(self, calls: Collection[InflightRequest], tell: Callable[[str], None]) -> None:
        self._calls = calls
        self._tell = tell
        self._leaving: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def apply_models(self, models: Iterable[ModelStatus]) -> None:
        """Adopt the present models and adapters, and check adapters that have left service."""
        leaving = {one.name for m in models for one in m.adapters if one.state != "serving"}
        new, self._leaving = leaving - self._leaving, leaving
        for name in new:
            self._report_unused(name)

    def _report_unused(self, name: str) -> None:
        if name not in self._leaving:
            return
        if any(call.more.get("adapter") == name for call in self._calls):
            self._loop.call_later(_LOOK_EVERY_S, self._report_unused, name)
        else:
            self._tell(name)
