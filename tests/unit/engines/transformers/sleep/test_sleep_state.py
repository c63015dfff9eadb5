"""Asleep and awake again: the same text, whatever runs the model and whatever is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers.sleep.sleep_state import SleepState
from servekit.errors import EngineFailed, LoadError
from tests.unit.engines.harness import PROMPTS, Harness
from tests.unit.engines.transformers.pooling_models.test_embedding import (
    TEXTS,
    bert,
    submit,
)

Make = Callable[..., Harness]


def said(one: Harness, **params: Any) -> list[list[int]]:
    jobs = [one.submit(prompt, max_tokens=20, ignore_eos=True, **params) for prompt in PROMPTS]
    return [one.tokens(job) for job in jobs]


@pytest.mark.lane("long")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_it_says_the_same(harness: Make, dtype: str, batching: str) -> None:
    one = harness(dtype=dtype, options={"batching": batching, "kv_cache_bytes": 2**22})
    before = said(one)
    assert one.info.sleeps
    for _ in range(2):
        one.engine.sleep()
        one.engine.sleep()
        assert one.engine.load_now().kv_used == 0
        one.engine.wake()
        one.engine.wake()
        assert said(one) == before


def test_the_cache_is_given_back(harness: Make) -> None:
    one = harness(options={"kv_cache_bytes": 2**22})
    runner: Any = one.engine._runner
    assert runner._processor is not None
    one.engine.sleep()
    assert runner._processor is None
    one.engine.wake()
    assert runner._processor is not None


def test_embeddings_are_the_same(harness: Make, tmp_path: Path) -> None:
    one = harness(bert(tmp_path))
    before = one.vectors(submit(one, TEXTS))
    one.engine.sleep()
    one.engine.wake()
    assert one.vectors(submit(one, TEXTS)) == before


@pytest.mark.lane("long")
def test_it_does_not_fall_asleep_over_a_request(harness: Make) -> None:
    one = harness()
    job = one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True)
    one.until(lambda: job in one.outputs, "it speaks")
    with pytest.raises(LoadError, match="Requests are under way"):
        one.engine.sleep()
    assert len(one.tokens(job)) == 400


def test_asleep_it_takes_no_requests(harness: Make) -> None:
    one = harness()
    one.engine.sleep()
    with pytest.raises(EngineFailed, match="asleep"):
        one.submit(PROMPTS[0])
    one.engine.wake()
    assert len(one.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)) == 3


class Body:
    """A runner and a bed, whose next calls fail as told."""

    running = waiting = 0

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.done.append(name)
            if (error := self.failing.pop(name, None)) is not None:
                raise error

        return call


def lying(**failing: Exception) -> tuple[SleepState, Body]:
    body: Any = Body()
    body.failing = failing
    return SleepState(body, body, None), body


def test_without_room_on_the_host_it_stays_awake() -> None:
    rest, body = lying(sleep=LoadError("no room", permanent=False))
    with pytest.raises(LoadError, match="no room"):
        rest.sleep()
    assert not rest.asleep
    assert body.done == ["drop_pages", "sleep", "make_pages"]


def test_without_room_for_its_weights_it_sleeps_on() -> None:
    rest, _ = lying(wake=LoadError("no room", permanent=False))
    rest.sleep()
    with pytest.raises(LoadError):
        rest.wake()
    assert rest.asleep
    rest.wake()
    assert not rest.asleep


def test_without_room_for_its_cache_it_lies_down_again() -> None:
    rest, body = lying()
    rest.sleep()
    body.failing = {"make_pages": MemoryError("no room for the cache\nmore")}
    with pytest.raises(LoadError, match="no room for the cache") as caught:
        rest.wake()
    assert not caught.value.permanent
    assert rest.asleep
    assert body.done[-3:] == ["wake", "make_pages", "sleep"]
