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


def read_harmony(tape: IncrementalScanner, *, tools: bool) -> Script[None]:
    """Read messages up to the end. Anything else, and everything after it, is text."""
    calls = Calls(tape)
    while True:
        tape.mark()
        try:
            header = yield from _read_header(tape)
        except ParseError:
            if tape.cut:  # within a header
                return
            tape.rewind()
            yield from read_rest(tape)
            return
        tape.release()
        yield from _read_message(tape, calls, header, tools)
        if not (yield from tape.peek()):
            return


def _read_header(tape: IncrementalScanner) -> Script[str]:
    yield from tape.expect(*_HEADERS)
    tape.rewind()
    tape.mark()
    header, _ = yield from tape.until("<|message|>")
    return header


def _read_message(tape: IncrementalScanner, calls: Calls, header: str, tools: bool) -> Script[None]:
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    tell: Callable[[str], None] = tape.say
    if recipient is not None and tools:
        yield from _read_call(tape, calls, recipient.group(1))
    elif channel is not None and channel.group(1) == "analysis":
        tell = partial(tape.say, kind=Reasoning)
    found = yield from tape.find(_ENDS, tell, strip=recipient is not None)
    if found and found != "<|start|>":
        yield from tape.skip_space()
        yield from tape.expect(found)


def _read_call(tape: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    """Read arguments as far as they are JSON; the rest of the message is text."""
    calls.begin(name)
    following = yield from tape.skip_space()
    if following == "{":
        with suppress(ParseError):
            yield from tape.json(calls.argue)
    elif following:
        calls.argue("{}")
