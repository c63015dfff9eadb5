"""What a worker tells of an answer whose engine knows no tokens, and how it goes on with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from servekit.protocol.messages import (
    UNKNOWN_TOKEN,
    ChatMessage,
    Continuation,
    Grammar,
    SamplingParams,
)
from tests.unit.engines.command.serving import SERVER
from tests.unit.worker.serving import serving, spec

ASKED: dict[str, Any] = {"messages": [ChatMessage("user", "count")]}
SIX = SamplingParams(max_tokens=6)


def counter(folder: Path, *args: str) -> Any:
    options = {"base": "/v1", "health": "/health", "slots": 4}
    return spec(
        folder, "command", "counter", command=[*SERVER, "--step-s", "0.01", *args], **options
    )


async def test_the_first_tokens_carry_what_another_worker_needs(tmp_path: Path) -> None:
    async with serving(counter(tmp_path)) as client:
        deltas = await client.answer(client.send(SIX, **ASKED))
        assert [one for delta in deltas for one in delta.token_ids] == [UNKNOWN_TOKEN] * 6
        began = [delta.continuation for delta in deltas if delta.continuation is not None]
        assert began == [Continuation(client.info.generation, 6, by_text=True)]


async def test_it_goes_on_and_stops_at_the_same_limit(tmp_path: Path) -> None:
    async with serving(counter(tmp_path)) as client:
        begun = {**ASKED, "answered": " 0; 1; 2;", "emitted": [UNKNOWN_TOKEN] * 3}
        begun["continuation"] = Continuation(client.info.generation, 6, by_text=True)
        deltas = await client.answer(client.send(SIX, **begun))
        assert "".join(delta.text for delta in deltas) == " 3; 4; 5;"
        assert (deltas[-1].prompt_tokens, deltas[-1].completion_tokens) == (5, 6)
        whole = await client.answer(client.send(SamplingParams(max_tokens=3), **begun))
        assert [(one.text, one.finish, one.completion_tokens) for one in whole] == [
            ("", "length", 3)
        ]


@pytest.mark.parametrize("args", [(), ("--no-prefix",)])
async def test_what_cannot_go_on_carries_nothing(tmp_path: Path, args: tuple[str, ...]) -> None:
    grammar = Grammar("json_schema", '{"type":"object"}')
    params = SIX if args else structs.replace(SIX, grammar=grammar)
    async with serving(counter(tmp_path, *args)) as client:
        deltas = await client.answer(client.send(params, **ASKED))
        assert not any(delta.continuation for delta in deltas)
