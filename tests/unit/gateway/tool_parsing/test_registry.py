"""Every family: what is a call, and that nothing of what is none gets lost."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.gateway.tool_parsing import FAMILIES, ToolCallStart, begins_thinking, parser
from servekit.gateway.tool_parsing.incremental_scanner import count_begun
from servekit.protocol.messages import Dialect
from servekit.protocol.tool_formats import MARKERS
from tests.unit.gateway.tool_parsing.reading import (
    CUTS,
    Said,
    all_cuts_agree,
    feed,
    joined,
    read,
)

D = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
V = "｜DSML｜"
K = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

#: What closes texts within arguments, as JSON has it: the beginning of one is text at the end.
CLOSINGS = (f"</{V}parameter>", '<|\\"|>', "<escape>")
CALLS: list[tuple[str, str, Said]] = [
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (
        "llama3_json",
        ' <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "json",
        '{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
    (
        "mistral",
        'Hm.[TOOL_CALLS][{"name":"f","arguments":{},"id":"abcdefghi"},{"name":"g"}]',
        [("text", "Hm."), ("f", "{}"), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", '\n[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    (
        "deepseek",
        f'{D[0]}{D[1]}function<｜tool▁sep｜>f\n```json\n{{"a": 1}}\n```{D[2]}\n'
        f"{D[1]}function<｜tool▁sep｜>g\n```json\n{{}}\n```{D[2]}{D[3]}",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek",
        f"ok\n\n{D[0]}{D[1]}f<｜tool▁sep｜>{{}}{D[2]}{D[1]}g<｜tool▁sep｜>{{}}{D[2]}{D[3]}",
        [("text", "ok"), ("f", "{}"), ("g", "{}")],
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{K[0]}functions.f:0{K[1]}{{}}{K[2]}"
        f'{K[0]}functions.g:1{K[1]}{{"a": "b"}}{K[2]}<|tool_calls_section_end|>',
        [("f", "{}"), ("g", '{"a": "b"}')],
    ),
    (
        "qwen3_coder",
        "a\n<tool_call>\n<function=f>\n<parameter=a>\n1.50\n</parameter>\n<parameter=b>\nx y\n"
        "z\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
        "</tool_call>",
        [("text", "a"), ("f", '{"a": 1.50, "b": "x y\\nz"}'), ("g", "{}")],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\nTrue\n</parameter>\n</function>\n</tool_call>",
        [("f", '{"a": true}')],
    ),
    (
        "glm",
        "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call><tool_call>g</tool_call>",
        [("f", '{"a": [1, 2], "b": "x"}'), ("g", "{}")],
    ),
    (
        "invoke",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("function", '<function=f>{"a": 1}</function>\n', [("f", '{"a": 1}')]),
    (
        "dsml",
        f'Hm.\n\n<{V}function_calls>\n<{V}invoke name="f">\n'
        f'<{V}parameter name="a" string="true">3\n"é"</b>\n</{V}parameter>\n'
        f'<{V}parameter name="b" string="false">{{"c": [1]}}</{V}parameter>\n'
        f'<{V}parameter name="d">1</{V}parameter>\n</{V}invoke>\n'
        f'<{V}invoke name="g">\n</{V}invoke>\n</{V}function_calls>',
        [
            ("text", "Hm."),
            ("f", '{"a": "3\\n\\"é\\"</b>\\n", "b": {"c": [1]}, "d": 1}'),
            ("g", "{}"),
        ],
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "gemma",
        'Hm.<|tool_call>call:f{a:<|"|>x "y"\n{é}, b:1<|"|>,b:true,c:[1,<|"|>]<|"|>,{d:None}],'
        "e:-1.5,g:{},h:[]}<tool_call|><|tool_call>call:g{}<tool_call|>",
        [
            ("text", "Hm."),
            ("f", '{"a": "x \\"y\\"\\n{é}, b:1", "b": true, "c": [1, "]", {"d": null}], '
                  '"e": -1.5, "g": {}, "h": []}'),
            ("g", "{}"),
        ],
    ),
    ("gemma", '<|tool_call>call:f{ <|"|>a: b<|"|> : up, "c": "d\\n" }<tool_call|>',
        [("f", '{"a: b": "up", "c": "d\\n"}')]),
    ("function_gemma",
        "<start_function_call>call:f{a:<escape>x<escape>,b:3}<end_function_call>",
        [("f", '{"a": "x", "b": 3}')]),
    ("pythonic", '[f(a=1.50, b="x, )]", c=[1, {"d": None}]), g()]', [
        ("f", '{"a": 1.50, "b": "x, )]", "c": [1, {"d": null}]}'), ("g", "{}")]),
    ("pythonic", "[f(a='\\ud800', b=\"\\d\", c=\"\\ud83d\\ude00\")]", [
        ("f", '{"a": "\\ud800", "b": "\\\\d", "c": "\\ud83d\\ude00"}')]),
    ("pythonic", "<|python_start|>[f(a='it\\'s', b=True)]<|python_end|>",
        [("f", '{"a": "it\'s", "b": true}')]),
    ("pythonic", "Hm. <|tool_call_start|>[f(a=-1)]<|tool_call_end|>Done.",
        [("text", "Hm."), ("f", '{"a": -1}'), ("text", "Done.")]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Yes.<|return|>", [("thought", "Hm."), ("text", "Yes.")]),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("thought", "Hm."), ("f", '{"a": 1}')]),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}", [("f", "{}")]),
]  # fmt: skip

NO_CALLS: list[tuple[str, str]] = [
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '{"answer": [1, 2]}\n'),
    ("llama3_json", '{"name": "\\ud800", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "parameters": "{\\"a\\": \\"\\\\q"}'),
    ("llama3_json", '{"name": "f", "parameters": "\\ud800{}"}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] what?"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("deepseek", f"{D[0]}{D[1]}function<｜tool▁sep｜>"),
    ("deepseek", f"{D[0]}{D[3]}"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nwhat"),
    ("qwen3_coder", "<function"),
    ("glm", "<tool_call>f g</tool_call>"),
    ("invoke", '<minimax:tool_call>\n<invoke name="f"'),
    ("function", "<function=f>()</function>"),
    ("dsml", f'<{V}function_calls>\n<{V}invoke name="f"'),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("gemma", "<|tool_call>f{}<tool_call|>"),
    ("gemma", "<|tool_call>call:f(a:1)"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[link](there) and [f(a)]"),
    ("pythonic", "[f(x)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(a=(1]))]"),
    ("harmony", "plain"),
    ("harmony", "<|channel|>analysis"),
]


def dialect(tools: str) -> Dialect:
    return Dialect(tools=tools)


@pytest.mark.parametrize(("tools", "text", "said"), CALLS)
def test_calls(tools: str, text: str, said: Said) -> None:
    assert all_cuts_agree(dialect(tools), text) == said


@pytest.mark.parametrize(("tools", "text"), NO_CALLS)
def test_no_calls(tools: str, text: str) -> None:
    assert all_cuts_agree(dialect(tools), text) == [("text", text)]


@pytest.mark.parametrize(("tools", "text", "said"), CALLS)
def test_calls_cut_short_anywhere(tools: str, text: str, said: Said) -> None:
    """What has been said of a call stays; before that, what was written of it is text."""
    for end in range(len(text)):
        part = all_cuts_agree(dialect(tools), text[:end])
        for (kind, words), (wanted, all_words) in zip(part, said, strict=False):
            if kind == wanted:
                words = words[: len(words) - count_begun(words, 0, CLOSINGS)]
                assert all_words.startswith(words) or kind in ("text", "thought")


@pytest.mark.parametrize(("tools", "text", "said"), CALLS)
def test_a_limit_leaves_no_markup_in_the_text(tools: str, text: str, said: Said) -> None:
    """However much came: what is said is a beginning of what would have been, one sign apart."""
    for end in range(len(text)):
        part = all_cuts_agree(dialect(tools), text[:end], cut=True)
        sign = text[:end].strip()[-1:]
        beyond = len(part) > len(said) or said[len(part) - 1][0] != "text"
        if part and beyond and part[-1][0] == "text" and part[-1][1].strip() == sign:
            part.pop()  # it may begin a marker, and may be text
        assert len(part) <= len(said), (text[:end], part)
        for at, ((kind, words), (wanted, all_words)) in enumerate(zip(part, said, strict=False)):
            assert kind == wanted, (text[:end], part)
            whole = at + 1 < len(part)
            beginning = words.rstrip("<[" if kind in ("text", "thought") else "<")
            told = (text[:end], words)
            assert words == all_words if whole else all_words.startswith(beginning.rstrip()), told


@pytest.mark.parametrize(
    ("tools", "text", "said"),
    [
        ("hermes", 'Hm.\n<tool_call>\n{"name": "f", "argu', [("text", "Hm."), ("f", "")]),
        ("hermes", '<tool_call>\n{"na', []),
        ("hermes", "<tool_c", []),
        ("hermes", "1 <", [("text", "1 <")]),
        ("llama3_json", '{"name": "f", "param', [("f", "")]),
        ("llama3_json", '{"city": "Paris", "popu', [("text", '{"city": "Paris", "popu')]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<param", [("f", "")]),
        ("pythonic", "[f(a=1", [("f", "")]),
        ("mistral", "[TOOL_CALLS]get_wea", []),
        ("harmony", "<|channel|>commentary to=functions.f <|con", []),
        ("hermes", "<think>hm</thi", [("thought", "hm")]),
    ],
)
def test_what_a_limit_leaves_of_a_call(tools: str, text: str, said: Said) -> None:
    spoken = Dialect(tools=tools, think_begin="<think>", think_end="</think>")
    assert all_cuts_agree(spoken, text, cut=True) == said


def test_mistral_gets_ids_that_its_template_takes() -> None:
    events = feed(parser(dialect("mistral"), tools=True, reasoning=False), CALLS[4][1], [100])
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", id) for id in ids)
    assert len(set(ids)) == 2


# ---------------------------------------------------------------- values without quotes

CODER = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "kind": {"enum": ["1", "2"]},
                    "size": {"type": "integer"},
                }
            },
        },
    }
]


def test_schemas_tell_text_from_numbers() -> None:
    text = (
        "<tool_call>\n<function=write>\n<parameter=text>\n5\n</parameter>\n<parameter=kind>\n1\n"
        "</parameter>\n<parameter=size>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    for size in (1, 2, 3, 1000):
        parse = parser(dialect("qwen3_coder"), tools=CODER, reasoning=False)
        said = joined(feed(parse, text, [size]))
        assert said == [("write", '{"text": "5", "kind": "1", "size": 5}')]


def test_text_is_streamed() -> None:
    parse = parser(dialect("qwen3_coder"), tools=CODER, reasoning=False)
    parse.feed("<function=write>\n<parameter=text>\n")
    assert [getattr(event, "text", "") for event in parse.feed('say "hi"\n')] == ['say \\"hi\\"']
    assert [getattr(event, "text", "") for event in parse.feed("</p")] == []
    assert [getattr(event, "text", "") for event in parse.feed("re>")] == ["\\n</pre>"]


# ---------------------------------------------------------------- whatever comes

PIECES = [
    *sorted({marker for found in MARKERS.values() for marker in found}),
    "<function=", "f>", "</function>", "<parameter=", "a>", "</parameter>", "f", "\n", " ", "{",
    "}", '"name": "f"', '"arguments": {"a": 1}', ",", "[", "]", "(", ")", "=", "'", '"', "\\", "1",
    '<invoke name="', '">', "</invoke>", "```json", "```", "functions.f:0", "final", "analysis",
    "to=functions.f", "<think>", "</think>", "<", ";",
]  # fmt: skip


@pytest.mark.parametrize("tools", sorted(MARKERS))
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_however_it_is_cut_the_same_is_said(tools: str, data: st.DataObject) -> None:
    pieces = [*MARKERS[tools] * 3, *PIECES]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=25)))
    spoken = Dialect(
        tools=tools,
        tool_begin="<own>" if tools == "template" else "",
        think_begin="<think>",
        think_end="</think>",
        thinks_at_once=data.draw(st.booleans()),
    )
    whole = read(spoken, text, [len(text) or 1])
    assert read(spoken, text, [1]) == whole
    assert read(spoken, text, data.draw(CUTS)) == whole


@pytest.mark.parametrize(("tools", "text", "said"), CALLS)
def test_a_changed_character_loses_none(tools: str, text: str, said: Said) -> None:
    """Where no call is left, all that was written is text."""
    source = random.Random(text)
    for _ in range(40):
        at = source.randrange(len(text))
        changed = text[:at] + source.choice(["", "x", '"', "<", "}", "\n"]) + text[at + 1 :]
        found = all_cuts_agree(dialect(tools), changed)
        if tools != "harmony" and all(kind == "text" for kind, _ in found):
            assert "".join(words for _, words in found) == changed


def test_every_family_that_workers_know_can_be_read() -> None:
    assert set(FAMILIES) | {"harmony"} == set(MARKERS)


@pytest.mark.parametrize(
    ("template", "continues", "begun"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"enable_thinking": False}, False, False),
        ({"thinking": True}, False, True),
        ({"enable_thinking": "no"}, False, True),
        ({"thinking": False}, False, True),  # a switch that the template does not know
        ({"thinking": False, "enable_thinking": False}, False, False),
    ],
)
def test_whether_the_prompt_has_begun_the_thoughts(
    template: dict[str, object], continues: bool, begun: bool
) -> None:
    off = (("enable_thinking", False),)
    thinks = Dialect("", "", "", "<think>", "</think>", True, thinking_switches=off)
    assert begins_thinking(thinks, template, continues) is begun
    assert not begins_thinking(Dialect(), template, continues)


def test_a_switch_may_make_the_template_begin_thoughts_or_leave_that_to_the_model() -> None:
    """DeepSeek V3.1's begins them, Qwen3's does not: there an answer may come without any."""
    switches = (("thinking", True), ("enable_thinking", True))
    begins = Dialect("", "", "", "<think>", "</think>", thinking_switches=switches)
    leaves = Dialect("", "", "", "<think>", "</think>")
    on = {"thinking": True}
    assert begins_thinking(begins, on, False) and not begins_thinking(begins, {}, False)
    assert not begins_thinking(leaves, on, False)
