"""Grammars that make models call tools, as llguidance itself understands them.

Each is tried twice: where the family's markers are tokens of the model, and where they are letters.
"""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from msgspec import structs

from servekit.errors import RequestError, Unsupported
from servekit.gateway.tool_parsing import parser
from servekit.gateway.tool_parsing.grammars.grammar_templates import WRITERS
from servekit.gateway.tool_parsing.grammars.lark import after_thoughts
from servekit.gateway.tool_parsing.grammars.tool_grammar import tool_grammar
from servekit.gateway.tool_parsing.registry import FAMILIES
from servekit.gateway.tool_parsing.tool_definitions import check_tools, parse_tool_choice
from servekit.protocol.messages import Dialect, Grammar
from servekit.protocol.tool_formats import MARKERS, dialect_markers
from tests.unit.engines.harness import byte_level_tokenizer
from tests.unit.gateway.tool_parsing.reading import Said, feed, joined

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"$ref": "#/$defs/count"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
            "$defs": {"count": {"type": "integer", "minimum": 1}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
STRICT = [{"type": "function", "function": WEATHER["function"] | {"strict": True}}, CLOCK]
THINK: dict[str, Any] = {"think_begin": "<think>", "think_end": "</think>"}
TEXT = "Let me see. {a} <b> [c]"

B, S = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
D = f"<｜tool▁calls▁begin｜>{B}", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
V = "｜DSML｜"
#: Families that have no JSON object for arguments.
NO_OBJECT = ("pythonic", "qwen3_coder", "invoke", "glm", "dsml", "gemma", "function_gemma")
K = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "pythonic", "hermes"])
@pytest.mark.parametrize("refers", [False, True])
def test_definitions_are_written_for_those_that_refer_to_some(family: str, refers: bool) -> None:
    """A thousand arguments and ten thousand definitions are a third of a megabyte."""
    argument = {"$ref": "#/$defs/0"} if refers else {"type": "integer"}
    schema = {
        "properties": {f"p{at}": argument | {"description": str(at)} for at in range(1000)},
        "$defs": {str(at): {"type": "integer"} for at in range(10_000)},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    choice, began_s = parse_tool_choice([tool], "required"), time.process_time()
    if refers and family != "hermes":
        with pytest.raises(RequestError, match="the schemas are too long"):
            tool_grammar(Dialect(tools=family), choice)
    else:
        grammar = tool_grammar(Dialect(tools=family), choice)
        assert grammar is not None
        assert len(grammar.text) < 1_000_000
    assert time.process_time() - began_s < 10


def written(family: str, name: str, arguments: str) -> str:
    """One call in a family's syntax, its arguments as the family writes them."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "template": f"<own>[{call}]</own>",
        "llama3_json": f'{{"name": "{name}", "parameters": {arguments}}}',
        "json": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "deepseek": f"{D[0]}{name}<｜tool▁sep｜>{arguments}{D[1]}{D[2]}",
        "kimi_k2": f"<|tool_calls_section_begin|>{K[0]}{name}:0{K[1]}{arguments}{K[2]}"
        "<|tool_calls_section_end|>",
        "function": f"<function={name}>{arguments}</function>",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{arguments}",
        "pythonic": f"[{name}({arguments})]",
        "qwen3_coder": f"<tool_call>\n<function={name}>{arguments}\n</function>\n</tool_call>",
        "invoke": f'<minimax:tool_call>\n<invoke name="{name}">{arguments}\n</invoke>\n'
        "</minimax:tool_call>",
        "glm": f"<tool_call>{name}\n{arguments}</tool_call>",
        "dsml": f'<{V}function_calls>\n<{V}invoke name="{name}">{arguments}\n</{V}invoke>\n'
        f"</{V}function_calls>",
        "cohere": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "{name}", '
        f'"parameters": {arguments}}}\n]<|END_ACTION|>',
        "gemma": f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>",
        "function_gemma": f"<start_function_call>call:{name}{{{arguments}}}<end_function_call>",
    }[family]


def tagged(family: str, **values: str) -> str:
    """Arguments as those families write them that have no JSON object for them."""
    form = {
        "qwen3_coder": "\n<parameter={}>\n{}\n</parameter>",
        "invoke": '\n<parameter name="{}">{}</parameter>',
        "glm": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    }[family]
    return "".join(form.format(key, value) for key, value in values.items())


def arguments(family: str, city: str | None, **others: Any) -> str:
    values = ({"city": city} if city is not None else {}) | others
    if family == "pythonic":
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    if family in ("gemma", "function_gemma"):
        quote = "<escape>" if family == "function_gemma" else '<|"|>'
        return ",".join(
            f"{key}:" + (f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value))
            for key, value in values.items()
        )
    if family == "dsml":
        return "".join(
            f'\n<{V}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</{V}parameter>"
            for key, value in values.items()
        )
    if family in ("qwen3_coder", "invoke", "glm"):
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()}
        return tagged(family, **texts)
    return json.dumps(values)


@cache
def _tokenizer(own: tuple[str, ...]) -> tuple[Any, Any]:
    tokenizer = byte_level_tokenizer()
    half = len(own) // 2  # added tokens are tokens whether they are special or not
    tokenizer.add_special_tokens({"additional_special_tokens": list(own[:half])})
    tokenizer.add_tokens(list(own[half:]))
    return tokenizer, from_tokenizer(tokenizer)


def dialect(family: str, own_tokens: bool, **fields: Any) -> Dialect:
    if family == "template":
        fields |= {"tool_begin": "<own>", "tool_end": "</own>"}
    found = Dialect(family, **fields)
    own = dialect_markers(found) if own_tokens else ()
    ids = _tokenizer(own)[0].convert_tokens_to_ids(list(own))
    return structs.replace(found, tokens=tuple(zip(own, ids, strict=True)))


def fits(spoken: Dialect, grammar: Grammar | None, text: str) -> bool:
    """Whether the grammar takes this text, and lets it end there."""
    assert grammar is not None and grammar.kind == "lark"
    tokenizer, guide = _tokenizer(tuple(own for own, _ in spoken.tokens))
    matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar.text}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    taken = matcher.try_consume_tokens(ids)
    return bool(taken == len(ids) and matcher.is_accepting())


def said(spoken: Dialect, text: str) -> Said:
    return joined(feed(parser(spoken, tools=TOOLS, reasoning=True), text, [3]))


BOTH = pytest.mark.parametrize("own_tokens", [False, True], ids=["letters", "tokens"])
ALL = pytest.mark.parametrize("family", sorted(MARKERS))


@ALL
@BOTH
def test_required_takes_calls_by_their_schemas_and_nothing_else(
    family: str, own_tokens: bool
) -> None:
    spoken = dialect(family, own_tokens)
    if family in ("mistral", "pythonic"):  # with their tokens these write in another way
        spoken = structs.replace(spoken, tokens=())
    grammar = tool_grammar(spoken, parse_tool_choice(TOOLS, "required"))
    assert grammar is not None and grammar.param == "tools"  # what an error is to name
    for values in ({}, {"days": 3}, {"days": 3, "unit": "F"}, {"unit": "C"}):
        text = written(family, "weather", arguments(family, 'Bern "x"', **values))
        if family in NO_OBJECT[1:]:
            text = text.replace('\\"', '"')
        assert fits(spoken, grammar, text), text
        ((name, given),) = said(spoken, text)
        assert (name, json.loads(given)) == ("weather", {"city": 'Bern "x"'} | values)
    empty = "" if family in NO_OBJECT else "{}"
    assert fits(spoken, grammar, written(family, "clock", empty))
    for wrong in (
        TEXT,
        "",
        written(family, "other", empty),
        written(family, "weather", empty),
        written(family, "weather", arguments(family, "Bern", days=0)),
        written(family, "weather", arguments(family, "Bern", days="x")),
        written(family, "weather", arguments(family, "Bern", unit="K")),
        written(family, "weather", arguments(family, "Bern", more=1)),
        written(family, "clock", arguments(family, "Bern")),
        written(family, "clock", empty)[:-1],
    ):
        assert not fits(spoken, grammar, wrong), wrong


@BOTH
@pytest.mark.parametrize("family", ["hermes", "glm", "qwen3_coder", "function"])
def test_several_calls_unless_one_is_asked_for(family: str, own_tokens: bool) -> None:
    spoken = dialect(family, own_tokens)
    empty = "{}" if family in ("hermes", "function") else ""
    one = written(family, "clock", empty)
    two = one + one if family == "function" else f"{one}\n{one}"
    assert fits(spoken, tool_grammar(spoken, parse_tool_choice(TOOLS, "required")), two)
    assert said(spoken, two) == [("clock", "{}"), ("clock", "{}")]
    single = tool_grammar(spoken, parse_tool_choice(TOOLS, "required"), parallel=False)
    assert fits(spoken, single, one) and not fits(spoken, single, two)
    named = parse_tool_choice(TOOLS, {"type": "function", "function": {"name": "clock"}})
    grammar = tool_grammar(spoken, named)
    assert fits(spoken, grammar, one) and not fits(spoken, grammar, two)
    weather = written(family, "weather", arguments(family, "Bern"))
    assert not fits(spoken, grammar, weather)


def test_several_calls_in_lists() -> None:
    for family, two in (
        ("template", '<own>[{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]'
                     "</own>"),
        ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, '
                    '{"name": "clock", "arguments": {}}]'),
        ("pythonic", "[clock(), clock()]"),
        ("deepseek", f"{D[0]}clock{S}{{}}{D[1]}{B}clock{S}{{}}{D[1]}{D[2]}"),
        ("deepseek", f"{D[0]}function{S}clock\n```json\n{{}}\n```{D[1]}\n"
                     f"{B}function{S}clock\n```json\n{{}}\n```{D[1]}{D[2]}"),
        ("invoke", '<minimax:tool_call>\n<invoke name="clock">\n</invoke>\n<invoke name="clock">\n'
                   "</invoke>\n</minimax:tool_call>"),
    ):  # fmt: skip
        spoken = dialect(family, own_tokens=False)
        assert fits(spoken, tool_grammar(spoken, parse_tool_choice(TOOLS, "required")), two), two
        assert said(spoken, two) == [("clock", "{}"), ("clock", "{}")]
        assert not fits(
            spoken, tool_grammar(spoken, parse_tool_choice(TOOLS, "required"), parallel=False), two
        )


def test_mistral_as_newer_models_write_it() -> None:
    spoken = dialect("mistral", own_tokens=True)
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]clock[ARGS]{}'
    assert fits(spoken, tool_grammar(spoken, parse_tool_choice(TOOLS, "required")), text)
    assert said(spoken, text) == [("weather", '{"city": "Bern"}'), ("clock", "{}")]


def test_pythonic_models_with_markers_of_their_own_write_them() -> None:
    spoken = dialect("pythonic", own_tokens=True)
    for choice in (parse_tool_choice(TOOLS, "required"), parse_tool_choice(STRICT, "auto")):
        grammar = tool_grammar(spoken, choice)
        text = '<|python_start|>[weather(city="Bern", days=1), clock()]<|python_end|>'
        assert fits(spoken, grammar, text)
        assert said(spoken, text) == [("weather", '{"city": "Bern", "days": 1}'), ("clock", "{}")]
        assert not fits(spoken, grammar, text.replace("=1", "=x"))


@ALL
@BOTH
def test_strict_tools_leave_text_free_and_calls_none(family: str, own_tokens: bool) -> None:
    spoken = dialect(family, own_tokens)
    if family in ("mistral", "pythonic"):
        spoken = structs.replace(spoken, tokens=())
    grammar = tool_grammar(spoken, parse_tool_choice(STRICT, "auto"))
    call = written(family, "weather", arguments(family, "Bern", days=2))
    wrong = written(family, "weather", arguments(family, "Bern", days="x"))
    if family == "harmony":
        text = f"<|channel|>final<|message|>{TEXT}"
        assert fits(spoken, grammar, text) and fits(spoken, grammar, call)
        assert not fits(spoken, grammar, wrong)
        return
    assert fits(spoken, grammar, TEXT)
    assert fits(spoken, grammar, call)
    assert not fits(spoken, grammar, wrong)
    if family not in ("llama3_json", "json", "pythonic"):
        assert fits(spoken, grammar, TEXT + "\n" + call)
        assert not fits(spoken, grammar, TEXT + wrong)


@ALL
def test_a_tool_that_is_not_strict_is_free_beside_one_that_is(family: str) -> None:
    spoken = dialect(family, own_tokens=False)
    grammar = tool_grammar(spoken, parse_tool_choice(STRICT, "auto"))
    for values in (arguments(family, None, zone="x"), arguments(family, "Bern", n=1)):
        assert fits(spoken, grammar, written(family, "clock", values)), values


@ALL
def test_an_argument_that_is_required_and_not_listed_can_be_written(family: str) -> None:
    """Some tools' schemas list less than they require, and no model could call these."""
    parameters = {"type": "object", "required": ["zone"]}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": parameters}}]
    spoken = dialect(family, own_tokens=False)
    grammar = tool_grammar(spoken, parse_tool_choice(tools, "required"))
    assert fits(spoken, grammar, written(family, "clock", arguments(family, None, zone="x")))


@BOTH
@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_come_first_and_are_free(own_tokens: bool, begun: bool) -> None:
    spoken = dialect("hermes", own_tokens, **THINK)
    grammar = tool_grammar(spoken, parse_tool_choice(TOOLS, "required"), begun=begun)
    call = written("hermes", "clock", "{}")
    begin = "" if begun else "<think>"
    assert fits(spoken, grammar, f"{begin}\nHm, {{ <b>\n</think>\n\n{call}")
    assert not fits(spoken, grammar, f"{begin}Hm.</think>No.")
    assert not fits(spoken, grammar, f"{begin}Hm.")
    assert fits(spoken, grammar, call) is not begun


def test_harmony_thinks_in_its_own_channel() -> None:
    for own_tokens in (False, True):
        spoken = dialect("harmony", own_tokens)
        grammar = tool_grammar(spoken, parse_tool_choice(TOOLS, "required"))
        call = written("harmony", "clock", "{}")
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
        assert fits(spoken, grammar, text)
        assert said(spoken, text) == [("thought", "Hm."), ("clock", "{}")]


# ---------------------------------------------------------------- response_format

INNER = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar("regex", r'\{"a": [1-9]/?\}|x'),
    Grammar("lark", 'start: "{" more\nmore: /"a": [0-9]/ "}"'),
]


@BOTH
@pytest.mark.parametrize("inner", INNER, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("family", ["hermes", "harmony", ""])
def test_an_answer_in_a_format_after_thoughts(
    family: str, inner: Grammar, own_tokens: bool
) -> None:
    harmony = family == "harmony"
    spoken = dialect(family, own_tokens, **({} if harmony else THINK))
    grammar = after_thoughts(spoken, inner, begun=False)
    final = "<|channel|>final<|message|>" if harmony else ""
    thought = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        if harmony
        else "<think>Hm.</think>\n\n"
    )
    assert fits(spoken, grammar, thought + final + '{"a": 1}')
    assert fits(spoken, grammar, final + '{"a": 1}')
    assert not fits(spoken, grammar, thought + final + '{"a": b}')
    assert not fits(spoken, grammar, thought + "Sure.")


@pytest.mark.parametrize("inner", INNER, ids=lambda grammar: grammar.kind)
def test_a_model_that_does_not_think_keeps_its_grammar(inner: Grammar) -> None:
    assert after_thoughts(Dialect("hermes"), inner, begun=False) is inner


def test_any_json_after_thoughts() -> None:
    spoken = dialect("", True, **THINK)
    grammar = after_thoughts(spoken, Grammar("json_schema", "true"), begun=True)
    assert fits(spoken, grammar, "Hm.</think>[1, {}]")


# ---------------------------------------------------------------- none, and none known


def test_where_the_model_is_free_there_is_no_grammar() -> None:
    spoken = Dialect("hermes")
    assert tool_grammar(spoken, parse_tool_choice(TOOLS, "none")) is None
    assert tool_grammar(spoken, parse_tool_choice(TOOLS, "auto")) is None
    assert tool_grammar(spoken, parse_tool_choice([], None)) is None


def test_calls_of_an_unknown_kind_cannot_be_required() -> None:
    with pytest.raises(Unsupported) as caught:
        tool_grammar(Dialect(), parse_tool_choice(TOOLS, "required"))
    assert caught.value.param == "tool_choice"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(
        ["string", "object", "integer", "#/$defs/a", "#", "x", 'a"b\n>']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "properties", "required", "enum", "const", "anyOf", "$ref", "$defs", "items",
         "additionalProperties", "a", 'b"\n/']), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(schema=st.dictionaries(
    st.sampled_from(["properties", "required", "$defs", "anyOf", "additionalProperties", "$ref"]),
    ANY))  # fmt: skip
@example({"properties": None})
@settings(deadline=None, max_examples=200)
def test_whatever_a_schema_holds_the_gateway_has_a_grammar_for_the_worker_to_judge(
    schema: dict[str, Any],
) -> None:
    tools = check_tools(
        [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    )
    for family in MARKERS:
        spoken = dialect(family, own_tokens=False)
        assert tool_grammar(spoken, parse_tool_choice(tools, "required"))
        assert tool_grammar(spoken, parse_tool_choice(tools, "auto"))
        parser(spoken, tools=tools, reasoning=True)


def test_what_can_be_read_can_be_required() -> None:
    assert set(WRITERS) == set(FAMILIES) | {"harmony"} == set(MARKERS)


@ALL
@BOTH
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["loose", "strict"])
def test_with_an_answer_by_schema_there_is_either_a_call_or_that_answer(
    family: str, own_tokens: bool, tools: list[Any]
) -> None:
    spoken = dialect(family, own_tokens)
    if family in ("mistral", "pythonic"):  # with their tokens these write in another way
        spoken = structs.replace(spoken, tokens=())
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = Grammar("json_schema", json.dumps(schema | {"additionalProperties": False}))
    grammar = tool_grammar(spoken, parse_tool_choice(tools, "auto"), answer=answer)
    final = "<|channel|>final<|message|>" if family == "harmony" else ""
    assert fits(spoken, grammar, written(family, "weather", arguments(family, "Bern")))
    assert fits(spoken, grammar, final + '{"ok": true}')
    for wrong in (TEXT, final + TEXT, final + '{"ok": 1}', final + "{}"):
        assert not fits(spoken, grammar, wrong), wrong
