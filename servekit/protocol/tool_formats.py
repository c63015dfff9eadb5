"""The families of tool calls, by the names that `Dialect.tools` and the file's `tool_parser` use.

What stands here is known on both sides: a worker recognises the family and keeps its markers in
the text where the tokenizer would leave them out, a gateway reads the calls.
"""

from __future__ import annotations

from servekit.protocol.types import Dialect

#: Strings that a family's calls are written with, as far as a tokenizer may have tokens for them.
MARKERS: dict[str, tuple[str, ...]] = {
    # {"name": …, "arguments": {…}} between tags
    "hermes": ("<tool_call>", "</tool_call>"),
    # <function=name><parameter=key>value</parameter></function> between tags
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    # {"name": …, "parameters": {…}}; {…}
    "llama3_json": ("<|python_tag|>",),
    # [f(a=1), g(b="x")]
    "pythonic": ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    # [{"name": …, "arguments": {…}}], or name[ARGS]{…}
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    # name, then <arg_key>key</arg_key><arg_value>value</arg_value>, between tags
    "glm": (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    # <invoke name="f"><parameter name="key">value</parameter></invoke> between tags
    "invoke": ("<minimax:tool_call>", "</minimax:tool_call>"),
    # <function=name>{…}</function>
    "function": (),
    # gpt-oss: channels for thoughts, calls and the answer
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
    # {"name": …, "arguments": {…}} and nothing around it; one on each line
    "json": (),
    # JSON as Hermes has it, between the model's own markers: `tool_begin`, `tool_end`
    "template": (),
}

#: Thoughts, by the names that the file's `reasoning_parser` uses: begin, end.
THOUGHTS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}

#: `Dialect.tools` of an engine whose answers come in parts that are told apart already: text,
#: thoughts, calls with ids of their own. They cross as text with a mark before each part; a call is
#: CALL id NAME name ARGUMENTS json. Text without a mark before it is the answer's.
FRAMED = "framed"
#: Unicode noncharacters, for use within a program only: no text that comes from outside keeps one.
#: Source: Unicode 16, 23.7.
TEXT, THOUGHT, CALL, NAME, ARGUMENTS = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"


def markers(dialect: Dialect) -> tuple[str, ...]:
    """All strings that have to stay in the text for this dialect to be read."""
    own = (dialect.tool_begin, dialect.tool_end, dialect.think_begin, dialect.think_end)
    found = [*MARKERS.get(dialect.tools, ()), *own]
    return tuple(dict.fromkeys(marker for marker in found if marker))
