"""gpt-oss' channels: each message has a header that marks it as reasoning, call or answer.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

Reasoning is separated whether the client asked for it or not: it is no part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.tool_call_parser import Calls, read_rest

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
#: The possible beginnings of a header: the prompt ends in `<|start|>assistant`.
_HEADERS = ("<|channel|>", " to=", "<|start|>", "<|message|>")


def read_harmony(scanner: IncrementalScanner, *, tools: bool) -> Script[None]:
    """Read messages up to the end. Anything else, and everything after it, is text."""
    calls = Calls(scanner)
    while True:
        scanner.mark()
        try:
            header = yield from _read_header(scanner)
        except ParseError:
            if scanner.cut:  # within a header
                return
            scanner.rewind()
            yield from read_rest(scanner)
            return
        scanner.drop_mark()
        yield from _read_message(scanner, calls, header, tools)
        if not (yield from scanner.peek()):
            return


def _read_header(scanner: IncrementalScanner) -> Script[str]:
    yield from scanner.expect(*_HEADERS)
    scanner.rewind()
    scanner.mark()
    header, _ = yield from scanner.read_through_marker("<|message|>")
    return header


def _read_message(
    scanner: IncrementalScanner, calls: Calls, header: str, tools: bool
) -> Script[None]:
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    tell: Callable[[str], None] = scanner.emit_text
    if recipient is not None and tools:
        yield from _read_call(scanner, calls, recipient.group(1))
    elif channel is not None and channel.group(1) == "analysis":
        tell = partial(scanner.emit_text, kind=Reasoning)
    found = yield from scanner.read_until_marker(_ENDS, tell, strip=recipient is not None)
    if found and found != "<|start|>":
        yield from scanner.skip_space()
        yield from scanner.expect(found)


def _read_call(scanner: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    """Read arguments as far as they are JSON; the rest of the message is text."""
    calls.start_call(name)
    following = yield from scanner.skip_space()
    if following == "{":
        with suppress(ParseError):
            yield from scanner.json(calls.argue)
    elif following:
        calls.argue("{}")
