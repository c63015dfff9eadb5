"""Whatever a peer sends: its connection ends, or goes on; nothing else happens.

Bytes are random, or messages that were damaged a little: those come further. On a connection of
this machine, and on one of another as it is before it is known who has dialled.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.errors import WireError
from servekit.protocol.control.remote_gateway import (
    AdminRequest,
    CertificateUpdate,
    FromRemoteGateway,
    ToRemoteGateway,
)
from servekit.protocol.messages import (
    FromGateway,
    FromWorker,
    GatewayToWorker,
    Generate,
    GetWhy,
    Hello,
    Load,
    Ready,
    SamplingParams,
    ToGateway,
    TokenBatch,
    ToSupervisor,
    ToWorker,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import FIRST_FRAME_BYTES, Connection
from servekit.protocol.transport.resumable_channel import Attach
from tests.unit.protocol.test_messages import INFO, SPEC

KINDS: list[Any] = [GatewayToWorker, WorkerToGateway, ToWorker, FromWorker, ToGateway]
KINDS += [FromGateway, ToSupervisor, Hello, Attach, FromRemoteGateway, ToRemoteGateway]
SEEDS = [
    Generate(1, SamplingParams(stop=("x",)), prompt="hé", tools=[{"a": [1, {"b": None}]}]),
    Load(SPEC),
    Ready(INFO, {"load": 1.5}),
    TokenBatch([1, 7], ["hé", ""], [5, 6]),
    Hello(3, "worker", "w", INFO),
    Attach("s", 3),
    AdminRequest(1, GetWhy("gateway/0")),
    CertificateUpdate("s", b"-----BEGIN", b"-----BEGIN"),
]
FRAMES = [msgspec.msgpack.encode(seed) for seed in SEEDS]
#: Heads of msgpack that promise four billion of something.
PROMISES = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
PROMISES += [b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"]
ATTEMPTS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

RUNNER = asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """One event loop for all examples."""
    with RUNNER:
        yield


class Wire(asyncio.Transport):
    """What a connection is fed through; the other end does not matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def fed(kind: Any, pieces: list[bytes], limit_bytes: int | None) -> Exception | None:
    """Feed them to a connection until it ends; with what it does."""

    async def feed() -> Exception | None:
        ends: list[Exception | None] = []
        heard: list[Any] = []
        connection: Connection[Any] = Connection(kind, heard.append, ends.append)
        wire = Wire()
        connection.connection_made(wire)
        if limit_bytes is not None:
            connection.allow(limit_bytes)
        for piece in pieces:
            if not wire.aborted:
                connection.data_received(piece)
        if wire.aborted:
            connection.connection_lost(None)
            assert len(ends) == 1
        members = get_args(kind) or (kind,)
        assert all(isinstance(message, members) for message in heard)
        return ends[0] if ends else None

    return RUNNER.run(feed())


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A frame of ours with some of it changed, cut out, or promised and not given."""
    body = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        new = draw(st.one_of(st.binary(max_size=4), st.sampled_from(PROMISES)))
        body[at : at + draw(st.integers(0, 4))] = new
    return framed(bytes(body))


limits = st.sampled_from([None, FIRST_FRAME_BYTES])


@ATTEMPTS
@given(st.sampled_from(KINDS), st.lists(st.binary(max_size=300), max_size=4), limits)
def test_any_bytes(kind: Any, pieces: list[bytes], limit_bytes: int | None) -> None:
    error = fed(kind, pieces, limit_bytes)
    assert error is None or isinstance(error, WireError)


@ATTEMPTS
@given(st.sampled_from(KINDS), st.lists(damaged(), min_size=1, max_size=3), limits)
def test_damaged_frames(kind: Any, frames: list[bytes], limit_bytes: int | None) -> None:
    error = fed(kind, frames, limit_bytes)
    assert error is None or isinstance(error, WireError)


@pytest.mark.parametrize("kind", [GatewayToWorker, FromWorker, Hello])
def test_what_is_promised_is_not_made_room_for(kind: Any) -> None:
    starts = [frame[:at] for frame in FRAMES for at in range(1, len(frame), 7)]
    tracemalloc.start()
    for promise in PROMISES:
        for start in starts:
            error = fed(kind, [framed(start + promise)], None)
            assert error is None or isinstance(error, WireError)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 4 * 2**20


def test_a_length_over_the_limit_ends_it_before_anything_is_kept() -> None:
    for limit_bytes in (None, FIRST_FRAME_BYTES):
        length = (limit_bytes or 64 * 2**20) + 1
        error = fed(Hello, [length.to_bytes(4, "big") + b"x"], limit_bytes)
        assert "over the limit" in str(error)


def test_nesting_without_end_is_no_more_than_an_error() -> None:
    body = msgspec.msgpack.encode(SEEDS[0])
    deep = body.replace(msgspec.msgpack.encode([1, {"b": None}]), b"\x91" * 50_000)
    assert isinstance(fed(GatewayToWorker, [framed(deep)], None), WireError)
