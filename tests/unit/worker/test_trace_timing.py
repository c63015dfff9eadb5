"""The times of traced jobs."""

from __future__ import annotations

from pathlib import Path

from servekit.protocol.messages import Delta
from servekit.worker.output_state import Stopwatch
from tests.unit.worker.serving import serving, spec


def test_the_last_delta_tells_four_times_in_order() -> None:
    watch = Stopwatch()
    watch.accept(7)
    watch.note_submit(7)
    assert watch.runs
    assert not watch.stamp(7, Delta(1, "a", [1])).times_ns
    assert not watch.stamp(7, Delta(1, "b", [2])).times_ns
    told = watch.stamp(7, Delta(1, "", [], "stop"))
    assert len(told.times_ns) == 4
    assert list(told.times_ns) == sorted(told.times_ns)
    watch.drop_times(7)
    assert not watch.runs


def test_of_others_nothing_is_noted() -> None:
    watch = Stopwatch()
    watch.note_submit(1)
    watch.drop_times(1)
    last = Delta(1, "", [], "stop")
    assert watch.stamp(1, last) is last
    assert not watch.runs


def test_what_never_reached_the_engine_tells_no_times() -> None:
    watch = Stopwatch()
    watch.accept(7)
    assert not watch.stamp(7, Delta(1, "", [], "length")).times_ns


async def test_a_request_that_needs_no_engine_leaves_no_times(tmp_path: Path) -> None:
    async with serving(spec(tmp_path)) as client:
        await client.answer(client.send(task="tokenize", prompt="hello", trace="00-1-2-01"))
        assert not client.runner._stopwatch.runs
