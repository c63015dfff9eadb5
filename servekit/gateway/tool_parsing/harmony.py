"""gpt-oss' channels: each message has a header that says whether it is thought, call or answer.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

Thoughts are told from the answer whether they are asked for or not: they are no part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.tool_call_parser import Calls, rest

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
#: How a header may begin: the prompt ends in `<|start|>assistant`.
_HEADERS = ("<|channel|>", " to=", "<|start|>", "<|message|>")


def harmony(tape: IncrementalScanner, *, tools: bool) -> Script[None]:
    """Messages up to the end. What is none, and all after it, is text."""
    calls = Calls(tape)
    while True:
        tape.mark()
        try:
            header = yield from _header(tape)
        except ParseError:
            if tape.cut:  # within a header
                return
            tape.rewind()
            yield from rest(tape)
            return
        tape.release()
        yield from _message(tape, calls, header, tools)
        if not (yield from tape.peek()):
            return


def _header(tape: IncrementalScanner) -> Script[str]:
    yield from tape.expect(*_HEADERS)
    tape.rewind()
    tape.mark()
    header, _ = yield from tape.until("<|message|>")
    return header


def _message(tape: IncrementalScanner, calls: Calls, header: str, tools: bool) -> Script[None]:
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    tell: Callable[[str], None] = tape.say
    if recipient is not None and tools:
        yield from _call(tape, calls, recipient.group(1))
    elif channel is not None and channel.group(1) == "analysis":
        tell = partial(tape.say, kind=Reasoning)
    found = yield from tape.find(_ENDS, tell, strip=recipient is not None)
    if found and found != "<|start|>":
        yield from tape.skip_space()
        yield from tape.expect(found)


def _call(tape: IncrementalScanner, calls: Calls, name: str) -> Script[None]:
    """Arguments as far as they are JSON; what follows them in their message is text."""
    calls.begin(name)
    following = yield from tape.skip_space()
    if following == "{":
        with suppress(ParseError):
            yield from tape.json(calls.argue)
    elif following:
        calls.argue("{}")
