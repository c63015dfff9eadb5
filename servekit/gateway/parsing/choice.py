"""The grammar that makes a model call tools, in the syntax of its family.

Needed where the request leaves no choice ("required", a named function), and where a tool is
`strict`: then text stays free, and a call, once begun, keeps to the schema.
"""

from __future__ import annotations

from servekit.errors import Unsupported
from servekit.gateway.parsing.definitions import Choice
from servekit.gateway.parsing.lark import Lark, harmony_thoughts, one_of, thoughts
from servekit.gateway.parsing.syntax import WRITERS, Syntax
from servekit.wire.messages import Dialect, Grammar

_TEXT = "/(?s:.*)/"
#: What opens calls that have no marker: text must not begin so.
_BARE = {"llama3_json": "{", "pythonic": "["}


def tool_grammar(
    dialect: Dialect, choice: Choice, *, parallel: bool = True, begun: bool = False
) -> Grammar | None:
    """The grammar for one answer; None where the model may write what it likes.

    With `parallel` an answer may hold several calls. `begun` says whether the prompt has begun the
    thoughts, as `begins_thinking` does. Raises Unsupported for a dialect without known calls.
    """
    required = choice.mode == "required"
    strict = any(tool["function"].get("strict") for tool in choice.tools)
    if choice.mode == "none" or not (required or strict):
        return None
    if dialect.tools not in WRITERS:
        raise Unsupported(
            "it is not known how this model writes tool calls, so they can't be made to fit",
            param="tool_choice" if required else "tools",
        )
    lark = Lark(dialect)
    many = parallel and not choice.once
    opening, calls = WRITERS[dialect.tools](Syntax(lark, dialect, choice.tools, many, required))
    written = f"{lark.text(opening)} {calls}"
    if dialect.tools == "harmony":
        final = f"{lark.text('<|channel|>', 'final', '<|message|>')} {lark.rule(_TEXT)}"
        answer = written if required else one_of([written, final])
        return lark.grammar(f"{harmony_thoughts(lark)} {answer}", param="tools")
    answer = written if required else _in_text(lark, dialect, opening, calls)
    return lark.grammar(f"{thoughts(lark, dialect, begun)} {answer}", param="tools")


def _in_text(lark: Lark, dialect: Dialect, opening: str, calls: str) -> str:
    """Free text, and perhaps calls after it: text that opens a call has to go on as one."""
    if not opening:
        text = lark.rule(rf"/\s{{0,8}}[^\s\{_BARE[dialect.tools]}](?s:.*)/")
        return f"{one_of([calls, text])}?"
    return one_of([lark.rule(_TEXT), f"{lark.until(opening)} {calls}"])
