"""Dialects, found out from real templates and from small ones that write as other models do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.engines.text.chat_template import ChatTemplate
from servekit.engines.text.tool_format_detection import find_dialect
from servekit.protocol.messages import Dialect
from servekit.protocol.tool_formats import MARKERS, THOUGHTS, dialect_markers
from tests.unit.engines.harness import byte_level_tokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
THINK: dict[str, Any] = {"think_begin": "<think>", "think_end": "</think>"}

HEAD = (
    "{% if tools %}<sys>{{ tools | tojson }}</sys>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
)
TAIL = "<eot>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALL = "{% for c in m.tool_calls %}{% set f = c.function %}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def written(calls: str) -> str:
    return HEAD + CALL + calls + "{% endfor %}" + TAIL


def template(source: str) -> ChatTemplate:
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("name", "dialect", "takes"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", Dialect("hermes"), True),
        ("Qwen-Qwen3-0.6B", Dialect("hermes", **THINK), True),
        ("Qwen3-Coder", Dialect("qwen3_coder"), True),
        ("mistralai-Mistral-Nemo-Instruct-2407", Dialect("mistral"), True),
        (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            Dialect("mistral", think_begin="[THINK]", think_end="[/THINK]"),
            True,
        ),
        (
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            Dialect("deepseek", **THINK, thinking_switches=(("enable_thinking", True),)),
            False,
        ),
        (
            "GLM-4.7-Flash",
            Dialect(
                "glm", **THINK, thinks_at_once=True, thinking_switches=(("enable_thinking", False),)
            ),
            True,
        ),
        (
            "ibm-granite-granite-3.3-2B-Instruct",
            Dialect("template", tool_begin="<|tool_call|>", **THINK),
            True,
        ),
        ("openai-gpt-oss-120b", Dialect("harmony"), True),
    ],
)
def test_real_templates(name: str, dialect: Dialect, takes: bool) -> None:
    found = template((TEMPLATES / f"{name}.jinja").read_text())
    assert find_dialect(found) == dialect
    assert found.takes_tools is takes


@pytest.mark.parametrize(
    ("calls", "dialect"),
    [
        (JSON, Dialect("llama3_json")),
        ("<|python_tag|>" + JSON, Dialect("llama3_json")),
        ("<TOOLCALL>[" + JSON + "]</TOOLCALL>", Dialect("template", "<TOOLCALL>", "</TOOLCALL>")),
        ("<|call|>" + JSON, Dialect("template", "<|call|>")),
        ("\n<tool_call>\n" + JSON + "\n</tool_call>", Dialect("hermes")),
        ("<user>" + JSON, Dialect()),
        ("says: " + JSON, Dialect()),
        ("[{{ f.name }}({{ f.arguments | items | first | join('=') }})]", Dialect("pythonic")),
        (
            "<calls>[{{ f.name }}({{ f.arguments | items | first | join('=') }})]</calls>",
            Dialect("pythonic", "<calls>", "</calls>"),
        ),
        ("<function={{ f.name }}>{{ f.arguments | tojson }}</function>", Dialect("function")),
        (
            "<own:calls><invoke name=\"{{ f.name }}\">{% for k, v in f.arguments | items %}"
            '<parameter name="{{ k }}">{{ v }}</parameter>{% endfor %}</invoke></own:calls>',
            Dialect("invoke", "<own:calls>", "</own:calls>"),
        ),
        (
            "<calls:1>\n<｜DSML｜invoke name=\"{{ f.name }}\">{% for k, v in f.arguments | items %}"
            '<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}</｜DSML｜parameter>'
            "{% endfor %}</｜DSML｜invoke>\n</calls:1>",
            Dialect("dsml", "<calls:1>", "</calls:1>"),
        ),
        (
            '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
            "{{ f.arguments | tojson }}}\n]<|END_ACTION|>",
            Dialect("cohere"),
        ),
        ("<|tool_call>call:{{ f.name }}{a:1}<tool_call|>", Dialect("gemma")),
        ("<start_function_call>call:{{ f.name }}{a:1}", Dialect("function_gemma")),
        ("it calls {{ f.name }}", Dialect()),
        ("", Dialect()),
    ],
)  # fmt: skip
def test_what_a_template_writes_is_what_the_model_has_learnt(calls: str, dialect: Dialect) -> None:
    found = template(written(calls))
    assert found.takes_tools
    assert find_dialect(found) == dialect


@pytest.mark.parametrize(
    ("told", "family"),
    [
        ("<tool_call> {...} </tool_call>", "hermes"),
        ("<tool_call> <function=name>", "qwen3_coder"),
        ("<|tool_call_start|>", "pythonic"),
        ("List of tools: [", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
    ],
)
def test_a_template_may_only_tell_of_calls(told: str, family: str) -> None:
    source = HEAD + f"{{% if tools %}}Write {told}{{% endif %}}" + TAIL
    assert find_dialect(template(source)).tools == family


def test_without_tools_in_the_prompt_markers_mean_nothing() -> None:
    source = HEAD.partition("{% endif %}")[2] + "{# <tool_call> </tool_call> #}" + TAIL
    found = template(source)
    assert not found.takes_tools
    assert find_dialect(found) == Dialect()


def test_no_template_no_dialect() -> None:
    assert find_dialect(template("")) == Dialect()


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{{ x", "{%"])
def test_a_broken_template_has_no_dialect(source: str) -> None:
    assert find_dialect(template(source)) == Dialect()
    assert not template(source).takes_tools


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<my:think>\n"
    "{{ m.reasoning_content }}\n</my:think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<my:think>' if at_once }}\n{% endif %}"
)


@pytest.mark.parametrize("at_once", [False, True])
def test_thoughts_of_its_own(at_once: bool) -> None:
    source = "{% set at_once = " + str(at_once).lower() + " %}" + THINKS
    found = find_dialect(template(source))
    assert (found.think_begin, found.think_end) == ("<my:think>", "</my:think>")
    assert found.thinks_at_once is at_once


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking", ""])
def test_switches_of_thoughts(switch: str, at_once: bool) -> None:
    """Some templates begin them at a switch, others unless there is one, or always."""
    begins = "{% set at_once = " + (
        f"{switch} | default({str(at_once).lower()}) %}}"
        if switch
        else f"{str(at_once).lower()} %}}"
    )
    found = find_dialect(template(begins + THINKS))
    assert found.thinks_at_once is at_once
    assert found.thinking_switches == (((switch, not at_once),) if switch else ())


def test_the_file_has_the_last_word() -> None:
    found = template((TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text())
    assert find_dialect(found, tools="pythonic", thoughts="none") == Dialect("pythonic")
    assert find_dialect(found, tools="none").tools == ""
    assert find_dialect(found, tools="hermes") == Dialect("hermes", **THINK)
    assert find_dialect(found, thoughts="mistral").think_end == "[/THINK]"


def test_markers_are_all_that_the_text_must_keep() -> None:
    assert dialect_markers(Dialect("hermes", **THINK)) == (
        "<tool_call>", "</tool_call>", "<think>", "</think>",
    )  # fmt: skip
    assert dialect_markers(Dialect("template", "<a>")) == ("<a>",)
    assert dialect_markers(Dialect()) == ()


def test_the_file_knows_all_names() -> None:
    from typing import get_args

    from servekit.config.schema import ReasoningParser, ToolParser

    assert set(get_args(ToolParser)) == {"auto", "none", *MARKERS} - {"template"}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *THOUGHTS}
