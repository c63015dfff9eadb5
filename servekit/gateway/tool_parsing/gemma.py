"""Calls as Gemma writes them: call:name{key:<|"|>text<|"|>,other:[1,{a:true}]}, between markers.

Keys have no quotes, and text stands between tokens of its own, verbatim. Text is streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from servekit.gateway.tool_parsing.incremental_scanner import (
    MAX_HELD,
    IncrementalScanner,
    ParseError,
    Script,
)
from servekit.gateway.tool_parsing.json_calls import read_close
from servekit.gateway.tool_parsing.json_text import is_json
from servekit.gateway.tool_parsing.tool_call_parser import Calls, Family

#: The greatest depth of lists and objects.
_MAX_DEPTH = 64
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Gemma(NamedTuple):
    """The markers of a generation: around a call, and on both sides of a text."""

    begin: str
    end: str
    quote: str


GEMMA_4 = Gemma("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Gemma("<start_function_call>", "<end_function_call>", "<escape>")


def make_gemma(gemma: Gemma) -> Family:
    return Family((gemma.begin,), partial(_read_call, gemma=gemma))


def _read_call(scanner: IncrementalScanner, calls: Calls, *, gemma: Gemma) -> Script[None]:
    yield from scanner.expect(gemma.begin)
    yield from scanner.skip_space()
    yield from scanner.expect("call:")
    name = yield from scanner.read_name()
    calls.record_name(name)
    yield from scanner.expect("{")
    calls.start_call(name)
    yield from _read_members(scanner, calls.argue, gemma, _MAX_DEPTH)
    yield from read_close(scanner, gemma.end)


def _read_members(
    scanner: IncrementalScanner, tell: Callable[[str], None], gemma: Gemma, depth: int
) -> Script[None]:
    """Read the members of an object, whose brace is consumed."""
    tell("{")
    before = ""
    while (yield from scanner.skip_space()) != "}":
        key = yield from _read_key(scanner, gemma)
        tell(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_value(scanner, tell, gemma, depth)
        before = yield from _read_comma(scanner, "}")
    scanner.at += 1
    tell("}")


def _read_comma(scanner: IncrementalScanner, close: str) -> Script[str]:
    """Consume a comma, unless `close` comes next; return what to tell before another value."""
    if (yield from scanner.skip_space()) != close:
        yield from scanner.expect(",")
    return ", "


def _read_key(scanner: IncrementalScanner, gemma: Gemma) -> Script[str]:
    quote = yield from scanner.take_marker(gemma.quote, '"')
    key, _ = yield from scanner.read_through_marker(quote or ":")
    if quote:
        yield from scanner.skip_space()
        yield from scanner.expect(":")
        return key
    return key.strip()


def _read_value(
    scanner: IncrementalScanner, tell: Callable[[str], None], gemma: Gemma, depth: int
) -> Script[None]:
    if not depth:
        raise ParseError
    following = yield from scanner.skip_space()
    if (yield from scanner.take_marker(gemma.quote)):
        yield from _read_text(scanner, tell, gemma)
    elif following == '"':
        yield from scanner.json(tell)
    elif following == "{":
        scanner.at += 1
        yield from _read_members(scanner, tell, gemma, depth - 1)
    elif following == "[":
        scanner.at += 1
        yield from _read_items(scanner, tell, gemma, depth - 1)
    else:
        tell((yield from _read_word(scanner)))


def _read_text(
    scanner: IncrementalScanner, tell: Callable[[str], None], gemma: Gemma
) -> Script[None]:
    tell('"')
    found = yield from scanner.read_until_marker(
        (gemma.quote,), lambda text: tell(json.dumps(text, ensure_ascii=False)[1:-1]), strip=False
    )
    if not found:
        raise ParseError
    scanner.at += len(found)
    tell('"')


def _read_items(
    scanner: IncrementalScanner, tell: Callable[[str], None], gemma: Gemma, depth: int
) -> Script[None]:
    tell("[")
    before = ""
    while (yield from scanner.skip_space()) != "]":
        tell(before)
        yield from _read_value(scanner, tell, gemma, depth)
        before = yield from _read_comma(scanner, "]")
    scanner.at += 1
    tell("]")


def _read_word(scanner: IncrementalScanner) -> Script[str]:
    """Return a number or constant as JSON; text without quotes becomes text."""
    word = ""
    while (following := (yield from scanner.peek())) not in (",", "}", "]"):
        if not following or len(word) > MAX_HELD:
            raise ParseError
        word += following
        scanner.at += 1
    word = word.strip()
    if not word:
        raise ParseError
    word = _PYTHON.get(word, word)
    return word if is_json(word) else json.dumps(word, ensure_ascii=False)
