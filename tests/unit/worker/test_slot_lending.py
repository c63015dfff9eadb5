"""The division of unused slots among gateways that have more work than their share."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from servekit.protocol.messages import Lent
from servekit.worker.slot_lending import Lending


class Peer:
    """A gateway with so many requests here, and what it was lent."""

    def __init__(self, running: int = 0) -> None:
        self.jobs = dict.fromkeys(range(running), 0)
        self.lent: list[int] = []
        self.connection = self

    def send(self, message: Lent) -> None:
        self.lent.append(message.slots)


def make_lending(slots: int, *peers: Peer) -> Any:
    runner: Any = SimpleNamespace(info=SimpleNamespace(slots=slots), peers=set(peers))
    return Lending(runner)


async def settle() -> None:
    await asyncio.sleep(0)


async def test_a_borrower_gets_what_the_others_do_not_use() -> None:
    busy, borrower = Peer(running=3), Peer(running=4)
    lending = make_lending(16, busy, borrower)
    assert not lending.active
    lending.borrow(borrower, 4)
    assert lending.active
    await settle()
    assert borrower.lent == [16 - 3 - 4], "beyond its own share"
    assert busy.lent == []


async def test_several_borrowers_share_and_the_first_get_what_is_left_over() -> None:
    busy, first, second, third = Peer(running=1), Peer(), Peer(), Peer()
    lending = make_lending(12, busy, first, second, third)
    for peer in (first, second, third):
        lending.borrow(peer, 2)
    await settle()
    assert [peer.lent for peer in (first, second, third)] == [[2], [2], [1]]


async def test_nothing_is_said_while_nothing_changes() -> None:
    busy, borrower = Peer(), Peer()
    lending = make_lending(8, busy, borrower)
    lending.borrow(borrower, 4)
    await settle()
    lending.change()
    await settle()
    assert borrower.lent == [4]
    busy.jobs[1] = 0
    lending.change()
    lending.change()
    await settle()
    assert borrower.lent == [4, 3], "once for both"
    busy.jobs.clear()
    lending.change()
    await settle()
    assert borrower.lent == [4, 3, 4]


async def test_slots_in_use_are_not_lent_and_nothing_is_told_of_none() -> None:
    busy, borrower = Peer(running=9), Peer()
    lending = make_lending(8, busy, borrower)
    lending.borrow(borrower, 4)
    await settle()
    assert borrower.lent == []


async def test_who_withdraws_or_leaves_is_lent_no_more() -> None:
    first, second = Peer(), Peer()
    lending = make_lending(8, first, second)
    lending.borrow(first, 2)
    lending.borrow(second, 2)
    await settle()
    assert (first.lent, second.lent) == ([2], [2])
    lending.borrow(first, 0)
    await settle()
    assert lending.active and (first.lent, second.lent) == ([2], [2, 6])
    lending.borrow(first, 2)
    await settle()
    assert first.lent == [2, 2], "it is told again, though it is as much as before"
    lending.remove_peer(first)
    await settle()
    assert second.lent == [2, 6, 2, 6], "what the one that left was lent, though it ran nothing"
    lending.remove_peer(second)
    lending.remove_peer(second)
    await settle()
    assert not lending.active
