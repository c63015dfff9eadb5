"""The clients that keep an instance busy, before a server of this test."""

from __future__ import annotations

import pytest

from servekit.chaos.baseline_answers import BaselineAnswer
from servekit.chaos.client import Client
from servekit.chaos.load import Load, Silences
from tests.polling import poll_async
from tests.unit.chaos.test_client import GOOD, HEAD, QUESTION, server, text


async def known(url: str) -> list[BaselineAnswer]:
    answer = await Client(url).await_answer(QUESTION, stream=True)
    return [BaselineAnswer(QUESTION, answer, True)]


async def test_leaving_waits_for_all_answers_and_sends_no_more() -> None:
    async with server(GOOD) as url:
        expected = await known(url)
        async with Load(Client(url), expected, streams=2) as load:
            await poll_async("some are answered", lambda: load.tally.answered > 5)
        assert load.active == set()
        assert load.tally.clean and load.tally.sent == load.tally.answered
        answered = load.tally.answered
        assert all(task.done() for task in load._tasks) and load.tally.answered == answered


async def test_expected_failures_are_counted_apart() -> None:
    async with server(GOOD) as url:
        expected = await known(url)
    async with server(HEAD + text("a")) as url:
        load = Load(Client(url), expected, streams=1)
        load.excused = lambda answer: "lost" in answer.failure
        async with load:
            await poll_async("two were excused", lambda: load.excuses > 1)
        assert load.tally.sent == 0
        load = Load(Client(url), expected, streams=1)
        load.excused = lambda answer: False
        async with load:
            await poll_async("one has failed", lambda: load.tally.failed > 0)
        assert load.excuses == 0 and not load.tally.clean


async def test_an_error_within_ends_the_load_at_once() -> None:
    async with server(HEAD + text("a") * 3, piece=50, pause_s=0.1) as url:
        load = Load(Client(url), [BaselineAnswer(QUESTION, None, False)], streams=2)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="of the experiment"):
            async with load:
                raise RuntimeError("of the experiment")
        assert all(task.done() for task in load._tasks)


async def test_busy_means_that_each_stream_has_text() -> None:
    async with server(GOOD[:-20], piece=len(HEAD) + 60, pause_s=0.05) as url:
        expected = [BaselineAnswer(QUESTION, None, False)]  # type: ignore[arg-type]
        async with Load(Client(url), expected, streams=2) as load:
            await load.until_busy()
            assert sum(exchange.answer.chunks > 0 for exchange in load.active) == 2
            load.end_load()
    async with (
        server(HEAD, piece=len(HEAD) // 2, pause_s=0.05) as url,
        Load(Client(url), expected, streams=1) as load,
    ):
        await load.until_busy(within_s=0.02)  # gives up
        assert not any(exchange.answer.chunks for exchange in load.active)


def test_the_longest_silences_are_the_victims() -> None:
    silences = Silences(set())
    silences.silent_s += [0.3, 0.1, 0.2]
    assert silences.longest(2) == [0.2, 0.3]
    assert silences.longest(9) == [0.1, 0.2, 0.3]
    assert silences.longest(0) == []
