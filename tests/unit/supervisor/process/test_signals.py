"""Signals of this very process, posted on its loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from servekit.supervisor.process.signals import SignalRequest, Signals
from tests.polling import poll_async

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give this process its handlers back."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "request_"),
    [(signal.SIGINT, "signal"), (signal.SIGTERM, "signal"), (signal.SIGHUP, "hangup")],
)
async def test_a_signal_becomes_a_request(number: signal.Signals, request_: SignalRequest) -> None:
    posted: list[SignalRequest] = []
    Signals(posted.append).catch()
    for _ in range(2):
        os.kill(os.getpid(), number)
        await poll_async("it is posted", lambda: posted)
        assert posted == [request_]
        posted.clear()


async def test_of_a_storm_two_of_each_kind_count() -> None:
    """The second means "now"; the loop is not to be kept from its work by the rest."""
    posted: list[SignalRequest] = []
    Signals(posted.append).catch()
    for _ in range(50):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert posted == [], "they are posted by the loop, not by the handler"
    await poll_async("all are posted", lambda: len(posted) >= 4)
    await asyncio.sleep(0)
    assert sorted(posted) == ["hangup", "hangup", "signal", "signal"]


async def test_under_nohup_a_hangup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Signals(lambda request: None).catch()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)


async def test_at_the_end_all_are_ignored() -> None:
    signals = Signals(lambda request: None)
    signals.catch()
    signals.ignore()
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN] * 3
