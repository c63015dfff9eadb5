"""Server-sent events, cut anywhere: what comes out never depends on where."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.sse import EventStream, EventTooLong

LINES = st.sampled_from(
    [
        b"data: {}",
        b"data:x",
        b"data: [DONE]",
        b"data:  two spaces",
        b"data",
        b"data:",
        b": a comment",
        b":",
        b"event: ping",
        b"id: 7",
        b"retry: 10",
        b"nonsense",
        b"",
        b"",
        b"data: \xc3\xa9\xe2\x82\xac",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lines with one kind of end each, perhaps a mark at the beginning."""
    lines = draw(st.lists(st.tuples(LINES, ENDS), max_size=25))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return mark + b"".join(line + end for line, end in lines)


def by_the_standard(stream: bytes) -> list[bytes]:
    """The standard's own steps, on the whole stream at once."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found, data = [], list[bytes]()
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value[1:] if value[:1] == b" " else value)
    return found


@given(streams(), st.data())
def test_cuts_change_nothing(stream: bytes, data: st.DataObject) -> None:
    at = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    edges = [0, *at, len(stream)]
    reader = EventStream()
    found = []
    for begin, end in itertools.pairwise(edges):
        found += reader.read_events(stream[begin:end])
    assert found == by_the_standard(stream)


@given(streams())
def test_byte_by_byte(stream: bytes) -> None:
    reader = EventStream()
    found = [
        event for at in range(len(stream)) for event in reader.read_events(stream[at : at + 1])
    ]
    assert found == by_the_standard(stream)


def test_an_event_is_there_with_its_last_byte() -> None:
    reader = EventStream()
    assert reader.read_events(b"data: a\n") == []
    assert reader.read_events(b"\n") == [b"a"]
    assert reader.read_events(b"data: b\r\n\r") == [b"b"], "the CR has ended the line already"
    assert reader.read_events(b"\ndata: c\n\n") == [b"c"]


def test_several_in_one_read() -> None:
    reader = EventStream()
    assert reader.read_events(b"data: a\n\n: ping\n\ndata: b\n\ndata: [DO") == [b"a", b"b"]
    assert reader.unread == b"data: [DO"
    assert reader.read_events(b"NE]\n\n") == [b"[DONE]"]


def test_what_the_end_cuts_off_is_dropped() -> None:
    reader = EventStream()
    assert reader.read_events(b"data: a\n\ndata: b\n") == [b"a"]


def test_careless_servers_leave_out_the_last_empty_line() -> None:
    for rest, found in (
        (b"data: b", [b"b"]),
        (b"data: b\r", [b"b"]),
        (b": nothing", []),
        (b"", []),
    ):
        reader = EventStream()
        assert reader.read_events(b"data: a\n\n" + rest) == [b"a"]
        assert reader.end() == found


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1000, b"x" * 1000, b"data: y\n" * 100])
def test_an_event_without_an_end_is_given_up(line: bytes) -> None:
    reader = EventStream(2**20)
    fed = 0
    with pytest.raises(EventTooLong):
        while fed < 2**21:
            reader.read_events(line)
            fed += len(line)
    assert fed > 2**19


def test_a_stream_may_be_longer_than_an_event() -> None:
    reader = EventStream(2**20)
    event = b"data: " + b"x" * 2**19 + b"\n\n"
    assert sum(len(reader.read_events(event)) for _ in range(4)) == 4
