"""The families of tool calls by name, and the parser for a model's dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from servekit.gateway.parsing.calls import Body, Calls, calls_in_text, rest
from servekit.gateway.parsing.events import Parser
from servekit.gateway.parsing.json_calls import json_calls
from servekit.gateway.parsing.tape import Script, ScriptParser, Tape
from servekit.gateway.parsing.thoughts import thoughts
from servekit.wire.messages import Dialect


class Family(NamedTuple):
    """How calls are written: what opens them, what reads them, and what opens a bare one."""

    openings: tuple[str, ...]
    body: Body
    bare: tuple[str, ...] = ()
    short_ids: bool = False


def _hermes(_: Dialect) -> Family:
    return Family(("<tool_call>",), json_calls("</tool_call>"))


def _template(dialect: Dialect) -> Family:
    return Family((dialect.tool_begin,), json_calls(dialect.tool_end))


#: By `Dialect.tools`.
FAMILIES: dict[str, Callable[[Dialect], Family]] = {
    "hermes": _hermes,
    "template": _template,
}


def parser(dialect: Dialect, *, tools: bool, reasoning: bool) -> Parser:
    """A parser for one answer of a model with this dialect.

    `tools` says whether calls are looked for, `reasoning` whether thoughts are; what is not looked
    for comes out as text. A dialect without either is served, too: all is text.
    """
    make = FAMILIES.get(dialect.tools) if tools else None
    family = make(dialect) if make is not None else None
    thinks = dialect if reasoning and dialect.think_end else None
    return ScriptParser(lambda tape: _answer(tape, family, thinks))


def _answer(tape: Tape, family: Family | None, thinks: Dialect | None) -> Script[None]:
    if thinks is not None:
        yield from thoughts(tape, thinks.think_begin, thinks.think_end, thinks.thinks_at_once)
    if family is None:
        yield from rest(tape)
        return
    calls = Calls(tape, short_ids=family.short_ids)
    yield from calls_in_text(tape, calls, family.openings, family.body, family.bare)
