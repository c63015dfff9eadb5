from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.engines.remote.sse import MAX_EVENT_BYTES, Events, EventTooLong


def read(*pieces: bytes) -> list[bytes]:
    events = Events()
    found = [data for piece in pieces for data in events.feed(piece)]
    return found + events.end()


STREAM = (
    b": a comment\n\ndata: one\n\nevent: x\ndata:two\r\n\r\nid: 7\ndata: a\ndata: b\n\n\n\n"
    b"data: \xc3\xa4\xe2\x80\xa8\n\nretry: 3\n\ndata: [DONE]\n\n"
)
SAID = [b"one", b"two", b"a\nb", "ä\N{LINE SEPARATOR}".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_however_it_is_cut(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    assert read(*(STREAM[a:b] for a, b in pairwise(ends))) == SAID


def test_what_careless_servers_leave_at_the_end() -> None:
    assert read(b"data: one\n\ndata: two") == [b"one", b"two"]
    assert read(b"data: one\ndata: two\n") == [b"one\ntwo"]
    assert read(b"", b": nothing") == []


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1000, b"x" * 1000, b"data: y\n" * 100])
def test_an_event_without_an_end_is_given_up(line: bytes) -> None:
    events = Events()
    fed = 0
    with pytest.raises(EventTooLong):
        while fed < 2 * MAX_EVENT_BYTES:
            events.feed(line)
            fed += len(line)
    assert fed > MAX_EVENT_BYTES // 16


def test_a_stream_may_be_as_long_as_it_likes() -> None:
    events = Events()
    event = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + b"\n\n"
    assert sum(len(events.feed(event)) for _ in range(4)) == 4
