"""A template rendered without `transformers` says what `transformers` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from servekit.engines.llamacpp.tokenizer import Renderer
from servekit.engines.text.chat_template import SENTINEL_TOOL, ChatTemplate
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, ToolCall
from tests.unit.engines.harness import byte_level_tokenizer

TEMPLATES = sorted((Path(__file__).parents[1] / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
PLAIN = [
    ChatMessage("user", " Größe? "),
    ChatMessage("assistant", "1.80 m "),
    ChatMessage("user", "Hm"),
]
CALLS = [
    ChatMessage("user", "What is it?"),
    ChatMessage("assistant", "", tool_calls=(ToolCall("abcdef123", "look", '{"at": "ü<b>"}'),)),
    ChatMessage("tool", "42", tool_call_id="abcdef123"),
]
THOUGHT = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Ho", reasoning="Well…")]
BEGUN = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Once upon ")]


def both(source: str) -> tuple[ChatTemplate, ChatTemplate]:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = source
    tokenizer.bos_token = "<s>"
    return ChatTemplate(Renderer(source, SPECIAL)), ChatTemplate(tokenizer)


def said(template: ChatTemplate, *arguments: Any) -> str:
    try:
        return template.render(*arguments)
    except RequestError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_reads_the_same(path: Path) -> None:
    ours, theirs = both(path.read_text())
    asked: list[tuple[Any, ...]] = [
        (PLAIN,),
        (PLAIN, [SENTINEL_TOOL]),
        (CALLS, [SENTINEL_TOOL]),
        (THOUGHT,),
        (PLAIN, (), {"enable_thinking": False}),
        (BEGUN, (), None, True),
    ]
    texts = [(said(ours, *one), said(theirs, *one)) for one in asked]
    for mine, library in texts:
        if not (mine.startswith("refused") and library.startswith("refused")):
            assert mine == library
    assert not texts[0][0].startswith("refused")


def test_there_are_templates() -> None:
    assert len(TEMPLATES) > 5


def test_a_template_cannot_leave_the_sandbox() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ):
        with pytest.raises((jinja2.exceptions.SecurityError, RequestError)):
            ChatTemplate(Renderer(source, {})).render(PLAIN)


def test_training_marks_are_passed_over() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(Renderer(source, {})).render(PLAIN) == " Größe? 1.80 m Hm"


def test_names_of_the_servers_are_not_the_requests() -> None:
    template = ChatTemplate(Renderer("{{ messages[0].content }}", SPECIAL))
    for name in ("messages", "tools", "bos_token", "add_generation_prompt", "chat_template"):
        with pytest.raises(RequestError, match=name):
            template.render(PLAIN, (), {name: "x"})
