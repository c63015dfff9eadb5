"""The families of tool calls by name, and the parser for a model's dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from servekit.gateway.tool_parsing import named_calls
from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.framed import read_framed
from servekit.gateway.tool_parsing.gemma import FUNCTION_GEMMA, GEMMA_4, make_gemma
from servekit.gateway.tool_parsing.harmony import read_harmony
from servekit.gateway.tool_parsing.incremental_scanner import (
    MAX_SPACE,
    IncrementalScanner,
    Parser,
    Script,
)
from servekit.gateway.tool_parsing.json_calls import json_calls
from servekit.gateway.tool_parsing.pythonic import make_pythonic
from servekit.gateway.tool_parsing.tagged_calls import (
    DSML,
    GLM,
    INVOKE,
    QWEN,
    Tags,
    TextArguments,
    make_tagged,
    text_arguments,
)
from servekit.gateway.tool_parsing.tool_call_parser import (
    Calls,
    Family,
    calls_in_text,
    read_calls_until,
    read_rest,
)
from servekit.protocol.messages import Dialect
from servekit.protocol.tool_formats import FRAMED, THINKING_SWITCHES

Tools = Sequence[Mapping[str, Any]]
Make = Callable[[Dialect, TextArguments], Family]


def _make_json(begin: str, end: str) -> Make:
    return lambda dialect, texts: Family((begin,), json_calls(begin, end))


def _make_llama(dialect: Dialect, texts: TextArguments) -> Family:
    return Family(("<|python_tag|>",), json_calls("<|python_tag|>"), bare="{")


def _bare_json(dialect: Dialect, texts: TextArguments) -> Family:
    return Family((), json_calls(), bare="{")


def _make_template(dialect: Dialect, texts: TextArguments) -> Family:
    begin, end = dialect.tool_begin, dialect.tool_end
    return Family((begin,), json_calls(begin, end))


def _make_tagged(tags: Tags) -> Make:
    return lambda dialect, texts: make_tagged(tags, dialect.tool_begin, dialect.tool_end, texts)


#: The families by `Dialect.tools`, without "harmony" (all of whose messages are marked) and FRAMED.
FAMILIES: dict[str, Make] = {
    "hermes": _make_json("<tool_call>", "</tool_call>"),
    "qwen3_coder": _make_tagged(QWEN),
    "llama3_json": _make_llama,
    "pythonic": lambda dialect, texts: make_pythonic(dialect.tool_begin, dialect.tool_end),
    "mistral": lambda dialect, texts: named_calls.make_mistral(),
    "deepseek": lambda dialect, texts: named_calls.make_deepseek(),
    "kimi_k2": lambda dialect, texts: named_calls.make_kimi(),
    "glm": _make_tagged(GLM),
    "invoke": _make_tagged(INVOKE),
    "dsml": _make_tagged(DSML),
    "cohere": _make_json("<|START_ACTION|>", "<|END_ACTION|>"),
    "gemma": lambda dialect, texts: make_gemma(GEMMA_4),
    "function_gemma": lambda dialect, texts: make_gemma(FUNCTION_GEMMA),
    "function": lambda dialect, texts: named_calls.make_function(),
    "json": _bare_json,
    "template": _make_template,
}


def parser(
    dialect: Dialect,
    *,
    tools: bool | Tools,
    reasoning: bool,
    thinking: bool | None = None,
) -> Parser:
    """Return a parser for one answer of a model with this dialect.

    `tools` says whether to look for calls; from tool definitions, families with unquoted values
    learn which arguments are text. `reasoning` says whether to look for reasoning. Calls and
    reasoning that are not looked for remain text. `thinking` says whether the prompt has begun the
    reasoning; None leaves that to the dialect (see `begins_thinking`).
    """
    if dialect.tools == "harmony":
        return Parser(lambda scanner: read_harmony(scanner, tools=bool(tools)))
    if dialect.tools == FRAMED:
        return Parser(lambda scanner: read_framed(scanner, dialect, reasoning=reasoning))
    make = FAMILIES.get(dialect.tools) if tools else None
    texts = {} if isinstance(tools, bool) else text_arguments(tools)
    family = make(dialect, texts) if make is not None else None
    at_once = dialect.thinks_at_once if thinking is None else thinking
    thinks = dialect if reasoning and dialect.think_end else None
    return Parser(lambda scanner: _read_answer(scanner, family, thinks, at_once))


def begins_thinking(dialect: Dialect, template: Mapping[str, Any], continues: bool) -> bool:
    """Return whether the prompt has begun the reasoning, given the template's arguments.

    Templates name the switch `enable_thinking` or `thinking`, and many know none: those of some
    models that always reason begin it whatever is asked for, others leave that to the model.
    """
    if continues or not dialect.think_end:
        return False
    given = {(name, on) for name in THINKING_SWITCHES if isinstance(on := template.get(name), bool)}
    return dialect.thinks_at_once is given.isdisjoint(dialect.thinking_switches)


def _read_answer(
    scanner: IncrementalScanner, family: Family | None, thinks: Dialect | None, at_once: bool
) -> Script[None]:
    family = family or Family((), lambda scanner, calls: read_rest(scanner))
    calls = Calls(scanner, short_ids=family.short_ids)
    if thinks is not None:
        yield from _read_thoughts(scanner, calls, family, thinks, at_once)
    yield from calls_in_text(scanner, calls, family)


def _read_thoughts(
    scanner: IncrementalScanner, calls: Calls, family: Family, thinks: Dialect, at_once: bool
) -> Script[None]:
    """Consume the reasoning at the start of the text, if any; a later marker is only text.

    White space inside and after the markers belongs to the markers. Reasoning without an end marker
    goes on to the end of the text. A model may write the begin marker although its template has
    already done so, and forget the end marker before calls.
    """
    begin, end = thinks.think_begin, thinks.think_end
    scanner.mark()
    yield from scanner.skip_space(MAX_SPACE)
    begins = yield from scanner.take_marker(begin)
    if not begins and not at_once:
        scanner.rewind()
        return
    scanner.drop_mark()
    yield from scanner.skip_space(MAX_SPACE)
    tell = partial(scanner.emit_text, kind=Reasoning)
    if (yield from read_calls_until(scanner, calls, family, tell, end)):
        yield from scanner.skip_space(MAX_SPACE)
        yield from scanner.expect(end)
        yield from scanner.skip_space(MAX_SPACE)
