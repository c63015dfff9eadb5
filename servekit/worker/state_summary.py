"""Summary of a worker's state for a supervisor that connects later."""

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
    """Summary of the messages that the worker has sent so far.

    Its size is bounded by the worker's state, not by its uptime.
    """

    def __init__(self) -> None:
        self._phases: dict[str, PhaseReport] = {}
        self._gateways: dict[str, GatewayConnected] = {}
        self._loading: Loading | None = None
        self._ready: Ready | None = None
        self._failed: BootFailed | None = None
        self._adapters: dict[str, AdapterInfo] = {}
        self._asleep: Asleep | None = None
        self.added: tuple[AdapterSpec, ...] = ()  # by operators, as last set by the supervisor

    def note(self, message: Any) -> None:
        """Record a message of the worker to the supervisor."""
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
        """Return the worker's stage of start-up."""
        if self._failed is not None:
            return "failed"
        if self._ready is not None:
            return "ready"
        return "loading" if loading else "empty"

    def told(self) -> list[Any]:
        """Return the messages that reproduce the worker's state."""
        told: list[Any] = list(self._phases.values())
        if self._failed is not None:
            return [*told, self._failed]
        if self._ready is None:
            return [*told, *([] if self._loading is None else [self._loading])]
        info = replace(self._ready.info, adapters=tuple(self._adapters.values()))
        told += [Ready(info, self._ready.timings_s), *self._gateways.values()]
        return [*told, *([] if self._asleep is None else [self._asleep])]
