"""How structs cross a process boundary: as arrays, messages with their name, values without."""

from __future__ import annotations

import gc

import msgspec
import pytest

from servekit.protocol.base import Message, Value


class Point(Value, frozen=True):
    x: int
    y: int = 7


class Moved(Message, frozen=True):
    to: Point


class Gone(Message, frozen=True):
    pass


def test_a_value_is_an_array_of_its_fields() -> None:
    assert msgspec.json.encode(Point(1, 2)) == b"[1,2]"


def test_a_message_is_an_array_behind_its_name() -> None:
    assert msgspec.json.encode(Moved(Point(1, 2))) == b'["Moved",[1,2]]'
    kinds = Moved | Gone
    assert msgspec.json.decode(b'["Gone"]', type=kinds) == Gone()
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Other'"):
        msgspec.json.decode(b'["Other"]', type=kinds)


def test_fields_that_an_older_peer_does_not_send_have_their_defaults() -> None:
    assert msgspec.json.decode(b"[1]", type=Point) == Point(1, 7)


def test_fields_that_only_a_newer_peer_knows_are_passed_over() -> None:
    assert msgspec.json.decode(b"[1,2,3]", type=Point) == Point(1, 2)


def test_what_has_been_sent_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Point(1).x = 2  # type: ignore[misc]
    assert hash(Point(1)) == hash(Point(1))


@pytest.mark.parametrize("one", [Point(1), Moved(Point(1))])
def test_garbage_collection_does_not_look_at_them(one: object) -> None:
    """There are thousands of them, and they are in no cycles."""
    assert not gc.is_tracked(one)
