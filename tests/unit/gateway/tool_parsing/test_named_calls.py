"""Calls as a name and JSON between markers: DeepSeek, Kimi, Mistral and `<function=…>`."""

from __future__ import annotations

import pytest

from servekit.gateway.tool_parsing import FAMILIES
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import Said, all_cuts_agree

B, S, E = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_B, ALL_E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KB, KA, KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SECTION_B, SECTION_E = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CODE = "```json\n{}\n```"

READ: list[tuple[str, str, Said]] = [
    # DeepSeek, V3 and V3.1
    ("deepseek", f"{ALL_B}{B}f{S}{{}}{E}{ALL_E}", [("f", "{}")]),
    ("deepseek", f"{ALL_B}{B}function{S}f\n{CODE}{E}{ALL_E}", [("f", "{}")]),
    ("deepseek", f"{ALL_B}{B}function{S}f\n{{}}{E}{ALL_E}", [("f", "{}")]),
    ("deepseek", f"{B}f{S}{{}}{E}", [("f", "{}")]),  # without the outer marker
    (
        "deepseek",
        f"{ALL_B}\n{B}f{S}\n{{}}\n{E}\n{B}g{S}{{}}{E}\n{ALL_E}",
        [("f", "{}"), ("g", "{}")],
    ),
    ("deepseek", f"{B}f{S}{{}}{E} so", [("f", "{}"), ("text", " so")]),
    # Kimi: the id holds the name
    ("kimi_k2", f"{SECTION_B}{KB}functions.f:0{KA}{{}}{KE}{SECTION_E}", [("f", "{}")]),
    ("kimi_k2", f"{KB}f:12{KA}{{}}{KE}", [("f", "{}")]),
    ("kimi_k2", f"{KB}f{KA}{{}}{KE}", [("f", "{}")]),
    ("kimi_k2", f"{KB}functions.a.b:c:3{KA}{{}}{KE}", [("a.b:c", "{}")]),
    # a function's own tag
    ("function", "<function=f>{}</function>", [("f", "{}")]),
    (
        "function",
        "<function=f>\n{}\n</function>\n<function=g>{}</function>",
        [("f", "{}"), ("g", "{}")],
    ),
    ("function", "<function=f>{}", [("f", "{}")]),
    # Mistral: a list, one object, or names
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", "{}")]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", "{}")]),
    ("mistral", " [TOOL_CALLS] f[ARGS]{}", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f{}\n[TOOL_CALLS]g{}", [("f", "{}"), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{} so", [("f", "{}"), ("text", " so")]),
]

TEXT = [
    ("deepseek", f"{B}f{S}[]{E}"),
    ("deepseek", f"{B}{S}{{}}{E}"),
    ("deepseek", f"{ALL_B} so"),
    ("kimi_k2", f"{KB}f{KA}x{KE}"),
    ("function", "<function=f>what</function>"),
    ("mistral", "[TOOL_CALLS]f[ARGS]so"),
    ("mistral", "[TOOL_CALLS]"),
]


@pytest.mark.parametrize(("tools", "text", "said"), READ)
def test_each_form_of_a_call_is_read(tools: str, text: str, said: Said) -> None:
    assert tools in FAMILIES
    assert all_cuts_agree(Dialect(tools), text) == said


@pytest.mark.parametrize(("tools", "text"), TEXT)
def test_a_name_without_an_object_is_no_call(tools: str, text: str) -> None:
    assert all_cuts_agree(Dialect(tools), text) == [("text", text)]


def test_arguments_that_err_end_there_and_the_rest_is_text() -> None:
    said = all_cuts_agree(Dialect("function"), '<function=f>{"a": x}</function>')
    assert said == [("f", '{"a": '), ("text", "x}</function>")]


def test_a_call_that_a_limit_cut_off_has_the_arguments_so_far() -> None:
    kimi = Dialect("kimi_k2")
    assert all_cuts_agree(kimi, f'{KB}functions.f:0{KA}{{"a', cut=True) == [("f", '{"a')]
    assert all_cuts_agree(kimi, f"{KB}functions.f:0", cut=True) == []
