"""Messages between the ranks of a replica, over a real pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from servekit.engines.transformers.tensor_parallel import messages
from servekit.engines.transformers.tensor_parallel.messages import (
    Done,
    DropPages,
    Failed,
    Run,
    TensorForm,
    receive_answer,
    receive_order,
    send_message,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_each_message_is_a_packet_of_its_own(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    run = Run("model", "sdpa", {"a": [1, None]}, (TensorForm("float32", (2, 3)),), 24)
    send_message(ours, run)
    send_message(ours, DropPages())
    assert receive_order(theirs) == run
    assert receive_order(theirs) == DropPages()
    send_message(theirs, Done(7))
    send_message(theirs, Failed("no memory", out_of_memory=True))
    assert receive_answer(ours) == Done(7)
    assert receive_answer(ours) == Failed("no memory", True, True)


def test_the_end_of_the_other_side_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    assert receive_order(theirs) is None
    assert receive_answer(theirs) is None


def test_a_run_of_a_large_step_fits_in_a_packet(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    large = Run("model", "", list(range(1 << 15)), (), 0)
    size = len(messages._encode(large))
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)
    send_message(ours, large)
    assert receive_order(theirs) == large
