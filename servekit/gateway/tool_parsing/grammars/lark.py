"""Writes grammars in llguidance's Lark dialect.

A marker that is a token of its own is written as that token (`<[id]>`): a literal would never match
it, and the text before it cannot contain it. Any other marker is a literal, and the text up to it
is a lazy rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from servekit.errors import RequestError
from servekit.gateway.tool_parsing.grammars.closed_objects import close_objects
from servekit.gateway.tool_parsing.grammars.schema_formats import without_unknown_formats
from servekit.protocol.messages import Dialect, Grammar
from servekit.protocol.types import GrammarParam

#: White space between parts of JSON: enough to indent, too little to continue for ever.
JSON_SPACE = r"[ \n\r\t]{0,40}"
#: The same for arguments, which models write on one line or with a little indentation.
_ARGUMENTS_SPACE = r"[ \n]{0,8}"
_SPACE = r"/[ \n\r\t]{1,8}/"
#: The most characters of all schemas of a grammar. A definition counts for each argument that
#: refers to any; writing a megabyte takes some 70 ms, on the event loop.
MAX_SCHEMA_CHARS = 4 * 2**20
#: A rule's own name within its definition. JSON escapes this character.
SELF = "\0"
#: A rule named `start`, and its options.
_START = re.compile(r"^start(?=\s*+(?:\[[^\]\n]*+\]\s*+)?:)", re.MULTILINE)


class Lark:
    """A grammar under construction: each rule gets a name for use in later rules."""

    def __init__(self, dialect: Dialect) -> None:
        self._tokens = dict(dialect.tokens)
        self._rules: dict[str, str] = {}
        self._schema_chars = 0

    def rule(self, definition: str, options: str = "") -> str:
        """Add a rule, unless it exists, and return its name; SELF in it stands for its name."""
        known = self._rules.get(head := f"{options}: {definition}")
        if known is None:
            known = self._rules[head] = f"sk_{len(self._rules)}"
        return known

    def grammar(
        self, start: str, more: str = "", param: GrammarParam = "response_format"
    ) -> Grammar:
        rules = "".join(f"{name}{head.replace(SELF, name)}\n" for head, name in self._rules.items())
        return Grammar("lark", f"start: {start}\n{rules}{more}", param)

    # ---- parts

    def literal(self, *parts: str) -> str:
        """Return the expression for literal text and markers; each part is one or the other."""
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        token = self._tokens.get(part)
        if token is not None:
            return f"<[{token}]>"
        if found := self._find_token(part):
            return self.literal(*part.partition(found))
        return json.dumps(part, ensure_ascii=False)

    def _find_token(self, text: str) -> str:
        """Return the first token within a text; "" if there is none."""
        found = [token for token in self._tokens if token in text]
        return min(found, key=lambda token: (text.index(token), -len(token)), default="")

    def text_through_marker(self, marker: str) -> str:
        """Return the expression for any text up to and including the first `marker`."""
        if found := self._find_token(marker):
            before, _, behind = marker.partition(found)
            text = self.rule(f"/(?s:.*){_quote_literal(before)}/")
            return f"{text} {self.literal(found, behind)}"
        return self.rule(f"/(?s:.*){_quote_literal(marker)}/", "[lazy]")

    def json(self, schema: Any, space: str = _ARGUMENTS_SPACE) -> str:
        """Return the rule for a value that fits a JSON schema; `space` may separate its parts.

        Raises RequestError if the schemas are too long.
        """
        schema = {} if schema is True else close_objects(without_unknown_formats(schema))
        if isinstance(schema, dict):
            schema = schema | {"x-guidance": {"whitespace_pattern": space}}
        written = json.dumps(schema, ensure_ascii=False)
        self._schema_chars += len(written)
        if self._schema_chars > MAX_SCHEMA_CHARS:
            raise RequestError(
                f"the schemas are too long: with the definitions for each argument that refers to"
                f" some, they have more than {MAX_SCHEMA_CHARS} characters"
            )
        return self.rule(f"%json {written}")

    def space(self) -> str:
        return f"{self.rule(_SPACE)}?"


def join_parts(part: str, between: str, many: bool) -> str:
    """Return the expression for `part`, or with `many` for several with `between` as separator."""
    return f"{part} ({between} {part})*" if many else part


def one_of(parts: Sequence[str]) -> str:
    return f"({' | '.join(parts)})" if len(parts) != 1 else parts[0]


def _quote_literal(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def write_thoughts(lark: Lark, dialect: Dialect, begun: bool) -> str:
    """Return the expression for reasoning, optional unless the prompt has begun it."""
    if not dialect.think_end:
        return ""
    inner = f"{lark.text_through_marker(dialect.think_end)} {lark.space()}"
    if begun:
        return inner
    return f"({lark.literal(dialect.think_begin)} {inner})?"


def after_thoughts(dialect: Dialect, grammar: Grammar, begun: bool) -> Grammar:
    """Return a grammar that allows free reasoning before the answer, which has to fit `grammar`.

    `begun` says whether the prompt has begun the reasoning; see `begins_thinking`.
    """
    lark = Lark(dialect)
    if dialect.tools == "harmony":
        before = harmony_thoughts(lark) + " " + lark.literal("<|channel|>", "final", "<|message|>")
    else:
        before = write_thoughts(lark, dialect, begun)
    if not before:
        return grammar
    match grammar.kind:
        case "json_schema":
            value = lark.json(json.loads(grammar.text), JSON_SPACE)
            return lark.grammar(f"{before} {value}", param=grammar.param)
        case "regex":
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", grammar.text).replace("\n", r"\n")
            return lark.grammar(f"{before} {lark.rule(f'/{pattern}/')}", param=grammar.param)
        case "lark":
            more = _START.sub("sk_start", grammar.text)
            return lark.grammar(f"{before} sk_start", more, grammar.param)


def harmony_thoughts(lark: Lark) -> str:
    """Return the expression for gpt-oss' reasoning channel, and the next message's start."""
    head = lark.literal("<|channel|>", "analysis", "<|message|>")
    return (
        f"({head} {lark.text_through_marker('<|end|>')} {lark.literal('<|start|>', 'assistant')})?"
    )
