"""The interface of a launcher, which starts workers that are not the supervisor's own children.

With `launcher: local` there is none, and a worker is a `ChildProcess`. Restarts, status and
messages work the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from servekit.config.schema import ModelConfig
from servekit.protocol.transport.credentials import Credentials
from servekit.supervisor.lifecycle.remote_process import RemoteChild
from servekit.supervisor.process.child_process import ChildProcess
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.gpu_memory import RemoteGpus

Incoming = TypeVar("Incoming")
AnyChild: TypeAlias = ChildProcess[Incoming] | RemoteChild[Incoming]


class Guest(Protocol):
    """A worker to be launched."""

    name: str
    model: ModelConfig
    place: Assignment

    def show_wait(self, what: str) -> None:
        """Show what the worker waits for before it can start; "" when it can."""

    def measure_gpus(self, told: RemoteGpus) -> None:
        """Take the figures of the worker's GPUs on its node."""


class Launcher(Protocol):
    """A launcher, which places workers, starts them and releases their places."""

    #: How long workers and gateways serve on without a supervisor.
    grace_s: float

    async def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Return why these models of a reload cannot be served there; "" if they can."""

    def gpus_for(self, model: ModelConfig) -> int:
        """Return the number of GPUs that each worker of `model` gets; 0 if it runs on the CPU."""

    async def enter(self, guest: Guest) -> str:
        """Wait for the worker's place; return why it gets none, or ""."""

    async def spawn(
        self,
        guest: Guest,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        """Start the worker, or adopt one that already serves. Raises OSError."""

    async def strays(self, name: str) -> str:
        """Return a sentence on GPU memory it holds on other GPUs; "" if none, or if unknown."""

    async def release(self, name: str) -> None:
        """Release the place of a worker whose life is over."""

    def where(self, name: str) -> str:
        """Return a worker's node and device in words; "" if it has no place."""

    def gateway_credentials(self, name: str) -> Credentials:
        """Return the credentials with which a gateway of our own node reaches workers."""

    def renewed(self, gateway: str) -> Credentials | None:
        """Return a gateway's renewed credentials if they are due, else None.

        They count as delivered once returned. None also for a gateway on another node, whose node
        renews them.
        """
