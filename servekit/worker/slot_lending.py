"""Lending of the worker's slots that some gateways do not use to gateways with waiting requests.

Each gateway may use its share of the slots without asking. A gateway with more work sends `Borrow`;
unused slots are divided among the borrowers, who receive `Lent`, and of several each one whose
requests wait no more withdraws. Requests of other gateways then
start as long as there are slots; the borrowers are lent fewer, and free those slots as their own
requests end. Running requests are never preempted.

A request costs nothing here while no gateway borrows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from servekit.protocol.messages import Lent

if TYPE_CHECKING:
    from servekit.worker.gateway_connection import GatewayConnection
    from servekit.worker.runner import Runner

_NOTHING = Lent(0)


class Lending:
    """The borrowing gateways and the slots lent to each. Used only on the worker's event loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._shares: dict[GatewayConnection, int] = {}  # of the borrowers
        self._lent: dict[GatewayConnection, Lent] = {}
        self._due = False

    @property
    def active(self) -> bool:
        """Return whether a gateway borrows; requests must then call `change` at start and end."""
        return bool(self._shares)

    def borrow(self, peer: GatewayConnection, share: int) -> None:
        """Register a gateway that needs more than its `share` of slots; 0 withdraws it."""
        if share > 0:
            self._shares[peer] = share
            self.change()
        else:
            self.remove_peer(peer)

    def remove_peer(self, peer: GatewayConnection) -> None:
        """Remove a gateway from the borrowers."""
        self._lent.pop(peer, None)
        if self._shares.pop(peer, None) is not None:
            self.change()

    def change(self) -> None:
        """Divide the slots again at the end of this event-loop tick."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._divide_slots)

    def _divide_slots(self) -> None:
        self._due = False
        shares = self._shares
        used = sum(len(peer.jobs) for peer in self._runner.peers if peer not in shares)
        left = max(0, self._runner.info.slots - used - sum(shares.values()))
        for at, peer in enumerate(shares):
            slots = left // len(shares) + (at < left % len(shares))
            lent = Lent(slots, len(shares) > 1)
            if lent != self._lent.get(peer, _NOTHING):
                self._lent[peer] = lent
                peer.connection.send(lent)
