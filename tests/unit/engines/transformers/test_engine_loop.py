"""The engine's loop: one bad request harms no one, and who leaves leaves room."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.api.base import Job
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.errors import ContextLengthExceeded, EngineFailed, RequestError
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    assert_alive,
    reference,
)

Make = Callable[..., Harness]


# ---------------------------------------------------------------- what killed the loop


BAD_PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": math.nan, "temperature": 1.0}),
    ("min_p", {"min_p": 2.0}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": None}),
]


@pytest.mark.parametrize(("param", "params"), BAD_PARAMS)
def test_absurd_parameters_are_refused(either: Harness, param: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        either.submit(PROMPTS[0], **params)
    assert caught.value.param == param
    assert_alive(either)


def test_temperature_zero_is_greedy(either: Harness) -> None:
    assert either.generate(PROMPTS[0], temperature=0.0) == either.generate(
        PROMPTS[0], temperature=1e-9, seed=1
    )
    assert_alive(either)


def test_top_k_above_the_vocabulary_keeps_every_token(either: Harness) -> None:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    everything = either.generate(PROMPTS[0], top_k=10**9, **params)
    assert everything == either.generate(PROMPTS[0], top_k=0, **params)
    assert_alive(either)


def test_an_empty_prompt_is_refused(either: Harness) -> None:
    with pytest.raises(RequestError, match="empty"):
        either.submit([])
    assert_alive(either)


@pytest.mark.parametrize("token", [-1, 10**6, 2**70])
def test_a_token_id_out_of_range_is_refused(either: Harness, token: int) -> None:
    with pytest.raises(RequestError, match=str(token)):
        either.submit([1, token, 2])
    with pytest.raises(RequestError, match=str(token)):
        either.submit([1, 2], emitted=[token])
    assert_alive(either)


def test_a_prompt_beyond_the_context_is_refused(either: Harness) -> None:
    with pytest.raises(ContextLengthExceeded, match="600 tokens"):
        either.submit([5] * 600, max_tokens=1)
    with pytest.raises(ContextLengthExceeded):
        either.submit([5] * 512, max_tokens=2)
    assert_alive(either)


def test_prompt_and_completion_beyond_the_context_are_refused(either: Harness) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        either.submit([5] * 500, max_tokens=13)
    assert caught.value.param == "max_tokens"
    assert len(either.generate([5] * 500, max_tokens=12, ignore_eos=True)) == 12
    assert_alive(either)


def test_an_id_in_flight_twice_is_refused(either: Harness) -> None:
    job = Job(10**6, [5, 6], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    either.engine.submit(job)
    with pytest.raises(RequestError, match="in flight"):
        either.engine.submit(job)
    either.engine.cancel(job.id)
    either.engine.submit(job)  # a cancelled id may come again at once
    either.engine.cancel(job.id)
    assert_alive(either)


# ---------------------------------------------------------------- cancelling


def test_cancelling_frees_the_slot_and_says_no_more(harness: Make) -> None:
    one = harness(options={"slots": 1})
    first = one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True)
    second = one.submit(PROMPTS[1], max_tokens=4, ignore_eos=True)
    one.until(lambda: first in one.outputs, "the first job has a token")
    one.engine.cancel(first)
    steps, said = one.count_steps(), len(one.outputs[first])
    assert len(one.tokens(second)) == 4
    assert len(one.outputs[first]) == said
    assert steps() < 50, "the slot was free at once"
    one.until_idle()
    assert one.engine.load_now().running == 0
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    assert not runner._processor.scheduler.active_requests


def test_cancelling_while_waiting_and_before_the_first_step(either: Harness) -> None:
    jobs = [either.submit(PROMPTS[0], max_tokens=300, ignore_eos=True) for _ in range(40)]
    for job in jobs:
        either.engine.cancel(job)
    steps, said = either.count_steps(), {job: len(either.outputs.get(job, [])) for job in jobs}
    assert_alive(either)
    assert {job: len(either.outputs.get(job, [])) for job in jobs} == said
    either.until_idle()
    assert steps() < 250, "not one of them goes on"
    assert either.engine.load_now().progress_age_s == 0


def test_unknown_ids_are_ignored(either: Harness) -> None:
    either.engine.cancel(123456789)
    assert_alive(either)


def test_cancelling_and_submitting_at_random(either: Harness) -> None:
    """Requests come and go from several threads; whoever is not cancelled gets its own text."""
    expected = either.generate(PROMPTS[0], max_tokens=30, ignore_eos=True)
    kept: list[int] = []
    cancelled: list[int] = []
    lock = threading.Lock()

    def visit(number: int) -> None:
        for turn in range(5):
            leaves = (number + turn) % 2
            with lock:
                tokens = 300 if leaves else 30
                job = either.submit(PROMPTS[0], max_tokens=tokens, ignore_eos=True)
            if leaves:
                either.engine.cancel(job)
            (cancelled if leaves else kept).append(job)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [either.tokens(job) for job in kept] == [expected] * len(kept)
    either.until_idle()
    assert not any(either.ended(job) for job in cancelled)


def test_closing_with_work_in_flight_returns(harness: Make) -> None:
    one = harness()
    jobs = [one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True) for _ in range(8)]
    one.until(lambda: jobs[-1] in one.outputs, "all are running")
    one.close()
    with pytest.raises(EngineFailed):
        one.submit(PROMPTS[0])


# ---------------------------------------------------------------- the cache is too small for all


#: Bytes of one cached token of the tiny model: 2 layers, keys and values, 2 heads of 16 floats.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def test_the_cache_caps_the_context(harness: Make) -> None:
    one = harness(options={"kv_cache_bytes": 100 * TOKEN_BYTES, "block_size": 16})
    assert 64 <= one.info.max_context <= 100
    prompt = [5] * (one.info.max_context - 8)
    with pytest.raises(ContextLengthExceeded):
        one.submit(prompt, max_tokens=9)
    assert len(one.generate(prompt, max_tokens=8, ignore_eos=True)) == 8
    assert_alive(one)


@pytest.mark.lane("long")
def test_requests_that_outgrow_the_cache_together_all_end_right(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fit when they are admitted, and not when they end; one is taken out and run again."""
    one = harness(options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16})
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    offloading = runner._processor.offloading_manager
    offload = offloading.offload_requests
    taken_out: list[Any] = []

    def counted() -> Any:
        taken_out.append(offload())
        return taken_out[-1]

    monkeypatch.setattr(offloading, "offload_requests", counted)
    prompts = [f"{number} jumps over the lazy dog" for number in range(4)]
    expected = reference(tiny_model, prompts, 200)
    jobs = [one.submit(prompt, max_tokens=200, ignore_eos=True) for prompt in prompts]
    assert [one.tokens(job) for job in jobs] == expected
    assert any(taken_out)
    assert_alive(one)


def test_cancelling_the_only_runner_lets_those_taken_out_back_in(harness: Make) -> None:
    """The library lifts its block on new requests only when one finishes."""
    one = harness(options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16})
    runner = one.engine._runner
    assert isinstance(runner, ContinuousRunner)
    jobs = [one.submit(f"{n} jumps", max_tokens=250, ignore_eos=True) for n in range(2)]
    scheduler = runner._processor.scheduler
    one.until_true(lambda: scheduler.block_new_requests)
    running = list(scheduler.active_requests)
    assert len(running) == 1
    stays = next(job for job in jobs if not running[0].startswith(f"{job}#"))
    [gone] = [job for job in jobs if job != stays]
    one.engine.cancel(gone)
    left = 250 - sum(len(output.token_ids) for output in one.outputs[stays])
    steps = one.count_steps()
    assert len(one.tokens(stays)) == 250
    assert steps() < left + 20, "it did not wait for the end of the other"


@pytest.mark.parametrize(
    ("seed", "crowd"),
    [(0, 12), *(pytest.param(seed, 60, marks=pytest.mark.lane("fuzz")) for seed in range(3))],
)
def test_a_crowd_in_a_cache_for_one_never_gets_stuck(harness: Make, seed: int, crowd: int) -> None:
    """Shared prefixes, lengths up to the whole cache, and cancellations, all at random."""
    source = random.Random(seed)
    one = harness(
        options={"kv_cache_bytes": 288 * TOKEN_BYTES, "block_size": 16, "max_batch_tokens": 40}
    )
    limit = one.info.max_context
    wanted: dict[int, int] = {}
    for _ in range(crowd):
        prompt = [source.randrange(3, 6)] * source.randrange(1, 150)
        count = source.randrange(1, limit - len(prompt) + 1)
        job = one.submit(prompt, max_tokens=count, ignore_eos=True)
        wanted[job] = count
        if source.random() < 0.4:
            dropped = source.choice(list(wanted))
            one.engine.cancel(dropped)
            del wanted[dropped]
    assert {job: len(one.tokens(job)) for job in wanted} == wanted
    assert_alive(one)


# ---------------------------------------------------------------- when the loop dies all the same


def test_a_dead_loop_says_so_at_once_and_takes_no_more(
    harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    assert one.engine.fatal is None
    jobs = [one.submit(PROMPTS[0], max_tokens=400, ignore_eos=True) for _ in range(3)]
    one.until(lambda: jobs[-1] in one.outputs, "all are running")
    died = threading.Event()
    one.engine.on_death = died.set

    class Panic(BaseException):
        """What pyo3 raises for a panic in Rust is no Exception, either."""

    def broken() -> Any:
        raise Panic("the GPU has fallen off the bus")

    monkeypatch.setattr(one.engine._runner, "step", broken)
    assert died.wait(60)
    assert isinstance(one.engine.fatal, Panic)
    assert not any(one.ended(job) for job in jobs), "they go on in another worker"
    with pytest.raises(EngineFailed):
        one.submit(PROMPTS[0])


def test_a_stall_shows_in_the_age_of_progress(
    harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness()
    assert one.engine.load_now().progress_age_s == 0
    go = threading.Event()
    step = one.engine._runner.step

    def stalled() -> Any:
        go.wait()
        return step()

    monkeypatch.setattr(one.engine._runner, "step", stalled)
    job = one.submit(PROMPTS[0], max_tokens=2, ignore_eos=True)
    first = one.engine.load_now().progress_age_s
    one.until_true(lambda: one.engine.load_now().progress_age_s > first + 0.05)
    go.set()
    one.tokens(job)
    one.until_idle()
    assert one.engine.load_now().progress_age_s == 0
