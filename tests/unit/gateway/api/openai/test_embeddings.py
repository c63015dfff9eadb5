"""Embeddings and tokens over a real router, an echo worker, and ASGI as uvicorn speaks it."""

from __future__ import annotations

import array
import asyncio
import base64
import functools
import json
import math
from typing import Any

import httpx
import pytest

from servekit.gateway.api.openai.embeddings import (
    GROUP,
    MAX_INPUTS,
    Vectors,
    numbers,
    shortened,
)
from servekit.protocol.transport import connection
from tests.unit.gateway.conftest import Service, until

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(100), {})


async def post(service: Service, path: str, **body: Any) -> httpx.Response:
    route = Vectors(service.router, 10**6).routes[path]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=route)) as client:
        return await client.post(f"http://servekit{path}", json={"model": "m", **body})


async def test_vectors_as_numbers_and_as_base64_are_the_same(service: Service) -> None:
    await service.up()
    plain = (await post(service, "/v1/embeddings", input=["a", "bc"])).json()
    coded = (
        await post(service, "/v1/embeddings", input=["a", "bc"], encoding_format="base64")
    ).json()
    assert plain["object"] == "list"
    assert plain["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["index"] for one in plain["data"]] == [0, 1]
    for one, other in zip(plain["data"], coded["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert numbers(raw) == pytest.approx(one["embedding"])


async def test_many_inputs_keep_their_order_over_several_requests(service: Service) -> None:
    await service.up(2)
    texts = [f"text {index}" for index in range(3 * GROUP + 1)]
    together = (await post(service, "/v1/embeddings", input=texts)).json()["data"]
    last = (await post(service, "/v1/embeddings", input=texts[-1])).json()["data"]
    assert [one["index"] for one in together] == list(range(len(texts)))
    assert together[-1]["embedding"] == last[0]["embedding"]
    assert together[0]["embedding"] != last[0]["embedding"]
    assert service.router.in_flight == 0


async def test_fewer_dimensions_are_a_unit_vector_again(service: Service) -> None:
    await service.up()
    [one] = (await post(service, "/v1/embeddings", input="a", dimensions=3)).json()["data"]
    assert len(one["embedding"]) == 3
    assert math.fsum(value * value for value in one["embedding"]) == pytest.approx(1.0)


def test_a_vector_of_zeros_stays_one() -> None:
    assert shortened(array.array("f", [0.0, 0.0, 1.0]).tobytes(), 2) == bytes(8)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": [0x110000]}, "input"),
        ({"input": ["a"] * 20 + ["b" * 9000]}, "input"),
    ],
)
async def test_refusals_name_the_field(service: Service, body: dict[str, Any], param: str) -> None:
    await service.up()
    answer = await post(service, "/v1/embeddings", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert service.router.in_flight == 0


async def test_tokens_there_and_back(service: Service) -> None:
    await service.up()
    told = (await post(service, "/tokenize", prompt="añ")).json()
    assert told == {"count": 2, "max_model_len": None, "tokens": [97, 241]}
    back = (await post(service, "/detokenize", tokens=told["tokens"])).json()
    assert back == {"prompt": "añ"}
    assert (await post(service, "/tokenize", **CHAT)).json()["count"] >= 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/tokenize", {**CHAT, "tools": [{"type": "function"}]}),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"a": 2**64}}),
        ("/tokenize", {**CHAT, "chat_template_kwargs": DEEP}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [0x110000]}),
    ],
)
async def test_tokens_are_refused_in_words(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    await service.up()
    answer = await post(service, path, **body)
    assert answer.status_code == 400
    assert json.loads(answer.content)["error"]["message"]


async def test_a_worker_that_dies_costs_no_vector(service: Service) -> None:
    first, _ = await service.up(2, slots=1)
    first.engine.embed = lambda job: None  # type: ignore[method-assign]  # it will never answer
    asking = asyncio.create_task(post(service, "/v1/embeddings", input=["a"] * 2 * GROUP))
    await until(lambda: any(r.calls for r in service.router.routes["m"].replicas.values()))
    await until(lambda: first.runner.busy)
    first.kill()
    answer = await asking
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 2 * GROUP


async def test_answers_too_long_for_a_message_go_apart_or_are_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.up()
    monkeypatch.setattr(connection, "MAX_FRAME_BYTES", 40_000)
    texts = ("x" * 15_000, "y" * 15_000, "z" * 15_000)
    told = await asyncio.gather(*(post(service, "/tokenize", prompt=text) for text in texts))
    assert [one.json()["count"] for one in told] == [15_000] * 3
    longer = await post(service, "/tokenize", prompt="\N{GRINNING FACE}" * 9_000)
    assert longer.status_code == 400
    assert "the answer is too long" in longer.json()["error"]["message"]
    assert service.router.in_flight == 0
