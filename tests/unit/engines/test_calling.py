"""A model without a clue, made to call tools: dialect, grammar, decoder and parser together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from servekit.gateway.tool_parsing import after_thoughts, parse_tool_choice, parser, tool_grammar
from servekit.protocol.messages import ChatMessage, Grammar
from tests.unit.engines.harness import Harness, make_spec
from tests.unit.engines.speaking import write_model
from tests.unit.gateway.tool_parsing.reading import Said, feed, joined

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
                "required": ["n", "sure"],
            },
        },
    }
]
USER = [ChatMessage("user", "Pick one.")]
#: Template, its markers that are special tokens, and those that are mere additions.
MODELS = [
    ("Qwen-Qwen3-0.6B", [], ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    ("mistralai-Ministral-3-14B-Reasoning-2512", ["[TOOL_CALLS]", "[ARGS]", "[THINK]",
                                                  "[/THINK]"], []),
]  # fmt: skip
MODELS_IN_LANE = [
    ("GLM-4.7-Flash", ["<tool_call>", "</tool_call>", "<think>", "</think>"], ["<arg_key>"]),
    ("Qwen3-Coder", [], []),
    ("openai-gpt-oss-120b", ["<|channel|>", "<|message|>", "<|start|>", "<|end|>",
                             "<|constrain|>"], []),
]  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(model, id=model[0]) for model in MODELS),
        *(
            pytest.param(model, id=model[0], marks=pytest.mark.lane("long"))
            for model in MODELS_IN_LANE
        ),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Harness]:
    folder = write_model(tmp_path_factory.mktemp("model"), *request.param)
    harness = Harness(make_spec(folder, max_context=8192))
    yield harness
    harness.close()


def answer(model: Harness, grammar: Grammar | None, seed: int, thinking: bool) -> Said:
    codec, dialect = model.engine.codec, model.info.dialect
    prompt = codec.render_chat(USER, TOOLS)
    job = model.submit(prompt, grammar=grammar, max_tokens=400, temperature=1.0, seed=seed)
    decoder = codec.decoder([text for text, _ in dialect.tokens])
    pieces = [decoder.push([token]) for token in model.tokens(job)]
    text = "".join(pieces) + decoder.flush()
    assert model.finish(job) == "stop", text
    read = parser(dialect, tools=TOOLS, reasoning=True, thinking=thinking)
    return joined(feed(read, text, [1]))


@pytest.mark.lane("long")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_is_made_to_call(model: Harness, seed: int) -> None:
    assert "tools" in model.info.serves
    grammar = tool_grammar(model.info.dialect, parse_tool_choice(TOOLS, "required"), parallel=False)
    said = answer(model, grammar, seed, thinking=False)
    (call,) = [one for one in said if one[0] != "thought"]
    assert call[0] == "pick"
    given = json.loads(call[1])
    assert given["n"] in (1, 2, 3) and isinstance(given["sure"], bool) and len(given) == 2


def test_an_answer_keeps_to_its_format(model: Harness) -> None:
    inner = Grammar("json_schema", '{"enum": [[1], {"a": 2}]}')
    grammar = after_thoughts(model.info.dialect, inner, begun=False)
    said = answer(model, grammar, 5, thinking=False)
    (words,) = [words for kind, words in said if kind == "text"]
    assert json.loads(words) in ([1], {"a": 2})
