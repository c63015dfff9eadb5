"""How workers come to be, where it is not as children of ours.

With `launcher: local` there is none, and a worker is a `child.Child`. All else is the same either
way: when a worker is started again, what is known of it, and who is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from servekit.config.schema import ModelConfig
from servekit.protocol.transport.credentials import Credentials
from servekit.supervisor.lifecycle.remote_process import RemoteChild
from servekit.supervisor.process.child_process import ChildProcess
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.scheduling.remote_gpus import RemoteGpus

Incoming = TypeVar("Incoming")
AnyChild: TypeAlias = ChildProcess[Incoming] | RemoteChild[Incoming]


class Guest(Protocol):
    """A worker to be launched."""

    name: str
    model: ModelConfig
    place: Assignment

    def told_to_wait(self, what: str) -> None:
        """It cannot start yet, because of that; "" when it can."""

    def measure_gpus(self, told: RemoteGpus) -> None:
        """This is known of its GPUs there."""


class Launcher(Protocol):
    """Places workers, starts them and gives their places back."""

    #: How long workers and gateways serve on without a supervisor.
    grace_s: float

    async def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Why these, which a reload brings, cannot be served there; "" if they can."""

    def gpus_for(self, model: ModelConfig) -> int:
        """How many each of its workers gets; 0: it runs on the CPU."""

    async def enter(self, guest: Guest) -> str:
        """Wait for its place; why it gets none, "" if it has it."""

    async def spawn(
        self,
        guest: Guest,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        """Start it, or take over one that serves. Raises OSError."""

    async def strays(self, name: str) -> str:
        """A sentence on GPU memory that it holds elsewhere; "" if none, or nobody can tell."""

    async def release(self, name: str) -> None:
        """Its life is over: give its place back."""

    def where(self, name: str) -> str:
        """On which node and device it is, in words; "" where it has no place."""

    def gateway_credentials(self, name: str) -> Credentials:
        """With which a gateway of our own node reaches workers."""

    def renewed(self, gateway: str) -> Credentials | None:
        """What it is to show instead, where that is due; it has been told once this returns it.

        Of one on another node that is seen to there: None.
        """
