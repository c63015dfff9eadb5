"""What a model thinks before it answers, told from the answer."""

from __future__ import annotations

from functools import partial

from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.incremental_scanner import MAX_SPACE, IncrementalScanner, Script


def thoughts(tape: IncrementalScanner, begin: str, end: str, at_once: bool) -> Script[None]:
    """Consume the thoughts, if the text begins with any: a later marker is only text.

    White space inside the markers, and after them, belongs to them. Thoughts that are not ended
    go on to the end of the text. A model that writes `begin` although its template has done so
    already is understood.
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
