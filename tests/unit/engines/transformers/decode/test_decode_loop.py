"""The decode path says what the library's steps say, token for token, whoever comes and goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines.api.base import StepOutput
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode import decode_loop, slot_steps
from servekit.engines.transformers.decode.batch_slots import TOKEN
from servekit.engines.transformers.decode.graphs import Graphs
from tests.unit.engines.transformers.decode.crowds import (
    UNWATCHED,
    WATCHED,
    Crowd,
    ends,
    row,
    runner,
    texts,
    wish,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the path did what."""
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        plain = getattr(decode_loop.DecodeLoop, name)

        def counting(self: decode_loop.DecodeLoop, *args: Any) -> Any:
            counted[name] += 1
            return plain(self, *args)

        monkeypatch.setattr(decode_loop.DecodeLoop, name, counting)

    for name in ("_start_step", "_step_and_wait", "_run_dry"):
        count(name)
    yield counted


@pytest.fixture(scope="module")
def crowds(tiny_model: Path) -> dict[str, list[StepOutput]]:
    """What the library's own steps say to a crowd."""
    return Crowd.of(1, 16, UNWATCHED, 50).run(runner(tiny_model, None))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_crowd_gets_the_librarys_texts(
    tiny_model: Path, crowds: dict[str, list[StepOutput]], calls: Counter[str], ahead: bool
) -> None:
    engine = runner(tiny_model, wish(ahead=ahead))
    found = Crowd.of(1, 16, UNWATCHED, 50).run(engine)
    assert texts(found) == texts(crowds)
    assert ends(found) == ends(crowds)
    assert {"stop", "length"} <= set(ends(found).values())
    assert calls["_start_step"] > 30
    assert not engine._processor.scheduler.active_requests
    assert engine._decoder is not None and not engine._decoder.seated


def test_what_the_host_must_see_is_the_same_too(tiny_model: Path, calls: Counter[str]) -> None:
    hows = UNWATCHED + WATCHED
    expected = Crowd.of(2, 12, hows, 40).run(runner(tiny_model, None))
    found = Crowd.of(2, 12, hows, 40).run(runner(tiny_model, wish(ahead=True)))
    assert texts(found) == texts(expected)
    assert calls["_step_and_wait"] > 10
    compared = 0
    for key, outputs in found.items():
        said = zip(outputs, expected[key], strict=True)
        for mine, theirs in said:
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                compared += 1
    assert compared > 10


@pytest.mark.lane("long")
def test_a_cache_that_runs_full_changes_no_text(tiny_model: Path, calls: Counter[str]) -> None:
    """Each may grow far beyond what it was admitted for: the library has to take some out."""

    def crowd() -> Crowd:
        hows = [{"temperature": 0.0}, {"temperature": 0.9}]
        rows = [row(f"r{i}", list(range(20 + i, 40 + i)), 200, i, **hows[i % 2]) for i in range(3)]
        for one in rows:
            one.eos = frozenset()
        return Crowd([(0, one) for one in rows])

    expected = crowd().run(runner(tiny_model, None))
    found = crowd().run(runner(tiny_model, wish(ahead=True), blocks=24))
    assert calls["_run_dry"] > 0
    assert texts(found) == texts(expected)
    assert all(len(text) == 200 for text in texts(found).values())


def test_who_leaves_is_not_heard_again_and_frees_its_blocks(
    tiny_model: Path, crowds: dict[str, list[StepOutput]]
) -> None:
    expected = texts(crowds)
    crowd = Crowd.of(1, 16, UNWATCHED, 50)
    crowd.leaving = {key: 4 for key in expected if len(expected[key]) > 12}
    assert len(crowd.leaving) > 2
    engine = runner(tiny_model, wish(ahead=True))
    found = texts(crowd.run(engine))
    for key, text in found.items():
        assert text == expected[key][: crowd.leaving.get(key)]
    assert not engine._processor.scheduler.active_requests
    cache = engine._processor.cache
    by_kind = getattr(cache, "cache_allocators", None)  # transformers before 5.20 has a list
    for allocator in cache.group_cache_managers if by_kind is None else by_kind.values():
        assert not allocator.block_table


def test_prefixes_are_shared_with_those_that_decode(tiny_model: Path) -> None:
    prompt = list(range(50, 90))
    engine = runner(tiny_model, wish(ahead=True))
    first = row("first", prompt, 40)
    first.eos = frozenset()
    Crowd([(0, first)]).run(engine)
    again = prompt + first.completion[:-1]
    whole, fresh = row("second", again, 3), row("third", again, 3)
    Crowd([(0, whole)]).run(engine)
    assert whole.cached_tokens is not None
    assert whole.cached_tokens > len(prompt)  # what was decoded is found, too
    Crowd([(0, fresh)]).run(runner(tiny_model, None))
    assert whole.completion == fresh.completion
    assert whole.completion[0] == first.completion[-1]


def test_a_seat_that_was_left_touches_no_page(tiny_model: Path) -> None:
    """Its pages are another's by then."""
    engine = runner(tiny_model, wish(ahead=True))
    short, long = row("short", [9] * 20, 3), row("long", [11] * 20, 30)
    short.eos = long.eos = frozenset()
    Crowd([(0, short), (0, long)]).run(engine)
    decoder = engine._decoder
    assert decoder is not None
    decoder._slots.upload()
    assert bool((decoder._slots.table == decoder.pages.trash).all())
    assert int(decoder._slots.ints[:, TOKEN:].abs().sum()) == 0


def test_sizes_of_batches_are_few() -> None:
    assert [slot_steps.bucket_size(seated, 48) for seated in (1, 2, 3, 5, 32, 33, 48)] == [
        *(1, 2, 4, 8, 32, 48, 48)
    ]


def test_all_that_a_crowd_needs_is_recorded_ahead(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is recorded, but the steps run: with empty slots, they change no text."""
    keys: list[Any] = []

    def noting(
        self: Graphs, key: Any, work: Callable[[], None], changed: torch.Tensor, generation: int
    ) -> None:
        assert generation == 0
        keys.append(key)
        work()

    def say(engine: ContinuousRunner) -> list[Any]:
        return [texts(Crowd.of(2, 12, hows, 40).run(engine)) for hows in (UNWATCHED, WATCHED)]

    expected = say(runner(tiny_model, wish(ahead=True)))
    monkeypatch.setattr(Graphs, "run_graph", noting)
    engine = runner(tiny_model, wish(ahead=True))
    assert engine._decoder is not None
    engine._decoder._steps.graphs.on = True  # their sizes
    with torch.no_grad():
        engine._decoder.record_graphs()
    recorded = list(keys)
    keys.clear()
    assert [size for size, _ in recorded] == [16] * 5 + [8] * 5 + [4] * 5 + [2] * 5 + [1] * 5
    assert say(engine) == expected
    assert len(set(keys)) > 5
    assert set(keys) <= set(recorded)


def test_a_warm_up_reads_full_steps_and_leaves_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts(Crowd.of(2, 12, UNWATCHED, 40).run(runner(tiny_model, wish(ahead=True))))
    engine = runner(tiny_model, wish(ahead=True))
    sizes: list[int] = []
    step = engine._step_of_library

    def failing() -> list[Any]:
        sizes.append(sum(len(row.job.prompt_ids) for row in engine._rows.values()))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError
        return step()

    monkeypatch.setattr(engine, "_step_of_library", failing)
    engine.warm_up(512)
    assert max(sizes) == engine.plan.batch_tokens
    assert len(set(sizes)) > 2
    assert (engine.running, engine.waiting, engine.kv_used) == (0, 0, 0.0)
    monkeypatch.undo()
    assert texts(Crowd.of(2, 12, UNWATCHED, 40).run(engine)) == expected


def test_pages_can_be_dropped_and_made_again(tiny_model: Path) -> None:
    engine = runner(tiny_model, wish(ahead=True))
    before = texts(Crowd.of(4, 4, UNWATCHED, 20).run(engine))
    engine.drop_pages()
    assert engine._decoder is None
    engine.make_pages()
    assert texts(Crowd.of(4, 4, UNWATCHED, 20).run(engine)) == before
    assert engine.decodes == "no CUDA graphs, reference attention"
    assert torch.is_tensor(engine._decoder._steps.chosen) if engine._decoder else False
