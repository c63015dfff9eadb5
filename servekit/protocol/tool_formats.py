"""The families of tool calls, by the names that `Dialect.tools` and the file's `tool_parser` use.

Both sides share them: a worker recognises the family and keeps its markers in the text where the
tokenizer would skip them; a gateway parses the calls.
"""

from __future__ import annotations

from servekit.protocol.types import Dialect

#: The marker strings of each family that may be tokens of a tokenizer.
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
    # the same with <｜DSML｜invoke name="f"><｜DSML｜parameter name="key" string="true">value
    "dsml": ("｜DSML｜",),
    # [{"tool_call_id": "0", "tool_name": …, "parameters": {…}}] between markers
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    # call:name{key:<|"|>text<|"|>,other:1} between markers
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    # <function=name>{…}</function>
    "function": (),
    # gpt-oss: channels for thoughts, calls and the answer
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
    # {"name": …, "arguments": {…}} without markers, one per line
    "json": (),
    # JSON as in Hermes, between the model's own markers: `tool_begin`, `tool_end`
    "template": (),
}

#: Begin and end markers of thoughts, by the names that the file's `reasoning_parser` uses.
THOUGHTS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": ("<|channel>thought", "<channel|>"),
}

#: The names that chat templates have for the switch for thoughts.
THINKING_SWITCHES = ("enable_thinking", "thinking")

#: `Dialect.tools` of an engine whose answers are already split into text, thoughts, and calls with
#: ids. They are sent as text with a mark before each part; a call is CALL id NAME name ARGUMENTS
#: json. Text without a mark belongs to the answer.
FRAMED = "framed"
#: Unicode noncharacters, for internal use: they are removed from all external text.
#: Source: Unicode 16, 23.7.
TEXT, THOUGHT, CALL, NAME, ARGUMENTS = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"


def dialect_markers(dialect: Dialect) -> tuple[str, ...]:
    """Return all strings that must stay in the text for this dialect to be parsed."""
    own = (dialect.tool_begin, dialect.tool_end, dialect.think_begin, dialect.think_end)
    found = [*MARKERS.get(dialect.tools, ()), *own]
    return tuple(dict.fromkeys(marker for marker in found if marker))
