"""Reading of an answer: a stream of events, or a single JSON document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from servekit.engines.remote.client import Reply
from servekit.engines.remote.errors import wrong_answer
from servekit.engines.remote.response_parser import ResponseParser
from servekit.errors import EndpointFailed
from servekit.sse import EventStream, EventTooLong

#: Limit of one event: more than any answer needs, and little memory for each slot.
MAX_EVENT_BYTES = 4 * 2**20
#: Time for usage counts and anything else after the end of an answer.
_AFTERWARDS_S = 5.0
_DRAIN_S = 1.0
_DONE = b"[DONE]"


async def read_reply(reply: Reply, answer: ResponseParser, tell: Callable[[], None]) -> None:
    """Pass the whole reply to `answer`; call `tell` after each piece.

    Raises the errors of `ResponseParser` and `Reply`, and EndpointFailed if the reply is no
    stream.
    """
    if reply.kind == "application/json":  # the endpoint does not stream, or this is an error
        answer.add_chunk(await reply.read_all())
        answer.close(done=True)
        return
    if reply.kind != "text/event-stream":
        begins = (await reply.read_next())[:80].decode(errors="replace")
        raise wrong_answer(f"it is {reply.kind[:40]!r}, not a stream of events: {begins!r}")
    try:
        async with asyncio.timeout(None) as limit:
            answer.close(done=await _take_events(reply, answer, tell, limit))
    except (EndpointFailed, TimeoutError):
        if answer.finish is None:
            raise


async def _take_events(
    reply: Reply, answer: ResponseParser, tell: Callable[[], None], limit: asyncio.Timeout
) -> bool:
    """Read the stream; return whether it said [DONE], or has nothing more to offer."""
    events = EventStream(MAX_EVENT_BYTES)
    while piece := await reply.read_next():
        done = _feed_events(events, piece, answer)
        tell()
        if done or (answer.finish and answer.counted):
            return True
        if answer.finish and limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + _AFTERWARDS_S)
    return _feed_events(events, None, answer)


def _feed_events(events: EventStream, piece: bytes | None, answer: ResponseParser) -> bool:
    try:
        found = events.end() if piece is None else events.read_events(piece)
    except EventTooLong:
        raise wrong_answer(f"one of its events has more than {MAX_EVENT_BYTES} bytes") from None
    for data in found:
        if data.strip() == _DONE:
            return True
        answer.add_chunk(data)
    return False


async def drain_reply(reply: Reply) -> None:
    """Read the rest after the end, briefly, so that the connection can be reused."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await reply.read_next():
                pass
    except (EndpointFailed, TimeoutError):
        return
