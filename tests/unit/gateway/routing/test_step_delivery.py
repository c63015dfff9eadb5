"""What an engine step brings, up to what is written."""

from __future__ import annotations

import asyncio

from servekit.protocol.messages import Delta, DeltaBatch, TokenBatch
from tests.bench.path import STREAM, Ours, request


async def test_a_token_without_text_is_no_event_and_the_next_is_one() -> None:
    """Half of a character, say. Whoever has text that waits is woken once, and told all of it."""
    ours = Ours(2)
    (left, read), (right, other) = ours.clients
    for client in (left, right):
        client.data_received(request(b"/v1/completions", STREAM))
    await asyncio.sleep(0)
    tell = ours.worker.tell
    tell(DeltaBatch([Delta(1, "a", [97], prompt_tokens=5), Delta(2, "b", [98], prompt_tokens=5)]))
    await asyncio.sleep(0)
    writes = read.writes
    tell(TokenBatch([1, 2], ["", "c"], [1, 99]))
    await asyncio.sleep(0)
    assert read.writes == writes and b'"text":"c"' in other.last
    tell(TokenBatch([1], ["\u00e9"], [2]))
    tell(TokenBatch([1, 2], ["d", ""], [3, 4]))
    await asyncio.sleep(0)
    assert read.writes == writes + 1 and '"text":"\u00e9d"'.encode() in read.last
    tell(TokenBatch([1, 2], ["", "e"], [5, 6]))
    tell(DeltaBatch([Delta(1, "", [], "stop", 5, 6), Delta(2, "", [], "stop", 5, 5)]))
    await asyncio.sleep(0)
    assert read.last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"text":"e"' in other.last and other.last.count(b"[DONE]") == 1
