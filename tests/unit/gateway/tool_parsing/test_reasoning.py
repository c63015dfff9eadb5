"""Thoughts, told from the answer."""

from __future__ import annotations

import pytest

from servekit.gateway.tool_parsing import Reasoning, Text, parser
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import Said, all_cuts_agree, read

THINKS = Dialect(think_begin="<think>", think_end="</think>", tools="hermes")
AT_ONCE = Dialect(think_begin="<think>", think_end="</think>", thinks_at_once=True)
MISTRAL = Dialect(think_begin="[THINK]", think_end="[/THINK]")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>\nhm\n</think>\n\nyes\n", [("thought", "hm"), ("text", "yes\n")]),
        ("\n<think> a\n\nb </think>c", [("thought", "a\n\nb"), ("text", "c")]),
        ("<think></think>c", [("text", "c")]),
        ("<think>\n\n</think>\n\n", []),
        ("<think>never ends \n", [("thought", "never ends \n")]),
        ("<think>a</thin k></think>", [("thought", "a</thin k>")]),
        ("no <think>thoughts</think>", [("text", "no <think>thoughts</think>")]),
        (" <thinking>", [("text", " <thinking>")]),
        ("<think>a</think><think>b</think>", [("thought", "a"), ("text", "<think>b</think>")]),
        (
            '<think>a</think>\n<tool_call>{"name": "f"}</tool_call>',
            [("thought", "a"), ("f", "{}")],
        ),
        (
            '<think>a <tool_call>\n<tool_call>\n{"name": "f"}\n</tool_call>\n',
            [("thought", "a <tool_call>"), ("f", "{}")],
        ),
        (
            '<think>a<tool_call>{"name": "f"}</tool_call>\nb</think>c'
            '<tool_call>{"name": "g"}</tool_call>',
            [("thought", "a"), ("f", "{}"), ("thought", "\nb"), ("text", "c"), ("g", "{}")],
        ),
        (
            "<think>a <tool_call>x</tool_call></think>b",
            [("thought", "a <tool_call>x</tool_call>"), ("text", "b")],
        ),
        ("", []),
    ],
)
def test_thoughts_come_first(text: str, said: Said) -> None:
    assert all_cuts_agree(THINKS, text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hm\n</think>\nyes", [("thought", "hm"), ("text", "yes")]),
        ("\n<think>\nhm</think>yes", [("thought", "hm"), ("text", "yes")]),
        ("</think>yes", [("text", "yes")]),
        (" </think>yes", [("text", "yes")]),
        ("hm", [("thought", "hm")]),
        ("<thinking", [("thought", "<thinking")]),
    ],
)
def test_a_template_may_have_begun_the_thoughts(text: str, said: Said) -> None:
    assert all_cuts_agree(AT_ONCE, text) == said


def test_other_markers() -> None:
    assert all_cuts_agree(MISTRAL, "[THINK]a[/THINK]b") == [("thought", "a"), ("text", "b")]


def test_thoughts_that_nobody_asks_for_are_text() -> None:
    text = "<think>a</think>b"
    assert read(THINKS, text, reasoning=False) == [("text", text)]


def test_thoughts_are_streamed() -> None:
    parse = parser(THINKS, tools=False, reasoning=True)
    assert parse.feed("<think>so") == [Reasoning("so")]
    assert parse.feed(" it is.</th") == [Reasoning(" it is.")]
    assert parse.feed("ink>") == []
    assert parse.feed("Yes") == [Text("Yes")]
    assert parse.end() == []
