"""Calls written as JSON objects: {"name": …, "arguments": {…}}, alone, in a row or in a list.

Hermes and Qwen, Llama 3, the older Mistral and most others write them so, in markers of their own.
"""

from __future__ import annotations

import json
from functools import partial

from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.json_text import is_encodable, is_json
from servekit.gateway.tool_parsing.tool_call_parser import Body, Calls

#: What models call the two members; the first of each that comes counts.
_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")


def json_calls(begin: str = "", end: str = "") -> Body:
    """A body of JSON objects between `begin` and `end`; "" where nothing ends them.

    Without a marker before them only objects with a name and arguments are calls: any other
    object is the answer itself.
    """
    return partial(_read, begin=begin, end=end)


def _read(tape: IncrementalScanner, calls: Calls, *, begin: str, end: str) -> Script[None]:
    marked = bool(begin and (yield from tape.take(begin)))
    yield from tape.skip_space()
    listed = yield from tape.take("[")
    while True:
        yield from tape.skip_space()
        yield from _call(tape, calls, strict=not marked)
        tape.mark()
        if not (yield from _another(tape)):
            break
    tape.rewind()
    if listed:
        yield from close(tape, "]")
    if end and marked:
        yield from close(tape, end)


def _another(tape: IncrementalScanner) -> Script[bool]:
    """Whether a further object comes, after a comma, a semicolon or nothing at all."""
    yield from tape.skip_space()
    yield from tape.take(",", ";")
    return (yield from tape.skip_space()) == "{"


def close(tape: IncrementalScanner, marker: str) -> Script[None]:
    """Consume a closing marker; where something else stands, that is left, and Malformed raised."""
    tape.mark()
    yield from tape.skip_space()
    if not (yield from tape.take_end(marker)):
        raise ParseError
    tape.release()


def _call(tape: IncrementalScanner, calls: Calls, *, strict: bool) -> Script[None]:
    """One object. Its members may come in any order; arguments before the name wait for it."""
    name, waiting, known = "", "", calls.count
    yield from tape.expect("{")
    while (key := (yield from _key(tape))) is not None:
        if key in _NAMES and not name:
            name = yield from _string(tape)
            calls.name(name)
        elif key not in _ARGUMENTS or waiting or calls.count > known:
            calls.doubtful |= strict and calls.count == known
            yield from _collect(tape)
        elif name:
            yield from _arguments(tape, calls, name)
        else:
            waiting = yield from _collect(tape)
        tape.hold()
    if calls.count == known:
        if strict and not waiting:
            raise ParseError
        written = _as_object(waiting or "{}")
        calls.begin(name)
        calls.argue(written)


def _key(tape: IncrementalScanner) -> Script[str | None]:
    """The next member's key, its colon consumed; None at the end of the object."""
    yield from tape.skip_space()
    yield from tape.take(",")
    yield from tape.skip_space()
    if (yield from tape.take("}")):
        return None
    key = yield from _string(tape)
    yield from tape.skip_space()
    yield from tape.expect(":")
    return key


def _arguments(tape: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    """Arguments behind their name: an object goes out as it comes."""
    if (yield from tape.skip_space()) == "{":
        calls.begin(name)
        yield from tape.json(calls.argue)
        return
    written = _as_object((yield from _collect(tape)))
    calls.begin(name)
    calls.argue(written)


def _as_object(written: str) -> str:
    """Arguments that are no object as they stand: some models quote theirs, or write null."""
    if written.startswith('"'):
        written = _unquoted(written).strip() or "{}"
    if written == "null":
        return "{}"
    if not (written.startswith("{") and is_json(written) and is_encodable(written)):
        raise ParseError
    return written


def _unquoted(written: str) -> str:
    try:
        return str(json.loads(written, strict=False))
    except ValueError:  # an escape that there is not
        raise ParseError from None


def _string(tape: IncrementalScanner) -> Script[str]:
    if (yield from tape.skip_space()) != '"':
        raise ParseError
    text = _unquoted((yield from _collect(tape)))
    if not is_encodable(text):
        raise ParseError
    return text


def _collect(tape: IncrementalScanner) -> Script[str]:
    """A whole value, as it is written."""
    pieces: list[str] = []

    def tell(text: str) -> None:
        pieces.append(text)
        tape.hold()

    yield from tape.json(tell)
    return "".join(pieces)
