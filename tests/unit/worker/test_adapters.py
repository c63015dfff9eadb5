"""Adapters that come and go in a worker with requests under way: the echo engine behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import EngineFailed, LoadError
from servekit.protocol.adapters import (
    AdapterLoaded,
    AdapterRefused,
    AdapterSpec,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.messages import Continuation, SamplingParams
from servekit.worker.adapters import Adapters, Answer
from servekit.worker.runner import ADAPTED
from tests.unit.gateway.conftest import DEADLINE_S, ENDLESS, ENDLESS_TOKENS, until
from tests.unit.worker.serving import Client, serving, spec

LONG = SamplingParams(max_tokens=60)


class Worker:
    """A worker's inside, one who speaks to it, and what it answers to orders."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.answers: list[Answer] = []
        self._folder = folder
        self._seqs = count(1)
        self._changed = asyncio.Event()
        self.adapters = Adapters(client.runner, self._on_answer)

    def _on_answer(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._changed.set()

    def load(self, name: str, config: object = None) -> int:
        path = self._folder / name
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({} if config is None else config))
        self.adapters.handle_order(
            LoadAdapter(seq := next(self._seqs), AdapterSpec(name, str(path)))
        )
        return seq

    def unload(self, name: str) -> int:
        self.adapters.handle_order(UnloadAdapter(seq := next(self._seqs), name))
        return seq

    async def answer(self, seq: int) -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := [one for one in self.answers if one.seq == seq]):
                self._changed.clear()
                await self._changed.wait()
        return found[0]

    async def text(self, request: int) -> str:
        return "".join(delta.text for delta in await self.client.answer(request))


@asynccontextmanager
async def working(folder: Path, **options: Any) -> AsyncIterator[Worker]:
    async with serving(spec(folder, **options)) as client:
        worker = Worker(client, folder)
        try:
            yield worker
        finally:
            worker.adapters.close()


async def test_they_are_carried_out_in_order_and_answer_as_themselves(tmp_path: Path) -> None:
    async with working(tmp_path) as worker:
        orders = [worker.load("x"), worker.load("y", {"transform": "swapcase"}), worker.unload("x")]
        loaded = await worker.answer(orders[0])
        assert isinstance(loaded, AdapterLoaded)
        assert (loaded.info.name, loaded.info.mode) == ("x", "mixed")
        assert isinstance(await worker.answer(orders[2]), AdapterUnloaded)
        assert [answer.seq for answer in worker.answers] == orders
        assert await worker.text(worker.client.send(LONG, prompt="aB", adapter="y")) == "Ab" * 30
        assert await worker.text(worker.client.send(LONG, prompt="aB")) == "aB" * 30


async def test_what_is_under_way_is_done_before_it_goes(tmp_path: Path) -> None:
    async with working(tmp_path, step_s=0.003) as worker:
        await worker.answer(worker.load("x"))
        running = [worker.client.send(LONG, prompt="ab", adapter="x") for _ in range(3)]
        await until(lambda: worker.client.runner.uses("x"))
        gone = worker.unload("x")
        await until(lambda: worker.client.runner.closing_adapter == "x")
        late = await worker.client.failure(worker.client.send(LONG, prompt="ab", adapter="x"))
        assert (late.code, "'x' is not loaded any more" in late.message) == (
            "model_not_found",
            True,
        )
        assert not worker.answers[1:]
        assert {await worker.text(request) for request in running} == {"AB" * 30}
        assert isinstance(await worker.answer(gone), AdapterUnloaded)


async def test_one_that_is_to_go_takes_what_began_elsewhere_while_it_is_in_use(
    tmp_path: Path,
) -> None:
    async with working(tmp_path, **ENDLESS) as worker:
        await worker.answer(worker.load("x"))
        send, runner = worker.client.send, worker.client.runner
        endless = send(SamplingParams(max_tokens=ENDLESS_TOKENS), prompt="ab", adapter="x")
        await until(lambda: runner.uses("x"))
        gone = worker.unload("x")
        await until(lambda: runner.closing_adapter == "x")
        began = Continuation(runner.generation("x"), 60)
        emitted = [ord(letter) for letter in "ABA"]
        begun = send(
            LONG, prompt="ab", adapter="x", emitted=emitted, sent_chars=3, continuation=began
        )
        assert "ABA" + await worker.text(begun) == "AB" * 30
        worker.client.cancel(endless)
        assert isinstance(await worker.answer(gone), AdapterUnloaded)


async def test_one_that_is_continued_goes_on_with_its_adapter(tmp_path: Path) -> None:
    async with working(tmp_path) as worker:
        await worker.answer(worker.load("x"))
        emitted = [ord(letter) for letter in "ABA"]
        request = worker.client.send(LONG, prompt="ab", adapter="x", emitted=emitted, sent_chars=3)
        assert "ABA" + await worker.text(request) == "AB" * 30


async def test_what_an_adapter_cannot_do_and_what_the_base_does_for_it(tmp_path: Path) -> None:
    async with working(tmp_path) as worker:
        send, failure = worker.client.send, worker.client.failure
        unknown = await failure(send(LONG, prompt="ab", adapter="nobody"))
        assert unknown.code == "model_not_found"
        vectors = await failure(send(task="embed", inputs=["ab"], adapter="nobody"))
        assert (vectors.code, vectors.param) == ("unsupported_parameter", "model")
        [tokens] = await worker.client.answer(send(prompt="ab", task="tokenize", adapter="gone"))
        assert tokens.token_ids == [97, 98]


@pytest.mark.parametrize(
    ("config", "words"),
    [([], "has to be a JSON object"), ({"transform": []}, "transform has to be one of upper")],
)
async def test_one_that_is_wrong_is_refused(tmp_path: Path, config: object, words: str) -> None:
    async with working(tmp_path) as worker:
        refused = await worker.answer(worker.load("x", config))
        assert isinstance(refused, AdapterRefused)
        assert refused.invalid
        assert words in refused.message
        assert isinstance(await worker.answer(worker.load("x")), AdapterLoaded)
        again = await worker.answer(worker.load("x"))
        assert isinstance(again, AdapterRefused)
        assert "loaded already" in again.message
        assert isinstance(await worker.answer(worker.unload("y")), AdapterRefused)


@pytest.mark.parametrize(
    "error", [LoadError("no memory"), EngineFailed("no memory"), RuntimeError("no memory")]
)
async def test_what_is_only_wrong_now_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with working(tmp_path) as worker:
        engine = worker.client.engine

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine, "load_adapter", fail)
            refused = await worker.answer(worker.load("x"))
        assert isinstance(refused, AdapterRefused)
        assert not refused.invalid
        assert "no memory" in refused.message
        await worker.answer(worker.load("x"))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "unload_adapter", fail)
            assert isinstance(await worker.answer(worker.unload("x")), AdapterRefused)
        assert await worker.text(worker.client.send(LONG, prompt="ab", adapter="x")) == "AB" * 30


async def test_requests_that_have_ended_are_not_kept_count_of(tmp_path: Path) -> None:
    short = SamplingParams(max_tokens=1)
    async with working(tmp_path, **ENDLESS) as worker:
        await worker.answer(worker.load("x"))
        endless = SamplingParams(max_tokens=ENDLESS_TOKENS)
        long = worker.client.send(endless, prompt="ab", adapter="x")
        for _ in range(4 * ADAPTED // 32):
            for request in [worker.client.send(short, prompt="ab", adapter="x") for _ in range(32)]:
                await worker.client.answer(request)
        assert len(worker.client.runner._adapted) <= ADAPTED
        assert worker.client.runner.uses("x")
        worker.client.cancel(long)
        await until(lambda: not worker.client.runner.uses("x"))
