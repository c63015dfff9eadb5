"""Calls written as JSON objects: {"name": …, "arguments": {…}}, alone, in a row or in a list.

Hermes, Qwen, Llama 3, the older Mistral and most others use this form, with their own markers.
"""

from __future__ import annotations

import json
from functools import partial

from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.json_text import is_encodable, is_json
from servekit.gateway.tool_parsing.tool_call_parser import Body, Calls

#: The names that models give to the two members; the first member found counts.
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def json_calls(begin: str = "", end: str = "") -> Body:
    """Return the body that reads JSON objects between `begin` and `end`; "" for no end marker.

    Without a marker before it, only an object with a name and arguments is a call; any other object
    is the answer.
    """
    return partial(_read_calls, begin=begin, end=end)


def _read_calls(scanner: IncrementalScanner, calls: Calls, *, begin: str, end: str) -> Script[None]:
    marked = bool(begin and (yield from scanner.take_marker(begin)))
    yield from scanner.skip_space()
    listed = yield from scanner.take_marker("[")
    while True:
        yield from scanner.skip_space()
        yield from _read_call(scanner, calls, strict=not marked)
        scanner.mark()
        if not (yield from _has_another(scanner)):
            break
    scanner.rewind()
    if listed:
        yield from read_close(scanner, "]")
    if end and marked:
        yield from read_close(scanner, end)


def _has_another(scanner: IncrementalScanner) -> Script[bool]:
    """Return whether another object follows, after a comma, a semicolon or nothing."""
    yield from scanner.skip_space()
    yield from scanner.take_marker(",", ";")
    return (yield from scanner.skip_space()) == "{"


def read_close(scanner: IncrementalScanner, marker: str) -> Script[None]:
    """Consume a closing marker. Raises ParseError if anything else follows, and leaves that."""
    scanner.mark()
    yield from scanner.skip_space()
    if not (yield from scanner.take_end(marker)):
        raise ParseError
    scanner.drop_mark()


def skip_marker(scanner: IncrementalScanner, marker: str) -> Script[None]:
    """Consume a closing marker whose opening one the model forgot, if it follows."""
    scanner.mark()
    yield from scanner.skip_space()
    if marker and (yield from scanner.take_end(marker)):
        scanner.drop_mark()
    scanner.rewind()


def _read_call(scanner: IncrementalScanner, calls: Calls, *, strict: bool) -> Script[None]:
    """Read one object, with members in any order; arguments that precede the name are held back."""
    name, waiting, known = "", "", calls.count
    yield from scanner.expect("{")
    while (key := (yield from _read_key(scanner))) is not None:
        if key in (_NAMES[:1] if strict else _NAMES) and not name:
            name = yield from _read_string(scanner)
            calls.record_name(name)
        elif key not in _ARGUMENTS or waiting or calls.count > known:
            calls.doubtful |= strict and calls.count == known
            yield from _collect_value(scanner)
        elif name:
            yield from _read_arguments(scanner, calls, name)
        else:
            waiting = yield from _collect_value(scanner)
        scanner.limit_held_text()
    if calls.count == known:
        if strict and not waiting:
            raise ParseError
        written = _as_object(waiting or "{}")
        calls.start_call(name)
        calls.argue(written)


def _read_key(scanner: IncrementalScanner) -> Script[str | None]:
    """Return the next member's key, with its colon consumed; None at the end of the object."""
    yield from scanner.skip_space()
    yield from scanner.take_marker(",")
    yield from scanner.skip_space()
    if (yield from scanner.take_marker("}")):
        return None
    key = yield from _read_string(scanner)
    yield from scanner.skip_space()
    yield from scanner.expect(":")
    return key


def _read_arguments(scanner: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    """Read the arguments after their name: an object is passed on as it arrives."""
    if (yield from scanner.skip_space()) == "{":
        calls.start_call(name)
        yield from scanner.json(calls.argue)
        return
    written = _as_object((yield from _collect_value(scanner)))
    calls.start_call(name)
    calls.argue(written)


def _as_object(written: str) -> str:
    """Return arguments as an object: some models quote the object, or write null."""
    if written.startswith('"'):
        written = _unquote_json(written).strip() or "{}"
    if written == "null":
        return "{}"
    if not (written.startswith("{") and is_json(written) and is_encodable(written)):
        raise ParseError
    return written


def _unquote_json(written: str) -> str:
    try:
        return str(json.loads(written, strict=False))
    except ValueError:  # an invalid escape
        raise ParseError from None


def _read_string(scanner: IncrementalScanner) -> Script[str]:
    if (yield from scanner.skip_space()) != '"':
        raise ParseError
    text = _unquote_json((yield from _collect_value(scanner)))
    if not is_encodable(text):
        raise ParseError
    return text


def _collect_value(scanner: IncrementalScanner) -> Script[str]:
    """Return the source of one complete JSON value."""
    pieces: list[str] = []

    def collect_text(text: str) -> None:
        pieces.append(text)
        scanner.limit_held_text()

    yield from scanner.json(collect_text)
    return "".join(pieces)
