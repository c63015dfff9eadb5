"""What is kept of a channel that outlives its connections."""

from __future__ import annotations

from servekit.protocol.control.startup_messages import GatewayConnected
from servekit.protocol.messages import Drain, Loading, Ping, Pong, Progress, Stop
from servekit.protocol.transport.resumable_channel import MOST_KEPT, ReplayBuffer


def test_the_peer_is_sent_what_it_has_not_had() -> None:
    kept = ReplayBuffer()
    sent = [GatewayConnected(f"gateway/{n}", 0.0) for n in range(5)]
    kept.extend(sent)
    assert kept.after(0) == sent
    assert kept.after(3) == sent[3:]
    assert kept.after(2) is None, "it had said that it has three"
    kept.add(Drain())
    assert kept.after(5) == [Drain()]
    assert kept.after(6) == []


def test_what_is_about_the_moment_is_not_repeated() -> None:
    kept = ReplayBuffer()
    kept.extend([Ping(1), Stop(), Pong(1, 0.0, 0, 0, 0.0), Loading(Progress("load"))])
    assert kept.after(0) == [Stop()]


def test_a_peer_that_has_had_more_than_was_sent_is_of_another_session() -> None:
    assert ReplayBuffer().after(1) is None


def test_no_more_is_kept_than_has_room() -> None:
    kept = ReplayBuffer()
    kept.extend(GatewayConnected("g", float(n)) for n in range(MOST_KEPT + 10))
    assert kept.after(0) is None
    missing = kept.after(10)
    assert missing is not None
    assert len(missing) == MOST_KEPT
