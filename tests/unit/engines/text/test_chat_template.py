"""Conversations as templates expect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engines.text.chat_template import SENTINEL_TOOL, ChatTemplate
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Media, ToolCall
from tests.unit.engines.harness import TEMPLATE, byte_level_tokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
SHOW = "{{ messages | tojson }}"
CALL = ToolCall("call_0123456789abcdef01234567", "f", '{"a": 1, "b": "é"}')
TURNS = [
    ChatMessage("user", "hi"),
    ChatMessage("assistant", "", tool_calls=(CALL,)),
    ChatMessage("tool", "42", tool_call_id=CALL.id),
]


def template(source: str) -> ChatTemplate:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def real(name: str) -> ChatTemplate:
    return template((TEMPLATES / f"{name}.jinja").read_text())


def test_calls_and_their_answers_are_as_templates_expect_them() -> None:
    _, call, answer = json.loads(template(SHOW).render(TURNS))
    assert call["tool_calls"] == [
        {
            "id": CALL.id,
            "type": "function",
            "function": {"name": "f", "arguments": {"a": 1, "b": "é"}},
        }
    ]
    assert answer == {"role": "tool", "content": "42", "tool_call_id": CALL.id, "name": "f"}


def test_calls_by_a_real_template() -> None:
    text = real("Qwen-Qwen2.5-7B-Instruct").render(TURNS, [SENTINEL_TOOL])
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call>' in text
    assert "<tool_response>\n42\n</tool_response>" in text
    assert '"name": "sentinel_tool"' in text


def test_mistral_gets_ids_that_it_takes() -> None:
    text = real("mistralai-Mistral-Nemo-Instruct-2407").render(TURNS, [SENTINEL_TOOL])
    call = json.loads(text.partition("[TOOL_CALLS]")[2].partition("<|im_end|>")[0])[0]
    assert len(call["id"]) == 9
    assert text.count(call["id"]) == 2


def test_kimi_gets_ids_that_name_the_function() -> None:
    """Its template renders nothing else of a call but the arguments."""
    kimi = template(
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% for c in m.tool_calls %}<|tool_calls_section_begin|>{{ c.id }} "
        "{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{{ m.content }}"
        "{% endfor %}"
    )
    again = [replace(TURNS[1], tool_calls=(replace(CALL, name="g"),)), TURNS[2]]  # of the same id
    text = kimi.render([*TURNS, *again], [SENTINEL_TOOL])
    for at, name in enumerate("fg"):
        id = f"functions.{name}:{at}"
        called = f'<|tool_calls_section_begin|>{id} {{"a": 1, "b": "é"}}<tool>{id}42'
        assert called in text


def test_calls_are_written_where_the_template_leaves_them_out() -> None:
    """Else the model would see results of calls that it never made."""
    granite = real("ibm-granite-granite-3.3-2B-Instruct")
    text = granite.render(TURNS, [SENTINEL_TOOL])
    call = '<|tool_call|>[{"name": "f", "arguments": {"a": 1, "b": "é"}}]<|end_of_text|>'
    assert f"<|start_of_role|>assistant<|end_of_role|>{call}" in text
    assert "<|start_of_role|>tool<|end_of_role|>42<|end_of_text|>" in text
    assert "List of tools: [" in (
        lfm := template(
            "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        )
    ).render(TURNS[:1], [SENTINEL_TOOL])
    several = ToolCall("b", "g", '{"l": ["it\'s", true], "s": "it\'s \\"so\\""}')
    said = [TURNS[0], ChatMessage("assistant", "Well.", tool_calls=(CALL, several)), TURNS[2]]
    assert lfm.render(said, [SENTINEL_TOOL]).endswith(
        "<user>hi<assistant>Well.\n<|tool_call_start|>"
        """[f(a=1, b="é"), g(l=["it's", True], s="it's \\"so\\"")]<|tool_call_end|><tool>42"""
    )


def test_smollm_has_its_own_name_for_tools() -> None:
    smollm = template(
        "{% if xml_tools %}Write <tool_call>: {{ xml_tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    assert smollm.takes_tools
    text = smollm.render(TURNS, [SENTINEL_TOOL])
    assert '"name": "sentinel_tool"' in text
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    assert text.endswith(f"<user>hi<assistant>{call}<tool>42")


def test_types_that_may_be_null_are_told_without_that_where_the_template_fails() -> None:
    """Hermes' looks for the types within "null", a string, and for those within its letters."""
    hermes = template(
        "{% macro told(spec) %}{% if spec.type in ['string', 'integer'] %}{{ spec.type }}"
        "{% elif spec.type is iterable %}{% for one in spec.type %}{{ told({'type': one}) }}"
        "{% endfor %}{% endif %}{% endmacro %}"
        "{% for t in tools %}{{ t.function.name }}{% for name, spec in"
        " t.function.parameters.properties.items() %}{{ name }}="
        "{% for one in spec.anyOf or [spec] %}{{ told(one) }};{% endfor %}{% endfor %}{% endfor %}"
    )
    null = {"type": "null"}
    properties = {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "integer"}, null]},
        "c": {"type": ["string", "integer", "null"]},
    }
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert hermes.render(TURNS[:1], [tool]) == "fa=string;b=integer;c=stringinteger;"


def test_results_in_a_row_come_in_the_order_of_their_calls() -> None:
    """Whichever was done first: many templates show no ids."""
    first = tuple(ToolCall(id, "f", "{}") for id in "ab")

    def result(id: str, text: str) -> ChatMessage:
        return ChatMessage("tool", text, tool_call_id=id)

    said = [
        ChatMessage("assistant", "1", tool_calls=first),
        *(result("b", "3"), result("a", "2")),
        ChatMessage("assistant", "4", tool_calls=first[::-1]),  # of the same ids, as some have them
        *(result("?", "7"), result("a", "6"), result("b", "5")),
        ChatMessage("user", "8"),
    ]
    shown = json.loads(template(SHOW).render(said))
    assert [turn["content"] for turn in shown] == list("12345678")


def test_a_strict_template_gets_the_roles_of_an_agent_in_its_order() -> None:
    """Agents have several messages of the system and of the user in a row, and system messages
    behind them; this template takes one of the system, and then turns in order."""
    strict = real("mistralai-Mistral-Nemo-Instruct-2407")
    said = [
        *(ChatMessage("system", "one"), ChatMessage("system", "two")),
        *(ChatMessage("user", "three"), ChatMessage("user", "four"), ChatMessage("system", "five")),
        *TURNS[1:],
        ChatMessage("assistant", "six"),
        ChatMessage("system", "seven"),
    ]
    in_order = [
        ChatMessage("system", "one\n\ntwo"),
        ChatMessage("user", "three\n\nfour\n\nfive"),
        *TURNS[1:],
        ChatMessage("assistant", "six"),
        ChatMessage("user", "seven"),
    ]
    assert strict.render(said, [SENTINEL_TOOL]) == strict.render(in_order, [SENTINEL_TOOL])
    with pytest.raises(RequestError, match="refuses these messages"):
        strict.render([ChatMessage("user", "a"), ChatMessage("robot", "b")])


def test_a_template_without_a_system_message_has_it_in_the_first_turn() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    said = [ChatMessage("system", "a"), ChatMessage("user", "b")]
    assert template(source).render(said) == "user:a\n\nb;"


def test_arguments_may_be_wanted_as_text() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %};{% endfor %}"
    )
    assert template(source).render(TURNS) == f"user:hi;assistant:f {CALL.arguments};tool:42;"


def test_content_may_have_to_be_missing() -> None:
    source = (
        "{% for m in messages %}{% if m.content is not defined or m.content is none %}"
        "{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    assert template(source).render(TURNS) == "hi;f;42;"


def test_arguments_that_are_no_object_stay_text() -> None:
    broken = ChatMessage("assistant", "", tool_calls=(ToolCall("i", "f", '{"a": '),))
    shown = json.loads(template(SHOW).render([broken]))
    assert shown[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_thoughts_are_handed_on() -> None:
    thinks = ChatMessage("assistant", "yes", reasoning="hm")
    text = real("Qwen-Qwen3-0.6B").render([ChatMessage("user", "hi"), thinks])
    assert "<think>\nhm\n</think>\n\nyes" in text


def test_template_arguments_reach_the_template() -> None:
    found = real("Qwen-Qwen3-0.6B")
    assert found.render(TURNS[:1], template={"enable_thinking": False}).endswith("</think>\n\n")
    assert found.render(TURNS[:1]).endswith("assistant\n")


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "conversation", "tokenize", "add_generation_prompt", "chat_template",
     "continue_final_message", "return_dict", "eos_token", "raise_exception", "self"],
)  # fmt: skip
def test_template_arguments_take_no_name_of_the_servers(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        template(SHOW).render(TURNS, template={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_beginning_is_gone_on_with() -> None:
    turns = [ChatMessage("user", "hi"), ChatMessage("assistant", "Well, I")]
    text = template(TEMPLATE).render(turns, continues=True)
    assert text.endswith("<|im_start|>assistant\nWell, I")
    empty = [ChatMessage("user", "hi"), ChatMessage("assistant", "")]
    assert template(TEMPLATE).render(empty, continues=True).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("turns", [TURNS[:1], TURNS[:2], TURNS])
def test_only_the_assistants_text_can_be_gone_on_with(turns: list[ChatMessage]) -> None:
    with pytest.raises(RequestError, match="can be continued"):
        template(SHOW).render(turns, continues=True)


def test_a_refusal_names_what_the_template_refuses_and_repeats_no_conversation() -> None:
    with pytest.raises(RequestError, match="only system, user and assistant may speak"):
        template(TEMPLATE).render([ChatMessage("wizard", "hi")])
    drops = "{% for m in messages %}{{ m.role }}{{ m.content[:0] }}{% endfor %}"
    with pytest.raises(RequestError) as caught:
        template(drops).render([ChatMessage("user", "s"), ChatMessage("assistant", "secret")],
                               continues=True)  # fmt: skip
    assert "secret" not in str(caught.value)


def test_templates_that_rely_on_what_is_optional_get_it() -> None:
    bare = {"type": "function", "function": {"name": "f", "description": None}}
    assert "type f = () => any" in real("openai-gpt-oss-120b").render(TURNS[:1], [bare])
    assert '{"name": "f"' in real("Qwen-Qwen2.5-7B-Instruct").render(TURNS[:1], [bare])


# ---------------------------------------------------------------- templates without tools

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or"
    " (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_tools_are_told_in_words_where_the_template_has_no_place_for_them() -> None:
    said = template(PLAIN).render(TURNS[:1], [SENTINEL_TOOL])
    assert said.startswith("<system>") and said.endswith("<user>hi<assistant>")
    defined = next(line for line in said.split("\n") if line.startswith('{"name"'))
    assert json.loads(defined)["name"] == "sentinel_tool"
    assert '{"name": its name, "arguments"' in said
    own = template(PLAIN).render([ChatMessage("system", "Be brief."), *TURNS[:1]], [SENTINEL_TOOL])
    assert own.startswith("<system>Be brief.\n\n") and own.count("<system>") == 1
    no_system = template(STRICT).render(TURNS[:1], [SENTINEL_TOOL])
    assert no_system.startswith("<user>") and no_system.endswith("\n\nhi")
    assert defined in no_system


def test_a_template_that_has_tools_is_left_to_itself() -> None:
    found = real("Qwen-Qwen2.5-7B-Instruct")
    assert found.takes_tools and not template(PLAIN).takes_tools
    assert found.render(TURNS, [SENTINEL_TOOL]).count("sentinel_tool") == 1


@pytest.mark.parametrize("source", [PLAIN, STRICT])
def test_calls_and_results_are_told_in_words_too(source: str) -> None:
    turns = [*TURNS, ChatMessage("tool", "43", tool_call_id="x"), ChatMessage("user", "Well?")]
    said = template(source).render(turns)
    assert '<user>hi<assistant>{"name": "f", "arguments": {"a": 1, "b": "é"}}<user>' in said
    assert "<user>Result of f: 42\n\nResult of the function: 43\n\nWell?" in said


PICTURE = Media(b"1", "image/png", at=2)
SHOWN = {"type": "image"}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_images_stand_between_the_texts() -> None:
    seen = ChatMessage("user", "abcd", media=(PICTURE, replace(PICTURE, at=4)))
    first, second = json.loads(template(SHOW).render([seen, ChatMessage("user", "plain")]))
    assert first["content"] == [text_part("ab"), SHOWN, text_part("cd"), SHOWN]
    assert second["content"] == "plain"


def test_a_template_that_takes_parts_only_gets_parts() -> None:
    """It would leave out a text without an error."""
    parts = template(
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
    )
    turns = [ChatMessage("user", "hi"), ChatMessage("assistant", "ho"), ChatMessage("user", "")]
    assert parts.render(turns) == "user:hi;assistant:ho;user:;"
    assert parts.render(turns[:2], continues=True) == "user:hi;assistant:ho"


def test_images_keep_their_places_where_texts_are_put_before_them() -> None:
    source = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('no') }}{% endif %}{{ m.role }}:{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ part.text if part.type == 'text' else '[]' }}{% endfor %}{% endif %};{% endfor %}"
    )
    asked = ChatMessage("user", "abcd", media=(PICTURE,))
    called = ChatMessage("assistant", "", tool_calls=(CALL,))
    result = ChatMessage("tool", "42", tool_call_id=CALL.id, media=(PICTURE,))
    text = template(source).render([asked, called, result, result, asked], [SENTINEL_TOOL])
    assert text.startswith("user:You can call these functions")
    assert "\n\nab[]cd;assistant:" in text
    results = ";user:Result of f: 42[]\n\nResult of f: 42[]\n\nab[]cd;"
    assert text.endswith(results)


def by_library(template: ChatTemplate, turns: list[ChatMessage]) -> str:
    """As `apply_chat_template` renders them."""
    template.__dict__["_render_plain"] = None
    return template.render(turns)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_plain_turns_are_rendered_as_by_the_library(path: Path) -> None:
    ours, theirs = real(path.stem), real(path.stem)
    text = " {{ 7 * 7 }} </think> [/INST] <|im_end|>\n\0 é 🦊 "
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"], ["assistant"]):
        turns = [ChatMessage(role, role + text) for role in roles]
        try:
            expected = by_library(theirs, turns)
        except RequestError as error:
            with pytest.raises(RequestError) as refused:
                ours.render(turns)
            assert refused.value.message == error.message
        else:
            assert ours.render(turns) == expected
    assert ours._render_plain is not None, "it has the shorter way"


@pytest.mark.parametrize(
    "wrong",
    [
        "messages.append(1)",
        "messages[0].clear()",
        "messages.__class__.__mro__",
        "cycler.__init__.__globals__",
        "raise_exception.__code__.co_name",
        "(messages|map('upper')).gi_frame.f_globals",
    ],
)
def test_a_template_reads_no_internals_however_often_it_asks(wrong: str) -> None:
    chat: Any = template("{% if messages[1] %}{{ " + wrong + " }}{% endif %}hello")
    assert chat.render([ChatMessage("user", "hi")]) == "hello"
    assert chat._render_plain is not None, "it has the shorter way"
    for _ in range(3):
        with pytest.raises(RequestError):
            chat.render([ChatMessage("user", "hi"), ChatMessage("assistant", "there")])
        with pytest.raises(Exception, match=r"unsafe|undefined|safe"):
            chat._render_plain([{"role": "user", "content": "hi"}] * 2)


def test_a_shorter_way_that_gives_another_text_is_not_taken() -> None:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    own = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **more: own(messages, **more).upper()
    assert ChatTemplate(tokenizer).render([ChatMessage("user", "hi")]) == "HI"


def test_a_tokenizer_without_the_librarys_template_keeps_its_own_way() -> None:
    class Tokenizer:
        chat_template = "its own"

        def apply_chat_template(self, messages: list[dict[str, str]], **more: object) -> str:
            return f"<{messages[-1]['content']}>"

    assert ChatTemplate(Tokenizer()).render([ChatMessage("user", "hi")]) == "<hi>"
