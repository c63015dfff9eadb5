"""What a grammar of calls takes of unusual schemas, as llguidance understands it."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.gateway.tool_parsing.grammars.tool_grammar import tool_grammar
from servekit.gateway.tool_parsing.tool_definitions import check_tools, parse_tool_choice
from tests.unit.gateway.tool_parsing.grammars.test_tool_grammar import (
    dialect,
    fits,
    tagged,
    written,
)

TAGGED = pytest.mark.parametrize("family", ["qwen3_coder", "invoke", "glm"])
WHOLE = {"type": "integer"}


def taken(
    family: str,
    schema: dict[str, Any],
    *texts: str,
    choice: Any = "required",
    strict: bool = False,
    name: str = "f",
) -> list[bool]:
    """Whether each text is a call of a tool with these parameters."""
    function = {"name": name, "parameters": schema} | ({"strict": True} if strict else {})
    tools = check_tools([{"type": "function", "function": function}])
    spoken = dialect(family, own_tokens=False)
    grammar = tool_grammar(spoken, parse_tool_choice(tools, choice))
    return [fits(spoken, grammar, text) for text in texts]


# ---------------------------------------------------------------- JSON


def test_a_tool_takes_no_other_arguments_unless_its_schema_says_so() -> None:
    """As OpenAI has it; models add arguments that nobody reads."""
    call = written("hermes", "f", '{"a": 1, "b": 2}')
    properties = {"properties": {"a": WHOLE}}
    assert taken("hermes", {"type": "object"} | properties, call) == [False]
    for opens in (
        {"additionalProperties": True},
        {"patternProperties": {"^b$": WHOLE}},
        {"additionalProperties": WHOLE},
    ):
        assert taken("hermes", {"type": "object"} | properties | opens, call) == [True], opens
    assert taken("hermes", {}, call, written("hermes", "f", "{}")) == [False, True]


def test_a_schema_that_is_a_choice_or_a_reference_states_its_own_members() -> None:
    one = {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}
    calls = [written("hermes", "f", text) for text in ('{"a": 1}', "{}", '{"a": "x"}')]
    assert taken("hermes", {"anyOf": [one]}, *calls) == [True, False, False]
    assert taken("hermes", {"$ref": "#/$defs/o", "$defs": {"o": one}}, *calls) == [
        True,
        False,
        False,
    ]


def test_the_name_of_a_tool_is_part_of_the_marker_where_braces_stand_for_it() -> None:
    call = written("kimi_k2", "f", "{}")
    assert taken("kimi_k2", {}, call, call.replace(":0", ":12"), call.replace(":0", ":123")) == [
        True,
        True,
        False,
    ]
    several = call.replace("<|tool_calls_section_end|>", call.partition("begin|>")[2])
    assert taken("kimi_k2", {}, several) == [True]


def test_a_model_that_writes_one_call_a_turn_is_not_made_to_write_two() -> None:
    call = '{"name": "f", "parameters": {}}'
    assert taken("llama3_json", {}, call, f"{call}\n{call}", f"{call}; {call}") == [
        True,
        False,
        False,
    ]
    bare = '{"name": "f", "arguments": {}}'
    assert taken("json", {}, bare, f"{bare}\n{bare}") == [True, True]


def test_calls_between_markers_of_the_models_own_are_rows_or_a_list() -> None:
    call = '{"name": "f", "arguments": {}}'
    assert taken(
        "template",
        {},
        f"<own>{call}</own>",
        f"<own>\n{call}\n{call}\n</own>",
        f"<own>[{call}, {call}]</own>",
        f"<own>[{call}\n{call}]</own>",
        f"<own>{call}",
    ) == [True, True, True, False, False]


# ---------------------------------------------------------------- tags


@TAGGED
def test_an_argument_that_is_text_is_free_up_to_its_tag(family: str) -> None:
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    for text in ("x", 'say "hi"', "two\nlines", "{", "3"):
        assert taken(family, schema, written(family, "f", tagged(family, a=text))) == [True]
    assert taken(family, schema, written(family, "f", "")) == [False]


@TAGGED
def test_a_text_out_of_some_stands_without_quotes(family: str) -> None:
    schema = {"properties": {"a": {"enum": ["up", "dö wn"]}}, "required": ["a"]}
    calls = [written(family, "f", tagged(family, a=text)) for text in ("up", "dö wn", "left")]
    quoted = written(family, "f", tagged(family, a='"up"'))
    assert taken(family, schema, *calls, quoted) == [True, True, False, False]


@TAGGED
def test_an_argument_that_is_no_text_is_json_by_its_schema(family: str) -> None:
    schema = {
        "properties": {"a": {"$ref": "#/definitions/n"}, "b": {"enum": [1, 2]}},
        "definitions": {"n": {"type": "array", "items": {"$ref": "#/definitions/m"}}, "m": WHOLE},
    }
    good = [
        tagged(family, a="[1, 2]"),
        tagged(family, b="2"),
        tagged(family, a="[]", b="1"),
    ]
    wrong = [tagged(family, a='["x"]'), tagged(family, b="3"), tagged(family, b="x")]
    assert taken(family, schema, *(written(family, "f", one) for one in good)) == [True] * 3
    assert taken(family, schema, *(written(family, "f", one) for one in wrong)) == [False] * 3


@TAGGED
def test_required_arguments_are_there_and_others_may_be_in_the_schemas_order(family: str) -> None:
    schema = {"properties": {"a": WHOLE, "b": WHOLE, "c": WHOLE}, "required": ["b"]}

    def calls(*given: dict[str, str]) -> list[bool]:
        texts = (written(family, "f", tagged(family, **one)) for one in given)
        return taken(family, schema, *texts)

    assert calls({"b": "1"}, {"a": "1", "b": "1", "c": "1"}, {"b": "1", "c": "1"}) == [True] * 3
    assert (
        calls({}, {"a": "1", "c": "1"}, {"b": "1", "a": "1"}, {"b": "1", "d": "1"}) == [False] * 4
    )


@TAGGED
def test_a_tool_without_a_schema_of_its_own_takes_arguments_of_any_name(family: str) -> None:
    """Beside a strict tool, whose calls make a grammar necessary."""
    free = {"type": "function", "function": {"name": "free"}}
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    spoken = dialect(family, own_tokens=False)
    grammar = tool_grammar(spoken, parse_tool_choice(check_tools([free, strict]), "auto"))
    for given in ({}, {"a": "1"}, {"any name": "any text", "b": "2"}):
        assert fits(spoken, grammar, written(family, "free", tagged(family, **given)))
    assert fits(spoken, grammar, written(family, "f", ""))
    assert not fits(spoken, grammar, written(family, "f", tagged(family, a="1")))


def test_a_schema_that_lists_nothing_required_requires_nothing() -> None:
    malformed: list[Any] = [[], None, "a", {"a": 1}]
    for required in malformed:
        schema: dict[str, Any] = {"properties": {"a": WHOLE}, "required": required}
        assert taken("glm", schema, written("glm", "f", "")) == [True]


# ---------------------------------------------------------------- Python

MIXED = {"properties": {"a": WHOLE, "b": WHOLE, "c": WHOLE}}


@pytest.mark.parametrize(
    ("required", "good", "wrong"),
    [
        (
            [],
            ["f()", "f(a=1)", "f(b=1)", "f(c=1)", "f(a=1, c=1)", "f(b=1, c=1)", "f(a=1, b=1, c=1)"],
            ["f(b=1, a=1)", "f(a=1, )", "f(, a=1)", "f(a=1,b=1)", "f(d=1)", "f(a=x)"],
        ),
        (
            ["b"],
            ["f(b=1)", "f(a=1, b=1)", "f(b=1, c=1)", "f(a=1, b=1, c=1)"],
            ["f()", "f(a=1)", "f(c=1)", "f(a=1, c=1)", "f(a=1 b=1)"],
        ),
        (
            ["a", "c"],
            ["f(a=1, c=1)", "f(a=1, b=1, c=1)"],
            ["f()", "f(a=1)", "f(c=1)", "f(a=1, b=1)", "f(b=1, c=1)"],
        ),
        (["a", "b", "c"], ["f(a=1, b=1, c=1)"], ["f()", "f(a=1, b=1)", "f(b=1, c=1)"]),
    ],
)
def test_arguments_of_python_have_commas_between_them_whichever_are_there(
    required: list[str], good: list[str], wrong: list[str]
) -> None:
    schema = MIXED | {"required": required}
    assert taken("pythonic", schema, *(f"[{one}]" for one in good)) == [True] * len(good)
    assert taken("pythonic", schema, *(f"[{one}]" for one in wrong)) == [False] * len(wrong)


def test_a_function_without_arguments_has_empty_parentheses() -> None:
    assert taken("pythonic", {}, "[f()]", "[f( )]", "[f]", "[f(a=1)]") == [
        True,
        False,
        False,
        False,
    ]


def test_python_with_the_markers_of_its_template() -> None:
    tools = check_tools([{"type": "function", "function": {"name": "f"}}])
    spoken = dialect("pythonic", own_tokens=False, tool_begin="<py>", tool_end="</py>")
    grammar = tool_grammar(spoken, parse_tool_choice(tools, "required"))
    texts = ("<py>[f()]</py>", "[f()]", "<py>[f()]")
    assert [fits(spoken, grammar, text) for text in texts] == [True, False, False]


# ---------------------------------------------------------------- Gemma


def test_gemma_has_texts_out_of_some_objects_lists_and_anything() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": WHOLE}}
    schema = {
        "properties": {
            "up": {"enum": ["up", "dö wn"]},
            "list": {"type": "array", "items": {"type": "string"}},
            "node": {"$ref": "#/$defs/node"},
            "any": {},
            "a: b": WHOLE,
        },
        "$defs": {"node": node | {"required": ["n"]}},
    }
    good = [
        '{up:<|"|>dö wn<|"|>}',
        '{list:[<|"|>a, "b"<|"|>,<|"|>]<|"|>],up:<|"|>up<|"|>}',
        '{any:{a:[1,true,<|"|>x<|"|>],b-c:{}},list:[]}',
        "{node:{n:1,next:{n:2}}}",
        '{<|"|>a: b<|"|>:1}',
        "{}",
    ]
    wrong = ['{up:<|"|>left<|"|>}', "{list:[1]}", "{node:{}}", "{more:1}", "{any:x}", '{n:"x"}']
    for given, fit in ((good, True), (wrong, False)):
        calls = [f"<|tool_call>call:f{one}<tool_call|>" for one in given]
        assert taken("gemma", schema, *calls) == [fit] * len(given)
