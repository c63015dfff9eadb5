"""Turns of a model that keeps to grammars: small, random, and made to call tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.gateway.router import Router
from servekit.gateway.turn import Ask, Turn
from servekit.wire.messages import (
    ChatMessage,
    ModelStatus,
    ReplicaStatus,
    SamplingParams,
    Topology,
)
from tests.unit.engines.speaking import write_model
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
    wanted = spec(tmp_path, "transformers", str(folder), threads=1)
    async with serving(wanted) as client:
        router = Router("gateway/test")
        replica = ReplicaStatus("m/0", "ready", wanted.socket, 1, "cpu")
        status = ModelStatus("m", "transformers", "-", 0, (replica,), info=client.info)
        router.apply(Topology((status,)))
        route = router.routes["m"]
        await until(lambda: any(replica.routable for replica in route.replicas.values()))
        yield router
        router.apply(Topology(()))


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "pick"}}, "stop")],
)
async def test_stop_strings_do_not_cut_a_call_that_was_ordered(
    router: Router, choice: Any, finish: str
) -> None:
    """As OpenAI has it, one that was ordered by name is finished by "stop" all the same."""
    asked = Ask(
        model="m",
        params=SamplingParams(max_tokens=400, seed=3, temperature=1.0, stop=("n", "pick", "<")),
        messages=[ChatMessage("user", "Pick.")],
        tools=[TOOL],
        tool_choice=choice,
        parallel=False,
    )
    async with asyncio.timeout(6 * DEADLINE_S):
        [answer] = await Turn(router, asked).whole()
    [call] = answer.calls
    assert call.name == "pick"
    assert json.loads(call.arguments) in ({"n": 1}, {"n": 2})
    assert (answer.finish, answer.stop) == (finish, "")
