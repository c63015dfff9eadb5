"""Separates the model's reasoning from the answer that follows it."""

from __future__ import annotations

from functools import partial

from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.incremental_scanner import MAX_SPACE, IncrementalScanner, Script


def read_thoughts(tape: IncrementalScanner, begin: str, end: str, at_once: bool) -> Script[None]:
    """Consume the reasoning at the start of the text, if any; a later marker is only text.

    White space inside and after the markers belongs to the markers. Reasoning without an end marker
    goes on to the end of the text. A model may write `begin` although its template has already done
    so.
    """
    tape.mark()
    yield from tape.skip_space(MAX_SPACE)
    begins = yield from tape.take(begin)
    if not begins and not at_once:
        tape.rewind()
        return
    tape.release()
    yield from tape.skip_space(MAX_SPACE)
    tell = partial(tape.say, kind=Reasoning)
    if (yield from tape.find((end,), tell)):
        yield from tape.skip_space(MAX_SPACE)
        yield from tape.expect(end)
        yield from tape.skip_space(MAX_SPACE)
