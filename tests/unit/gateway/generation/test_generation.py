"""Turns of a model that keeps to grammars: small, random, and made to call tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import Unsupported
from servekit.gateway.generation.generation import Generation, GenerationRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    ModelStatus,
    ReplicaStatus,
    SamplingParams,
    Topology,
    WorkerSpec,
)
from tests.unit.engines.harness import TEMPLATE
from tests.unit.engines.remote.liar import Liar, lying, said
from tests.unit.engines.speaking import write_model
from tests.unit.gateway.collecting import collect_choices
from tests.unit.gateway.conftest import DEADLINE_S, until
from tests.unit.worker.serving import serving, spec

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
        },
    },
}


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    folder = write_model(tmp_path / "m", "Qwen3-Coder", [], [])
    async with routed(spec(tmp_path, "transformers", str(folder), threads=1)) as router:
        yield router


@contextlib.asynccontextmanager
async def routed(wanted: WorkerSpec) -> AsyncIterator[Router]:
    async with serving(wanted) as client:
        router = Router("gateway/test")
        replica = ReplicaStatus("m/0", "ready", wanted.socket, 1, "cpu")
        status = ModelStatus("m", wanted.engine, "-", 0, (replica,), info=client.info)
        router.apply_topology(Topology((status,)))
        route = router.routes["m"]
        await until(lambda: any(replica.routable for replica in route.replicas.values()))
        yield router
        router.apply_topology(Topology(()))


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "pick"}}, "stop")],
)
async def test_stop_strings_do_not_cut_a_call_that_was_ordered(
    router: Router, choice: Any, finish: str
) -> None:
    """As OpenAI has it, one that was ordered by name is finished by "stop" all the same."""
    asked = GenerationRequest(
        model="m",
        params=SamplingParams(max_tokens=400, seed=3, temperature=1.0, stop=("n", "pick", "<")),
        messages=[ChatMessage("user", "Pick.")],
        tools=[TOOL],
        tool_choice=choice,
        parallel=False,
    )
    async with asyncio.timeout(6 * DEADLINE_S):
        [answer] = await collect_choices(Generation(router, asked))
    [call] = answer.calls
    assert call.name == "pick"
    assert json.loads(call.arguments) in ({"n": 1}, {"n": 2})
    assert (answer.finish, answer.stop) == (finish, "")


# ---------------------------------------------------------------- a template without tools


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[Router]:
    folder = write_model(tmp_path / "m", "Qwen3-Coder", [], [])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with routed(spec(tmp_path, "transformers", str(folder), threads=1)) as router:
        yield router


NAMED = {"type": "function", "function": {"name": "pick"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_can_be_asked_for_of_any_model(
    plain: Router, choice: Any, stream: bool
) -> None:
    info = plain.routes["m"].status.info
    assert info is not None and "tools" not in info.serves
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    params = SamplingParams(max_tokens=400, seed=3, temperature=1.0)
    asked = ask(params=params, tools=[TOOL, other], tool_choice=choice, stream=stream)
    async with asyncio.timeout(6 * DEADLINE_S):
        [answer] = await collect_choices(Generation(plain, asked))
    assert answer.text == "" and answer.calls
    assert {call.name for call in answer.calls} <= {"pick", "other"}
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    if choice is NAMED:
        assert [call.name for call in answer.calls] == ["pick"]


async def test_a_call_that_is_cut_off_leaves_no_markup(plain: Router) -> None:
    for limit in range(1, 30, 3):
        params = SamplingParams(max_tokens=limit, seed=3, temperature=1.0)
        asked = ask(params=params, tool_choice=NAMED)
        async with asyncio.timeout(6 * DEADLINE_S):
            [answer] = await collect_choices(Generation(plain, asked))
        assert answer.text == ""
        assert answer.finish == "length" or json.loads(answer.calls[0].arguments)


async def test_calls_that_nothing_asks_for_are_refused_with_the_way_out(plain: Router) -> None:
    with pytest.raises(Unsupported, match='such as "required"'):
        Generation(plain, ask())


# ---------------------------------------------------------------- of an engine that is told


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[tuple[Liar, Router]]:
    async with lying() as liar, routed(spec(tmp_path, "openai", "there", url=liar.url)) as router:
        yield liar, router


def ask(**more: Any) -> GenerationRequest:
    known: dict[str, Any] = {"params": SamplingParams(stop=("n",)), "tools": [TOOL]}
    return GenerationRequest(model="m", messages=[ChatMessage("user", "Pick.")], **known | more)


async def test_what_it_is_told_instead_of_a_grammar(far: tuple[Liar, Router]) -> None:
    liar, router = far
    call = {"index": 0, "id": "c1", "function": {"name": "pick", "arguments": '{"n": 1}'}}
    liar.answers.extend([said({"tool_calls": [call]})] * 4)
    named = {"type": "function", "function": {"name": "pick"}}
    for choice, parallel, finish in (
        (None, True, "tool_calls"),
        (None, False, "tool_calls"),
        ("required", True, "tool_calls"),
        (named, True, "stop"),
    ):
        [answer] = await collect_choices(
            Generation(router, ask(tool_choice=choice, parallel=parallel))
        )
        assert [(one.id, one.name) for one in answer.calls] == [("c1", "pick")]
        assert (json.loads(answer.calls[0].arguments), answer.finish) == ({"n": 1}, finish)
    bodies = [asked.body for asked in liar.asked]
    assert [body.get("tool_choice") for body in bodies] == [None, None, "required", named]
    assert [body.get("parallel_tool_calls") for body in bodies] == [None, False, None, False]
    assert [body.get("stop") for body in bodies] == [["n"], ["n"], None, None]


async def test_its_grammar_is_the_client_s_own(far: tuple[Liar, Router]) -> None:
    liar, router = far
    params = SamplingParams(grammar=Grammar("json_schema", '{"enum":[1]}'))
    await collect_choices(
        Generation(router, ask(params=params, template={"enable_thinking": True}))
    )
    [asked] = liar.asked
    assert asked.body["response_format"]["json_schema"]["schema"] == {"enum": [1]}


async def test_a_call_that_is_required_leaves_no_answer_for_a_schema(
    far: tuple[Liar, Router],
) -> None:
    liar, router = far
    call = {"index": 0, "id": "c1", "function": {"name": "pick", "arguments": '{"n": 1}'}}
    liar.answers.append(said({"tool_calls": [call]}))
    params = SamplingParams(grammar=Grammar("json_schema", '{"type":"null"}', "text.format"))
    [answer] = await collect_choices(Generation(router, ask(params=params, tool_choice="required")))
    assert [one.name for one in answer.calls] == ["pick"]
    assert "response_format" not in liar.asked[0].body


@pytest.mark.parametrize("reasoning", [True, False])
async def test_no_mark_is_ever_told(far: tuple[Liar, Router], reasoning: bool) -> None:
    liar, router = far
    liar.answers += [said({"reasoning_content": "hm"}, "yes")]
    [answer] = await collect_choices(Generation(router, ask(reasoning=reasoning, tools=[])))
    expected = ("yes", "hm") if reasoning else ("<think>\nhm\n</think>\n\nyes", "")
    assert (answer.text, answer.reasoning) == expected
