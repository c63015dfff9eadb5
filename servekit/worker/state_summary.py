"""What a supervisor has to be told that has not heard a worker from its beginning."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterSpec,
    AdapterUnloaded,
)
from servekit.protocol.messages import BootFailed, Loading, Ready
from servekit.protocol.residency import Asleep, Awake
from servekit.protocol.startup_messages import GatewayConnected, PhaseReport


class Summary:
    """Made of what the worker has said so far. As long as the worker's state is, not its life."""

    def __init__(self) -> None:
        self._phases: dict[str, PhaseReport] = {}
        self._gateways: dict[str, GatewayConnected] = {}
        self._loading: Loading | None = None
        self._ready: Ready | None = None
        self._failed: BootFailed | None = None
        self._adapters: dict[str, AdapterInfo] = {}
        self._asleep: Asleep | None = None
        self.added: tuple[AdapterSpec, ...] = ()  # by operators, as the last supervisor knew it

    def note(self, message: Any) -> None:
        """The worker says something."""
        match message:
            case PhaseReport(phase):
                self._phases[phase.name] = message
            case GatewayConnected(gateway):
                self._gateways[gateway] = message
            case Loading():
                self._loading = message
            case Ready(info):
                self._ready = message
                self._adapters = {adapter.name: adapter for adapter in info.adapters}
            case BootFailed():
                self._failed = message
            case AdapterLoaded(_, adapter):
                self._adapters[adapter.name] = adapter
            case AdapterUnloaded(_, name):
                self._adapters.pop(name, None)
            case Asleep():
                self._asleep = message
            case Awake():
                self._asleep = None

    def state(self, *, loading: bool) -> Literal["empty", "loading", "ready", "failed"]:
        """How far it has come."""
        if self._failed is not None:
            return "failed"
        if self._ready is not None:
            return "ready"
        return "loading" if loading else "empty"

    def told(self) -> list[Any]:
        """The messages that say it all."""
        told: list[Any] = list(self._phases.values())
        if self._failed is not None:
            return [*told, self._failed]
        if self._ready is None:
            return [*told, *([] if self._loading is None else [self._loading])]
        info = replace(self._ready.info, adapters=tuple(self._adapters.values()))
        told += [Ready(info, self._ready.timings_s), *self._gateways.values()]
        return [*told, *([] if self._asleep is None else [self._asleep])]
