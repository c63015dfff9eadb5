"""The sockets that an actor holds for the gateway of its node, and what it tells of a process."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator

import msgspec
import pytest

from servekit.errors import StartError
from servekit.ray.process.actor import ActorEvents, Process, ProcessActor, Sockets

HERE = "127.0.0.1"


@pytest.fixture
def doors() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.open_sockets(())


def free_port() -> int:
    with socket.create_server((HERE, 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def reached(port: int) -> bool:
    try:
        socket.create_connection((HERE, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_they_stay_open_from_one_gateway_to_the_next(doors: Sockets) -> None:
    port, legacy = free_port(), free_port()
    first = doors.open_sockets(((HERE, port), (HERE, legacy)))
    assert doors.open_sockets(((HERE, port), (HERE, legacy))) == first
    assert reached(port) and reached(legacy)
    assert doors.open_sockets(((HERE, port),)) == first[:1]
    assert reached(port) and not reached(legacy)


def test_a_port_that_is_taken_is_told_and_nothing_is_left_open(doors: Sockets) -> None:
    free = free_port()
    with socket.create_server((HERE, 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(StartError, match=rf"{HERE}:{taken} is already in use by pid .*port"):
            doors.open_sockets(((HERE, free), (HERE, taken)))
    assert not reached(free)
    doors.open_sockets(((HERE, free), (HERE, taken)))
    assert reached(free) and reached(taken)


def test_much_output_is_told_in_parts_and_the_end_with_the_last() -> None:
    """All at once, it would be over the limit of a message to the supervisor."""
    actor = ProcessActor(0, 3600.0)
    process = actor._process = Process("", "worker")
    lines = [f"{number:05}".ljust(64 * 2**10) for number in range(100)]
    actor._store_output(process, io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    actor._take(process, {"pid": 7, "code": 3})
    told, events = list[str](), ActorEvents((), 0)
    while events.code is None:
        events = poll(actor, events.seen)
        assert events.lines and sum(map(len, events.lines)) <= 2**20
        told += events.lines
    assert [line for line in told if line] == lines
    assert (events.pid, events.code) == (7, 3)
    later = poll(actor, events.seen, events.pid)
    assert (later.lines, later.code) == ((), None)


def test_the_end_of_a_process_is_told_until_a_driver_knows_it() -> None:
    """The one that asked may have died while it waited for the answer."""
    actor = ProcessActor(0, 3600.0)
    process = actor._process = Process("", "worker")
    actor._take(process, {"pid": 7, "code": 3})
    assert [poll(actor, 0).code for _ in range(2)] == [3, 3]
    assert poll(actor, 0, 6).code == 3
    assert poll(actor, 0, 7).code is None
    assert poll(actor, 0).code is None


def test_a_new_driver_repeats_no_line_and_misses_none() -> None:
    actor = ProcessActor(0, 3600.0)
    process = actor._process = Process("", "worker")
    actor._store_output(process, io.BytesIO(b"one\ntwo\n"))
    first = poll(actor, -1)
    assert first.lines == ("one", "two")
    assert poll(actor, -1).lines == first.lines, "the driver before died with them in hand"
    poll(actor, first.seen)
    actor._store_output(process, io.BytesIO(b"three\n"))
    assert poll(actor, -1).lines == ("three",)


def poll(actor: ProcessActor, seen: int, ended: int = -1) -> ActorEvents:
    return msgspec.msgpack.decode(actor.poll(seen, 0.1, ended), type=ActorEvents)
