"""Tools on their way through a worker: into the prompt, and their markers into the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from servekit.gateway.tool_parsing import parse_tool_choice, parser, tool_grammar
from servekit.protocol.messages import ChatMessage, Dialect, Grammar, SamplingParams
from tests.unit.engines.speaking import write_model
from tests.unit.gateway.tool_parsing.reading import feed, joined
from tests.unit.worker.serving import serving, spec

USER = [ChatMessage("user", "Pick.")]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Picks.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
        },
    },
}


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    markers = ["[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    return write_model(tmp_path / "model", "mistralai-Mistral-Nemo-Instruct-2407", markers, [])


async def test_a_call_comes_with_its_markers_and_plain_text_without(nemo: Path) -> None:
    async with serving(spec(nemo.parent, "transformers", str(nemo), threads=1)) as client:
        dialect = client.info.dialect
        assert dialect.tools == "mistral"
        assert [text for text, _ in dialect.tokens] == ["[TOOL_CALLS]"]
        grammar = tool_grammar(dialect, parse_tool_choice([TOOL], "required"), parallel=False)
        params = SamplingParams(max_tokens=200, grammar=grammar, temperature=1.0, seed=3)
        deltas = await client.answer(client.send(params, messages=USER, tools=[TOOL]))
        text = "".join(delta.text for delta in deltas)
        ((name, given),) = joined(feed(parser(dialect, tools=True, reasoning=False), text, [5]))
        assert name == "pick"
        assert json.loads(given) in ({"n": 1}, {"n": 2})

        token = dict(dialect.tokens)["[TOOL_CALLS]"]
        forced = SamplingParams(
            max_tokens=20, grammar=Grammar("lark", f'start: "a" <[{token}]> "b"')
        )
        plain = await client.answer(client.send(forced, messages=USER))
        assert "".join(delta.text for delta in plain) == "ab"
        with_tools = await client.answer(client.send(forced, messages=USER, tools=[TOOL]))
        assert "".join(delta.text for delta in with_tools) == "a[TOOL_CALLS]b"
        assert with_tools[-1].prompt_tokens > plain[-1].prompt_tokens + 20


async def test_the_files_word_on_the_parser_reaches_the_dialect(nemo: Path) -> None:
    wanted = structs.replace(
        spec(nemo.parent, "transformers", str(nemo), threads=1),
        tool_parser="none",
        reasoning_parser="think",
    )
    async with serving(wanted) as client:
        expected = Dialect(think_begin="<think>", think_end="</think>")
        assert client.info.dialect == expected
        assert "tools" in client.info.serves


async def test_what_a_template_refuses_is_the_requests_fault(nemo: Path) -> None:
    async with serving(spec(nemo.parent, "transformers", str(nemo), threads=1)) as client:
        begun = [ChatMessage("assistant", "I begin."), *USER]
        refused = await client.failure(client.send(messages=begun, tools=[TOOL]))
        assert refused.code == "invalid_request" and refused.param == "messages"
        taken = client.send(messages=USER, template={"tokenize": True})
        assert (await client.failure(taken)).param == "chat_template_kwargs"
