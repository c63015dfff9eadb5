"""The interface that the supervisor offers to its managed processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Quarantined
from servekit.supervisor.lifecycle.launcher import Launcher
from servekit.supervisor.process.run_dir import RunDir


class SupervisorContext(Protocol):
    """The supervisor, as its managed processes see it."""

    run_dir: RunDir
    mark: str

    @property
    def launcher(self) -> Launcher | None:
        """The launcher that starts workers; None if they are children of the supervisor."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment from which a child's environment is built."""

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        """Return the variables for this model's workers only: the key to its endpoint."""

    def changed(self) -> None:
        """Publish a change that others can see."""

    def noticed(self) -> None:
        """Publish changed figures with the next tick; nobody waits for them."""

    def children_changed(self) -> None:
        """Record that a process was started or reaped."""

    def line(self, name: str, text: str) -> None:
        """Pass on a line that a child wrote."""

    def quarantine(self, request: Quarantined) -> None:
        """Quarantine a request that kills workers, on all gateways."""

    def is_unused(self, adapter: str) -> bool:
        """Return whether no gateway has a request left for a withdrawn adapter."""
