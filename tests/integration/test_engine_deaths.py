"""An engine that dies is a worker that dies: nothing is lost, and the cause is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance, echo
from tests.integration.test_faults_supervisor import cli
from tests.polling import poll

STREAMS, WHOLES = 20, 10
POISON = "(raise)"
CAUSE = f"RuntimeError: the prompt contains {POISON!r}"


def model() -> dict[str, Any]:
    return echo("a", replicas=2, step_s=0.01, slots=STREAMS + WHOLES, raise_on=POISON)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with Instance.up(tmp_path, [model()]) as instance:
        instance.until_settled()
        yield instance


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "a", "prompt": prompt, "max_tokens": tokens, **more}


def expected(prompt: str, tokens: int) -> str:
    return (prompt * tokens)[:tokens]


async def whole(client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    answer = await client.post("/v1/completions", json=body(prompt, tokens))
    return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.text


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, begun: Any) -> str:
    text = ""
    request = body(prompt, tokens, stream=True)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                if "error" in told:
                    return line
                text += told["choices"][0]["text"]
                begun.set()
    return text


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=100)
    return httpx.AsyncClient(base_url=url, timeout=60, limits=limits)


def deaths(instance: Instance) -> list[dict[str, Any]]:
    told = json.loads(cli(instance, "why", "a", "--json").stdout)
    return [death for replica in told["replicas"] for death in replica["exits"]]


def test_what_ran_beside_a_step_that_raises_is_answered_in_full(instance: Instance) -> None:
    """Five times the same poison takes three workers, and nobody but its sender hears of it."""
    asked = [(f"a stream of number {n}; ", 150 + 5 * n) for n in range(STREAMS)]
    asked += [(f"a whole of number {n}; ", 200 + 5 * n) for n in range(WHOLES)]

    async def ask(url: str) -> tuple[list[str], list[httpx.Response]]:
        async with client_of(url) as client:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            running = [stream(client, *one, begun[n]) for n, one in enumerate(asked[:STREAMS])]
            running += [whole(client, *one) for one in asked[STREAMS:]]
            tasks = list(map(asyncio.create_task, running))
            await asyncio.gather(*(event.wait() for event in begun))
            said = [await client.post("/v1/completions", json=body(POISON, 50)) for _ in range(5)]
            return await asyncio.gather(*tasks), said

    texts, said = asyncio.run(ask(instance.url))
    assert [text for text, one in zip(texts, asked, strict=True) if text != expected(*one)] == []
    errors = {(one.status_code, one.json()["error"]["code"]) for one in said}
    assert errors == {(500, "request_quarantined")}
    died = deaths(instance)
    assert len(died) == 3
    assert {(death["what"], death["code"]) for death in died} == {(CAUSE, 70)}


@pytest.mark.lane("long")
def test_a_dead_engine_draws_no_traffic(instance: Instance) -> None:
    """Without load it would be the least loaded."""
    said: list[tuple[str, str]] = []

    async def hammer(client: httpx.AsyncClient, number: int, over: asyncio.Event) -> None:
        while not over.is_set():
            prompt = f"hammer {number} {len(said)};"
            said.append((prompt, await whole(client, prompt, 3)))

    async def ask(url: str) -> None:
        over = asyncio.Event()
        async with client_of(url) as client:
            hammers = [asyncio.create_task(hammer(client, n, over)) for n in range(16)]
            for number in range(2):
                await whole(client, f"{POISON} {number}", 9)
            over.set()
            await asyncio.gather(*hammers)

    asyncio.run(ask(instance.url))
    assert [text for prompt, text in said if text != expected(prompt, 3)] == []
    assert len(said) > 32
    instance.until("all six deaths are told", lambda: len(deaths(instance)) == 6)


@pytest.mark.lane("long")
def test_embeddings_beside_it_are_made_elsewhere(instance: Instance) -> None:
    request = {"model": "a", "input": ["one", "two"]}
    bad = {"model": "a", "input": [f"text {POISON}"]}

    async def ask(url: str) -> tuple[list[Any], list[Any]]:
        async with client_of(url) as client:
            before = (await client.post("/v1/embeddings", json=request)).json()["data"]
            poison = [asyncio.create_task(client.post("/v1/embeddings", json=bad)) for _ in "12"]
            after = [await client.post("/v1/embeddings", json=request) for _ in range(50)]
            ended = await asyncio.gather(*poison)
        return [answer.json().get("data") == before for answer in after], [
            answer.json()["error"]["code"] for answer in ended
        ]

    same, ended = asyncio.run(ask(instance.url))
    assert same == [True] * 50
    assert ended == ["request_quarantined"] * 2


def test_a_lone_workers_requests_wait_for_the_next(tmp_path: Path) -> None:
    async def ask(url: str) -> tuple[str, str]:
        async with client_of(url) as client:
            begun = asyncio.Event()
            running = asyncio.create_task(stream(client, "all of it ", 300, begun))
            await begun.wait()
            poison = asyncio.create_task(whole(client, POISON, 9))
            return await running, await poison

    with Instance.up(tmp_path, [{**model(), "replicas": 1}]) as instance:
        instance.until_settled()
        pid = instance.replica("a/0").pid
        text, poison = asyncio.run(ask(instance.url))
        assert text == expected("all of it ", 300)
        assert "quarantined" in poison
        poll("the cause is told", lambda: instance.replica("a/0").reason == CAUSE, 10)
        assert instance.replica("a/0").pid != pid
