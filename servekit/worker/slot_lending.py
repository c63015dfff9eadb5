"""The worker's slots that gateways do not use, lent to those whose requests wait.

Each gateway may use its share of the slots without asking. One that has more to do says `Borrow`;
what the others do not use is divided among the borrowers, who are told `Lent`. When another
gateway's requests come they are started as far as there are slots, the borrowers are lent as many
fewer, and these make room as their own requests end: nothing that runs is taken back.

While nobody borrows a request costs nothing here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from servekit.protocol.messages import Lent

if TYPE_CHECKING:
    from servekit.worker.gateway_connection import GatewayConnection
    from servekit.worker.runner import Runner


class Lending:
    """Who borrows, and what each was told. All of it on the worker's event loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._shares: dict[GatewayConnection, int] = {}  # of those who borrow
        self._lent: dict[GatewayConnection, int] = {}
        self._due = False

    @property
    def active(self) -> bool:
        """Somebody borrows: `change` is to be called when a request begins or ends."""
        return bool(self._shares)

    def borrow(self, peer: GatewayConnection, share: int) -> None:
        """A gateway has more to do than its `share`; with 0 it has not any more."""
        if share > 0:
            self._shares[peer] = share
        else:
            self.forget(peer)
        self.change()

    def forget(self, peer: GatewayConnection) -> None:
        """A gateway borrows nothing any more."""
        self._shares.pop(peer, None)
        self._lent.pop(peer, None)

    def change(self) -> None:
        """Divide anew at the end of this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._divide)

    def _divide(self) -> None:
        self._due = False
        shares = self._shares
        used = sum(len(peer.jobs) for peer in self._runner.peers if peer not in shares)
        left = max(0, self._runner.info.slots - used - sum(shares.values()))
        for at, peer in enumerate(shares):
            slots = left // len(shares) + (at < left % len(shares))
            if slots != self._lent.get(peer, 0):
                self._lent[peer] = slots
                peer.connection.send(Lent(slots))
