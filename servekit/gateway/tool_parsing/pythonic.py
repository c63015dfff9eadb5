"""Calls written as Python: [f(a=1), g(b="x")], as Llama 3.2, 4 and LFM do."""

from __future__ import annotations

import json
from functools import partial

from servekit.gateway.tool_parsing.incremental_scanner import (
    MAX_HELD,
    IncrementalScanner,
    ParseError,
    Script,
)
from servekit.gateway.tool_parsing.json_calls import read_close
from servekit.gateway.tool_parsing.json_text import is_strict_json, python_as_json
from servekit.gateway.tool_parsing.tool_call_parser import Calls, Family

#: Markers around a list of calls: the closing one by the opening one.
PYTHON_MARKERS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
#: Python refuses line breaks within quotes, where models write them all the same.
_BREAKS = {"\n": "\\n", "\r": "\\r"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def make_pythonic(begin: str, end: str) -> Family:
    """Return the family of bare lists at the start of the text, and of lists between markers.

    The markers are the known ones and the template's own.
    """
    markers = PYTHON_MARKERS | ({begin: end} if begin else {})
    return Family(tuple(markers), partial(_read_calls, markers=markers), bare="[")


def _read_calls(
    scanner: IncrementalScanner, calls: Calls, *, markers: dict[str, str]
) -> Script[None]:
    marker = yield from scanner.take_marker(*markers)
    yield from scanner.skip_space()
    yield from scanner.expect("[")
    while True:
        yield from _read_call(scanner, calls)
        scanner.mark()
        yield from scanner.skip_space()
        if not (yield from scanner.take_marker(",")):
            break
    scanner.rewind()
    yield from read_close(scanner, "]")
    if marker and markers[marker]:
        yield from read_close(scanner, markers[marker])


def _read_call(scanner: IncrementalScanner, calls: Calls) -> Script[None]:
    name = yield from scanner.read_name()
    yield from scanner.expect("(")
    yield from scanner.skip_space()
    calls.record_name(name)
    before = "{"
    while not (yield from scanner.take_marker(")")):
        key = yield from scanner.read_name()
        yield from scanner.expect("=")
        value = _as_json((yield from _read_literal(scanner)))
        if before == "{":
            calls.start_call(name)
        calls.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
        before = ", "
        yield from scanner.take_marker(",")
        yield from scanner.skip_space()
    if before == "{":
        calls.start_call(name)
        calls.argue(before)
    calls.argue("}")


def _read_literal(scanner: IncrementalScanner) -> Script[str]:
    """Return the source of a value, up to the comma or parenthesis after it."""
    source: list[str] = []
    closing, quote, escaped = [")"], "", False
    while True:
        sign = yield from scanner.peek()
        if not sign or len(source) > MAX_HELD:
            raise ParseError
        if quote and sign in _BREAKS and not escaped:
            sign = _BREAKS[sign]
        elif quote:
            quote = "" if sign == quote and not escaped else quote
            escaped = sign == "\\" and not escaped
        elif sign in "\"'":
            quote = sign
        elif sign in _CLOSING:
            closing.append(_CLOSING[sign])
        elif sign in ")]}" and sign != closing.pop():
            raise ParseError
        if not closing or (sign == "," and not quote and len(closing) == 1):
            return "".join(source).strip()
        source.append(sign)
        scanner.at += 1


def _as_json(source: str) -> str:
    """Return the value as JSON; source that is already JSON stays unchanged."""
    if is_strict_json(source):
        return source
    try:
        return python_as_json(source)
    except ValueError:
        raise ParseError from None
