"""What of the contract applies to engines that speak text: a remote endpoint, made up and local."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from servekit.engines import create_engine
from servekit.engines.api.base import Job, StepOutput
from servekit.engines.api.text_engine import TextEngine, TextJob, TextOutput
from servekit.errors import Unsupported
from servekit.protocol.messages import (
    ChatMessage,
    Generate,
    ModelInfo,
    Progress,
    SamplingParams,
)
from tests.polling import poll_async
from tests.unit.engines.contract.subjects import spec
from tests.unit.engines.remote.liar import Liar, lying, said, silent, status

SLOTS = 4
DEADLINE_S = 60.0
USER = [ChatMessage("user", "Hi")]


class Running:
    """A text engine that runs, beside the endpoint that it asks."""

    def __init__(self, engine: TextEngine, info: ModelInfo) -> None:
        self.engine = engine
        self.info = info
        self.outputs: dict[int, list[TextOutput]] = {}
        self.late: list[TextOutput] = []
        self._last = 0

    def emit(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            assert isinstance(output, TextOutput)
            if self.ended(output.id):
                self.late.append(output)
            self.outputs.setdefault(output.id, []).append(output)

    def ask(self) -> int:
        self._last += 1
        request = Generate(self._last, SamplingParams(max_tokens=9), messages=USER)
        self.engine.ask(TextJob(self._last, request))
        return self._last

    def ended(self, job_id: int) -> bool:
        last = self.outputs.get(job_id, [])[-1:]
        return bool(last) and (last[0].finish is not None or last[0].failure is not None)

    async def answer(self, job_id: int) -> list[TextOutput]:
        await poll_async("the engine gets there", lambda: self.ended(job_id))
        return self.outputs[job_id]

    async def text(self, job_id: int) -> str:
        return "".join(output.text for output in await self.answer(job_id))

    def is_idle(self) -> bool:
        now = self.engine.load_now()
        return (now.running, now.waiting, now.progress_age_s) == (0, 0, 0.0)


@contextlib.asynccontextmanager
async def reached() -> AsyncIterator[tuple[Liar, Running]]:
    """It is left alive and silent about jobs that had ended."""
    async with lying() as liar:
        options = {"url": liar.url, "slots": SLOTS, "retries": 0}
        engine = create_engine(spec("openai", "kimi", options=options))
        assert isinstance(engine, TextEngine)
        progress: list[Progress] = []
        info = await asyncio.to_thread(engine.load, progress.append)
        running = Running(engine, info)
        engine.start(running.emit)
        try:
            yield liar, running
            assert engine.fatal is None
            assert running.late == []
        finally:
            await asyncio.to_thread(engine.close)


async def test_what_it_is_makes_sense() -> None:
    async with reached() as (_, engine):
        assert (engine.info.slots, engine.info.resumes) == (SLOTS, False)
        assert "generate" in engine.info.serves
        assert not {"tokenize", "detokenize", "adapters"} & set(engine.info.serves)
        with pytest.raises(Unsupported):
            engine.engine.submit(Job(1, [1], SamplingParams(max_tokens=1)))
        with pytest.raises(Unsupported):
            engine.engine.sleep()


async def test_text_comes_in_order_and_only_the_last_says_how_it_ended() -> None:
    async with reached() as (liar, engine):
        liar.answers += [said("One", " two", " three"), said("cut", finish="length")]
        first = engine.ask()
        assert await engine.text(first) == "One two three"
        *before, last = await engine.answer(first)
        assert all(output.finish is None for output in before)
        assert (last.finish, last.prompt_tokens, last.completion_tokens) == ("stop", 7, 3)
        second = engine.ask()
        assert (await engine.answer(second))[-1].finish == "length"


async def test_sixty_four_at_once_all_end() -> None:
    async with reached() as (_, engine):
        jobs = [engine.ask() for _ in range(64)]
        assert [await engine.text(job) for job in jobs] == ["Hello!"] * 64
        await poll_async("the engine gets there", engine.is_idle)


async def test_who_leaves_is_not_heard_of_again_and_the_endpoint_hears_of_it() -> None:
    async with reached() as (liar, engine):
        liar.answers += [silent()]
        stuck = engine.ask()
        await liar.until(lambda: liar.open == 1)
        now = engine.engine.load_now()
        assert now.running + now.waiting == 1
        engine.engine.cancel(stuck)
        engine.engine.cancel(123456789)
        await liar.until(lambda: liar.gone == 1)
        assert await engine.text(engine.ask()) == "Hello!"
        assert stuck not in engine.outputs
        await poll_async("the engine gets there", engine.is_idle)


async def test_what_fails_fails_alone() -> None:
    async with reached() as (liar, engine):
        liar.answers += [status(400, "no such parameter"), said("fine")]
        wrong = engine.ask()
        failure = (await engine.answer(wrong))[-1].failure
        assert failure is not None and "no such parameter" in failure.message
        assert await engine.text(engine.ask()) == "fine"


async def test_a_life_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    """Work in flight or not; stdout is not its to write on."""
    await asyncio.to_thread(lambda: None)  # the pool's thread is not the engine's
    capfd.readouterr()
    before = {thread for thread in threading.enumerate() if thread.name == "engine"}
    async with reached() as (liar, engine):
        liar.answers += [silent()]
        engine.ask()
        await liar.until(lambda: liar.open == 1)
    after = {thread for thread in threading.enumerate() if thread.name == "engine"}
    assert after <= before
    await liar.until(lambda: liar.gone == 1)
    assert capfd.readouterr().out == ""
