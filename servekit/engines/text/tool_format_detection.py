"""Detection of a model's tool call and thought formats from its chat template.

The template renders a turn in which the assistant calls a sentinel tool, and one in which it
thinks; the text around them is the format that the model was trained on. A template that renders no
calls, but explains them to the model, is recognised by the markers it contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from servekit.engines.text.chat_template import (
    LFM_MARKS,
    SENTINEL,
    SENTINEL_TOOL,
    SENTINEL_TURNS,
    ChatTemplate,
)
from servekit.protocol.messages import Capability, ChatMessage, Dialect
from servekit.protocol.tool_formats import MARKERS, THINKING_SWITCHES, THOUGHTS

_QUESTION = SENTINEL_TURNS[0]
_ANSWER = "sentinel_answer"
_THOUGHT = "sentinel_thought"
_TAG = r"(<[^<>\s]{1,60}>|\[/?[A-Z_]{1,30}\])"
#: A rendered call in a JSON shape that is recognised without markers.
_JSON = re.compile(
    rf'\[?\s*\{{"name": "{SENTINEL}", "(?:arguments|parameters)": (?P<value>\{{[^{{}}]*\}})'
    r"[^{}]*\}\s*\]?"
)
_SHAPES: list[tuple[str, re.Pattern[str]]] = [
    ("harmony", re.compile(rf"\bto=functions\.{SENTINEL}\b.*<\|message\|>", re.DOTALL)),
    ("mistral", re.compile(rf"\[TOOL_CALLS\].*{SENTINEL}", re.DOTALL)),
    ("deepseek", re.compile(rf"<｜tool▁call▁begin｜>.*{SENTINEL}", re.DOTALL)),
    ("kimi_k2", re.compile(rf"<\|tool_call_begin\|>\S*{SENTINEL}")),
    ("cohere", re.compile(rf'<\|START_ACTION\|>.*"tool_name": "{SENTINEL}"', re.DOTALL)),
    ("gemma", re.compile(rf"<\|tool_call>call:{SENTINEL}")),
    ("function_gemma", re.compile(rf"<start_function_call>call:{SENTINEL}")),
    (
        "dsml",
        re.compile(
            rf'(?:{_TAG}\s*)?<｜DSML｜invoke name="{SENTINEL}">\s*<｜DSML｜parameter name=.*?'
            "</｜DSML｜invoke>",
            re.DOTALL,
        ),
    ),
    ("function", re.compile(rf"<function={SENTINEL}>\s*\{{")),
    (
        "qwen3_coder",
        re.compile(
            rf"(?:{_TAG}\s*)?<function={SENTINEL}>\s*<parameter=sentinel_key>"
            r".*?</function>",
            re.DOTALL,
        ),
    ),
    (
        "invoke",
        re.compile(
            rf'(?:{_TAG}\s*)?<invoke name="{SENTINEL}">\s*<parameter name="sentinel_key">'
            r".*?</invoke>",
            re.DOTALL,
        ),
    ),
    (
        "glm",
        re.compile(
            rf"{_TAG}{SENTINEL}\s*<arg_key>sentinel_key</arg_key>.*?</arg_value>",
            re.DOTALL,
        ),
    ),
    ("pythonic", re.compile(rf"(?:{_TAG}\s*)?\[{SENTINEL}\(sentinel_key=.*?\)\]")),
]


class _Calls(NamedTuple):
    family: str = ""
    begin: str = ""
    end: str = ""


#: Formats of templates that explain calls without rendering any, by markers that must all occur.
_NAMED: list[tuple[_Calls, tuple[str, ...]]] = [
    (_Calls("qwen3_coder"), ("<tool_call>", "<function=")),
    (_Calls("glm"), ("<tool_call>", "<arg_key>")),
    (_Calls("hermes"), ("<tool_call>", "</tool_call>")),
    (_Calls("pythonic"), ("<|tool_call_start|>",)),
    *((_Calls("pythonic"), (mark,)) for mark in LFM_MARKS),
    (_Calls("mistral"), ("[TOOL_CALLS]",)),
    (_Calls("deepseek"), ("<｜tool▁call▁begin｜>",)),
    (_Calls("kimi_k2"), ("<|tool_call_begin|>",)),
    (_Calls("harmony"), ("<|channel|>", "commentary")),
    (_Calls("template", "<|tool_call|>"), ("<|tool_call|>",)),
    (_Calls("llama3_json"), ("<|python_tag|>",)),
]


def find_dialect(template: ChatTemplate, tools: str = "", thoughts: str = "") -> Dialect:
    """Return the dialect of a model with this template, with `tokens` left empty.

    `tools`, a key of MARKERS, and `thoughts`, a key of THOUGHTS, are configured formats; "none"
    turns a format off, "" detects it from the template.
    """
    if not template.source:
        return Dialect()
    found = _detect_calls(template)
    if tools:
        found = found if found.family == tools else _Calls(tools if tools in MARKERS else "")
    begin, end = (
        THOUGHTS.get(thoughts, ("", "")) if thoughts else _detect_thoughts(template, found.family)
    )
    at_once = bool(begin and _begins_thinking(template, begin))
    switches = tuple(_find_switches(template, begin, at_once)) if begin else ()
    return Dialect(
        *(found.family, found.begin, found.end, begin, end, at_once), thinking_switches=switches
    )


def tool_capabilities(
    template: ChatTemplate, dialect: Dialect, parser: str, *, grammars: bool
) -> tuple[Capability, ...]:
    """Return the tool capabilities of a model; `parser` is the configured `tool_parser`.

    With the parser "none" calls stay in the text. If the template has no tools, a grammar can still
    force the model to call them.
    """
    if template.takes_tools and (dialect.tools or parser == "none"):
        return ("tools",)
    return ("forced_tools",) if grammars and template.source and parser != "none" else ()


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the special token with which the chat template closes the assistant's turn, if any.

    A model ends its answers with it, whether or not its generation config says so.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): int(id) for id, token in added.items() if token.special}
    if not special or not getattr(tokenizer, "chat_template", None):
        return []
    template = ChatTemplate(tokenizer)
    turns = [_QUESTION, ChatMessage("assistant", _ANSWER)]
    rest = (
        _assistant_turn(_try_render(lambda: template.render_turns(turns)))
        .partition(_ANSWER)[2]
        .lstrip()
    )
    # the longer of two that begin alike
    found = max((text for text in special if rest.startswith(text)), key=len, default="")
    return [special[found]] if found else []


def _try_render(render: Callable[[], str]) -> str:
    """Render a sentinel; "" if the template refuses."""
    try:
        return render()
    except Exception:  # the template is the model's code, and may raise anything
        return ""


# ---------------------------------------------------------------- calls


def _detect_calls(template: ChatTemplate) -> _Calls:
    turn = _assistant_turn(
        _try_render(lambda: template.render_turns(SENTINEL_TURNS, [SENTINEL_TOOL]))
    )
    body = turn[len(_turn_header(template, turn)) :]
    for family, shape in _SHAPES:
        if found := shape.search(body):
            return _Calls(family, *_outer_markers(template, family, found))
    if found := _JSON.search(body):
        return _detect_json_calls(template, found)
    if SENTINEL in body:  # rendered in a format that no parser here reads
        return _Calls()
    return _calls_by_markers(template) if template.takes_tools else _Calls()


def _assistant_turn(text: str) -> str:
    """Return the text after the question: the assistant's turn with its header."""
    return text.rpartition(_QUESTION.content)[2]


def _outer_markers(template: ChatTemplate, family: str, found: re.Match[str]) -> tuple[str, str]:
    """Return the outer markers if they differ from the family's usual ones."""
    begin = found.group(1) if found.groups() else None
    if not begin or begin in MARKERS[family]:
        return "", ""
    return begin, _closing_tag(template, found)


def _detect_json_calls(template: ChatTemplate, found: re.Match[str]) -> _Calls:
    before = found.string[: found.start()].rstrip()
    tag = re.search(rf"{_TAG}\Z", before)
    if tag is None or tag.group(1) == "<|python_tag|>":
        return _Calls("llama3_json" if tag or not before.strip() else "")
    begin = tag.group(1)
    if begin in _try_render(
        lambda: template.render_turns([_QUESTION, ChatMessage("user", _ANSWER)])
    ):
        return _Calls()  # the marker begins every turn
    if begin == MARKERS["hermes"][0]:
        return _Calls("hermes")
    return _Calls("template", begin, _closing_tag(template, found))


def _turn_header(template: ChatTemplate, turn: str) -> str:
    """Return the beginning of the turn that the generation prompt already contains."""
    prompt = _assistant_turn(_try_render(lambda: template.render([_QUESTION], [SENTINEL_TOOL])))
    same = (at for at, (one, other) in enumerate(zip(turn, prompt, strict=False)) if one != other)
    common = turn[: next(same, min(len(turn), len(prompt)))]
    for left, right in ("<>", "[]"):  # never cut within a marker
        if common.rfind(left) > common.rfind(right):
            common = common[: common.rfind(left)]
    return common


def _closing_tag(template: ChatTemplate, found: re.Match[str]) -> str:
    """Return the tag after the last call, unless it ends every turn."""
    rest = found.string[found.end() :].lstrip()
    plain = [_QUESTION, ChatMessage("assistant", _ANSWER)]
    every = _try_render(lambda: template.render_turns(plain)).rpartition(_ANSWER)[2].strip()
    tag = re.match(_TAG, rest)
    return "" if tag is None or every.startswith(tag.group(1)) else tag.group(1)


def _calls_by_markers(template: ChatTemplate) -> _Calls:
    for calls, marks in _NAMED:
        if all(mark in template.source for mark in marks):
            return calls
    return _Calls()


# ---------------------------------------------------------------- thoughts


def _begins_thinking(
    template: ChatTemplate, begin: str, arguments: Mapping[str, bool] | None = None
) -> bool | None:
    """Return whether the prompt ends with `begin`; None if the template refuses."""
    prompt = _try_render(lambda: template.render([_QUESTION], template=arguments))
    return prompt.rstrip().endswith(begin) if prompt else None


def _find_switches(template: ChatTemplate, begin: str, at_once: bool) -> Iterator[tuple[str, bool]]:
    for name, on in product(THINKING_SWITCHES, (True, False)):
        if _begins_thinking(template, begin, {name: on}) is (not at_once):
            yield name, on


def _detect_thoughts(template: ChatTemplate, family: str) -> tuple[str, str]:
    if family == "harmony":  # its channels separate thoughts
        return "", ""
    turn = [_QUESTION, ChatMessage("assistant", _ANSWER, reasoning=_THOUGHT)]
    found = re.search(
        rf"{_TAG}\s*{_THOUGHT}\s*{_TAG}", _try_render(lambda: template.render_turns(turn))
    )
    if found and all("think" in tag.lower() for tag in found.groups()):
        return found.group(1), found.group(2)
    for begin, end in THOUGHTS.values():
        if begin in template.source and end in template.source:
            return begin, end
    return "", ""
