"""What a supervised life needs of who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Quarantined
from servekit.supervisor.lifecycle.launcher import Launcher
from servekit.supervisor.process.run_dir import RunDir


class SupervisorContext(Protocol):
    """What a life needs of its supervisor."""

    run_dir: RunDir
    mark: str

    @property
    def launcher(self) -> Launcher | None:
        """What starts workers; None: they are children of the supervisor."""

    @property
    def environ(self) -> Mapping[str, str]:
        """What a child's environment is made from."""

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        """What is added to it for the workers of this model alone."""

    def changed(self) -> None:
        """Something that others may see is different now."""

    def noticed(self) -> None:
        """The same of figures, which nobody waits for: they are told a few times a second."""

    def children_changed(self) -> None:
        """A process was started, or reaped."""

    def line(self, name: str, text: str) -> None:
        """A child wrote a line."""

    def quarantine(self, request: Quarantined) -> None:
        """A request takes workers down; all gateways are to know."""

    def is_unused(self, adapter: str) -> bool:
        """No gateway has a request for an adapter that serves no more."""
