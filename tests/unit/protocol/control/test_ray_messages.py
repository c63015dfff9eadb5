"""Messages to and from the process that talks to Ray: they are told apart, and may be short."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from servekit.protocol.base import Message
from servekit.protocol.control.ray_messages import (
    ClusterJoined,
    Exited,
    FromCluster,
    InspectNodes,
    JoinCluster,
    Measured,
    Node,
    NodeRequirements,
    PlaceWorker,
    RemoteGpu,
    RequestFailed,
    Running,
    Signal,
    Start,
    ToCluster,
    WorkerPlaced,
)

WANTS = (NodeRequirements("m", "echo", "/models/m"),)
ALL: Any = ToCluster | FromCluster


def read(kind: Any, *fields: Any) -> Any:
    """Return what becomes of a value or message of which a peer sends only the first fields."""
    head = (kind.__name__,) if issubclass(kind, Message) else ()
    return msgspec.msgpack.decode(msgspec.msgpack.encode((*head, *fields)), type=kind)


@pytest.mark.parametrize(
    "message",
    [
        JoinCluster(1, "auto", "servekit", 60.0, 30.0, WANTS, "/run", 5.0, 2, True),
        PlaceWorker(2, "m/0", "m", 2, 1.0, "SPREAD", "f", want=WANTS[0]),
        Start(3, "m/0", ("a",), {"A": "1"}, b"key", "f", "index", "gateway", (("h", 1),)),
        ClusterJoined(1, (Node("n", "10.0.0.1", lacks={"m": "no such folder"}),), 3, "n"),
        WorkerPlaced(2, "h", (RemoteGpu(0, "GPU-1", "A", 2**34),), Running(7, "tcp://h:1", "f")),
        RequestFailed(3, "it ended at once", 7),
    ],
)
def test_a_message_survives_the_wire(message: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ALL) == message


def test_what_is_left_out_asks_for_no_more() -> None:
    join = read(JoinCluster, 1, "auto", "servekit", 60.0, 30.0, (), "/run", 5.0)
    assert (join.turn, join.watch) == (0, False)
    assert read(InspectNodes, 1, 5.0, ()).node == ""
    place = read(PlaceWorker, 2, "m/0", "m", 0, 1.0, "PACK", "f")
    assert (place.node, place.want) == ("", None)
    start = read(Start, 3, "m/0", (), {}, b"", "f")
    assert (start.pin, start.role, start.listen) == ("uuid", "worker", ())
    assert not read(Signal, "m/0", 15).group, "not the whole group"


def test_what_is_left_out_of_an_answer_is_not_there() -> None:
    node = read(Node, "n", "10.0.0.1")
    assert (node.cpus, node.gpus, node.lacks, node.problem) == (0.0, 0.0, {}, "")
    assert read(WorkerPlaced, 2, "h", ()).running is None, "no worker is adopted"
    assert read(RequestFailed, 3, "why").pid == 0
    assert read(Measured, "m/0", (), 0, {}).rss_bytes == 0
    assert Exited.__struct_fields__[:3] == ("name", "pid", "code")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (PlaceWorker, (2, "m/0", "m", 0, 1.0, "ANYWHERE", "f")),
        (Start, (3, "m/0", (), {}, b"", "f", "name")),
        (Start, (3, "m/0", (), {}, b"", "f", "uuid", "supervisor")),
    ],
)
def test_a_word_that_means_nothing_is_refused(kind: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
        read(kind, *fields)
