"""Calls written as a name followed by the arguments as JSON.

DeepSeek, Kimi and the newer Mistral use this form, and models trained on
`<function=name>{…}</function>`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.json_calls import json_calls, read_close, skip_marker
from servekit.gateway.tool_parsing.tool_call_parser import Calls, Family

#: A name in Kimi's form: functions.get_weather:0
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Named(NamedTuple):
    """The markers around names and arguments."""

    begin: str
    between: str
    end: str = ""
    outer_begin: str = ""  # around all calls of a turn
    outer_end: str = ""


_DEEPSEEK = Named(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = Named(
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
_FUNCTION = Named("<function=", ">", "</function>")
_MISTRAL = "[TOOL_CALLS]"


def make_deepseek() -> Family:
    return _make_family(_DEEPSEEK)


def make_kimi() -> Family:
    return _make_family(_KIMI)


def make_function() -> Family:
    return _make_family(_FUNCTION)


def make_mistral() -> Family:
    return Family((_MISTRAL,), _read_mistral, short_ids=True)


def _make_family(named: Named) -> Family:
    # models forget the outer marker; the inner one suffices
    openings = tuple(marker for marker in (named.outer_begin, named.begin) if marker)
    return Family(openings, partial(_read_calls, named=named))


def _read_calls(scanner: IncrementalScanner, calls: Calls, *, named: Named) -> Script[None]:
    outer = bool(named.outer_begin and (yield from scanner.take_marker(named.outer_begin)))
    while True:
        yield from scanner.skip_space()
        yield from scanner.expect(named.begin)
        yield from _read_call(scanner, calls, named)
        if not (yield from _marker_follows(scanner, named.begin)):
            break
    if outer:
        yield from read_close(scanner, named.outer_end)
    else:
        yield from skip_marker(scanner, named.outer_end)


def _marker_follows(scanner: IncrementalScanner, marker: str) -> Script[bool]:
    """Return whether a marker follows after white space; set a mark, and consume nothing."""
    scanner.mark()
    yield from scanner.skip_space()
    found = yield from scanner.take_marker(marker)
    scanner.rewind()
    scanner.mark()
    return bool(found)


def _read_call(scanner: IncrementalScanner, calls: Calls, named: Named) -> Script[None]:
    name = yield from scanner.read_name()
    yield from scanner.expect(named.between)
    fence = ""
    if named is _DEEPSEEK and name == "function":
        # V3 and R1: function<sep>name, then the arguments, in a code block or without one
        name = yield from scanner.read_name()
        fence = yield from scanner.take_marker("```json")
    elif named is _KIMI and (found := _KIMI_NAME.fullmatch(name)):
        name = found.group(1)
    yield from _read_arguments(scanner, calls, name)
    if fence:
        yield from read_close(scanner, "```")
    yield from read_close(scanner, named.end)


def _read_arguments(scanner: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    calls.record_name(name)
    if (yield from scanner.skip_space()) != "{":
        raise ParseError
    calls.start_call(name)
    yield from scanner.json(calls.argue)


# ---------------------------------------------------------------- Mistral


def _read_mistral(scanner: IncrementalScanner, calls: Calls) -> Script[None]:
    """Read [TOOL_CALLS][{…}, …], or [TOOL_CALLS]name[ARGS]{…} for each, optionally a [CALL_ID]."""
    if (yield from _peek_behind(scanner, _MISTRAL)) in ("[", "{"):
        yield from json_calls(_MISTRAL)(scanner, calls)
        return
    while True:
        yield from scanner.skip_space()
        yield from scanner.expect(_MISTRAL)
        name = yield from scanner.read_name()
        if (yield from scanner.take_marker("[CALL_ID]")):
            yield from scanner.read_name()
        yield from scanner.take_marker("[ARGS]")
        yield from _read_arguments(scanner, calls, name)
        if not (yield from _marker_follows(scanner, _MISTRAL)):
            return


def _peek_behind(scanner: IncrementalScanner, marker: str) -> Script[str]:
    """Return the first character after a marker, and stay before the marker."""
    space = len(scanner.marked())
    yield from scanner.expect(marker)
    following = yield from scanner.skip_space()
    scanner.rewind()
    scanner.mark()
    scanner.at += space
    return following
