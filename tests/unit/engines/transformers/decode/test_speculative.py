"""Proposed tokens change how fast a text comes, and no token of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.api.speculation import (
    NgramProposer,
    Proposer,
    Speculation,
    Speculator,
    Wanted,
)
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode.batch_slots import POSITION, BatchSlots
from servekit.engines.transformers.decode.speculation_setup import WEIGHTS_WORTH
from servekit.engines.transformers.request_row import Row
from tests.unit.engines.transformers.decode.crowds import (
    BLOCK,
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

ALWAYS = 1e9  # verification costs nothing, so that all that is found is proposed


class Seer(Proposer[Row]):
    """A proposer that knows what will be said, and is wrong with some of it."""

    def __init__(self, known: dict[str, list[int]], wrong: float, seed: int = 7) -> None:
        self._known, self._wrong, self._made = known, wrong, random.Random(seed)
        self.forgotten: Counter[str] = Counter()

    def propose(self, wanted: Wanted[Row]) -> dict[str, list[int]]:
        found = {}
        for key, (one, most) in wanted.items():
            at = one.position
            right = self._known[key][at : at + self._made.randint(0, most)]
            said = [8 if self._made.random() < self._wrong else token for token in right]
            said += [9] * self._made.randint(0, most - len(said))  # beyond the end, perhaps
            if said:
                found[key] = said
        return found

    def forget(self, key: str) -> None:
        self.forgotten[key] += 1


def speculating(
    folder: Path, proposer: Any, tokens: int = 6, *, ahead: bool = True, blocks: int = 200
) -> tuple[ContinuousRunner, Speculator]:
    known = Speculation("ngram", tokens=tokens)
    speculator = Speculator(proposer or NgramProposer(known), known, ALWAYS)
    options = wish(ahead=ahead)._replace(speculator=speculator)
    return runner(folder, options, blocks=blocks), speculator


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_a_crowd_of_all_sorts_gets_the_same_texts(
    tiny_model: Path, ahead: bool, wrong: float
) -> None:
    hows = UNWATCHED + WATCHED if ahead else UNWATCHED
    expected = Crowd.of(2, 14, hows, 60).run(runner(tiny_model, None))
    seer = Seer(texts(expected), wrong)
    engine, speculator = speculating(tiny_model, seer, ahead=ahead)
    found = Crowd.of(2, 14, hows, 60).run(engine)
    assert texts(found) == texts(expected)
    assert ends(found) == ends(expected)
    for key, outputs in found.items():
        mine = [one for output in outputs for one in output.logprobs or ()]
        theirs = [one for output in expected[key] for one in output.logprobs or ()]
        for one, other in zip(mine, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    counts = speculator.counts
    assert counts.drafts > 20
    if wrong == 0.0:  # the rest was proposed beyond the ends of texts
        assert counts.accepted_tokens > 0.5 * counts.draft_tokens
        several = [out for said in found.values() for out in said if len(out.token_ids) > 2]
        assert len(several) > 20
    if wrong == 1.0:
        assert counts.accepted_tokens <= 0.05 * counts.draft_tokens
    assert not engine._processor.scheduler.active_requests
    assert engine._decoder is not None
    assert not engine._decoder.seated
    assert set(seer.forgotten) == set(expected)
    assert not speculator._chances
    engine._decoder._slots.upload()
    assert bool((engine._decoder._slots.table == engine._decoder.pages.trash).all())


def test_a_full_cache_changes_no_text(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are wanted for proposals when there are none left, and rows are taken out."""

    def crowd() -> Crowd:
        hows = [{"temperature": 0.0}, {"temperature": 0.9}]
        rows = [row(f"r{i}", list(range(20 + i, 40 + i)), 200, i, **hows[i % 2]) for i in range(3)]
        for one in rows:
            one.eos = frozenset()
        return Crowd([(0, one) for one in rows])

    expected = crowd().run(runner(tiny_model, None))
    engine, speculator = speculating(tiny_model, Seer(texts(expected), 0.1), 20, blocks=20)
    ran_dry: list[int] = []
    decoder: Any = engine._decoder
    run_dry = decoder._run_dry

    def running_dry() -> Any:
        ran_dry.append(1)
        return run_dry()

    monkeypatch.setattr(decoder, "_run_dry", running_dry)
    found = crowd().run(engine)
    assert texts(found) == texts(expected)
    assert ran_dry
    assert speculator.counts.accepted_tokens > 100


def test_pages_of_proposals_are_shared_only_if_accepted(tiny_model: Path) -> None:
    """A block is known by its tokens: those of a proposal that was rejected must not be in it."""
    prompt = list(range(50, 50 + BLOCK - 2))  # the first proposal crosses a page
    first = row("first", prompt, 60)
    first.eos = frozenset()
    expected = Crowd([(0, first)]).run(runner(tiny_model, None))
    engine, _ = speculating(tiny_model, Seer(texts(expected), 0.4))
    again = row("first", prompt, 60)
    again.eos = frozenset()
    assert texts(Crowd([(0, again)]).run(engine)) == texts(expected)
    longer = prompt + first.completion[:-1]
    reused, fresh = row("second", longer, 20), row("second", longer, 20)
    reused.eos = fresh.eos = frozenset()
    Crowd([(0, fresh)]).run(runner(tiny_model, None))
    engine._decoder._speculator.proposer = Seer({"second": fresh.completion}, 0.2)  # type: ignore
    Crowd([(0, reused)]).run(engine)
    assert reused.cached_tokens is not None
    assert reused.cached_tokens >= len(longer) - BLOCK
    assert reused.completion == fresh.completion


def test_who_leaves_in_the_midst_frees_everything(tiny_model: Path) -> None:
    expected = texts(Crowd.of(1, 16, UNWATCHED, 50).run(runner(tiny_model, None)))
    engine, speculator = speculating(tiny_model, Seer(expected, 0.2))
    crowd = Crowd.of(1, 16, UNWATCHED, 50)
    crowd.leaving = {key: 2 for key in expected if len(expected[key]) > 20}
    assert len(crowd.leaving) > 2
    for key, text in texts(crowd.run(engine)).items():
        assert text == expected[key][: len(text)]
        assert text == expected[key] or key in crowd.leaving
    assert not speculator._chances
    cache = engine._processor.cache
    by_kind = getattr(cache, "cache_allocators", None)  # transformers before 5.20 has a list
    for allocator in cache.group_cache_managers if by_kind is None else by_kind.values():
        assert not allocator.block_table


def test_the_context_ends_inside_a_proposal(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many tokens as there is room for, none is read beyond the model's context."""
    prompt = [100 + at % 200 for at in range(480)]
    one = row("r", prompt, 512 - 480)
    one.eos = frozenset()
    expected = Crowd([(0, one)]).run(runner(tiny_model, None))
    engine, _ = speculating(tiny_model, Seer(texts(expected), 0.0), 16)
    positions: list[int] = []
    lend = BatchSlots.lend

    def lending(slots: BatchSlots, proposals: Any, size: int) -> list[int]:
        spans = lend(slots, proposals, size)
        positions.append(int(slots.ints[:size, POSITION].max()))
        return spans

    monkeypatch.setattr(BatchSlots, "lend", lending)
    again = row("r", prompt, 512 - 480)
    again.eos = frozenset()
    assert texts(Crowd([(0, again)]).run(engine)) == texts(expected)
    assert positions
    assert max(positions) < 511  # the last token is not read


def test_draws_are_of_the_models_distribution(tiny_model: Path) -> None:
    """Chi-square over the first tokens, with a likely second and third one proposed."""
    prompt, how, draws = [20, 30, 40], {"temperature": 0.8, "top_k": 3}, 600
    plain = runner(tiny_model, None)

    def distribution(tokens: tuple[int, ...]) -> dict[int, float]:
        (logits,) = plain.logits_of([row(f"p{tokens}", [*prompt, *tokens], 1)]).values()
        values, ids = (logits[0] / 0.8).topk(3)
        return dict(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*tokens, token): p * q
            for tokens, p in expected.items()
            for token, q in distribution(tokens).items()
        }
    likely = max(expected, key=lambda tokens: expected[tokens])
    engine, speculator = speculating(tiny_model, None)
    rows = [row(f"d{seed}", prompt, 4, seed, **how) for seed in range(draws)]
    for one in rows:
        one.eos = frozenset()
    speculator.proposer = Seer({one.key: list(likely) for one in rows}, 0.0)
    Crowd([(3 * (at // 3), one) for at, one in enumerate(rows)]).run(engine)
    seen = Counter(tuple(one.completion[:3]) for one in rows)
    assert set(seen) <= set(expected)
    often = {found: draws * p for found, p in expected.items() if draws * p > 5}
    chi = sum((seen[found] - count) ** 2 / count for found, count in often.items())
    rare = draws - sum(often.values())
    chi += (draws - sum(seen[found] for found in often) - rare) ** 2 / rare
    assert len(often) > 12
    assert chi < len(often) + 3.1 * math.sqrt(2 * len(often)) + 6  # by chance 1 in 1000 runs
    assert 100 < speculator.counts.accepted_tokens < speculator.counts.draft_tokens


def test_ngrams_find_what_repeats(tiny_model: Path) -> None:
    """A bias that makes the text go in circles."""
    how: dict[str, Any] = {"logit_bias": tuple((token, 100.0) for token in (11, 12, 13))}
    rows = [row("r", list(range(60, 90)), 80, **how) for _ in range(2)]
    for one in rows:
        one.eos = frozenset()
    Crowd([(0, rows[0])]).run(runner(tiny_model, None))
    engine, speculator = speculating(tiny_model, None)
    said = Crowd([(0, rows[1])]).run(engine)
    assert rows[1].completion == rows[0].completion
    assert speculator.counts.accepted_tokens > 30
    assert len(said["r"]) < 50


def test_rejected_proposals_stop_and_are_tried_again(tiny_model: Path) -> None:
    """Of a text that repeats nothing, few tokens are verified in vain."""
    known = Speculation("ngram", tokens=4)
    one = row("r", [20, 30], 200)
    one.eos = frozenset()
    expected = Crowd([(0, replace(one, completion=[]))]).run(runner(tiny_model, None))
    speculator = Speculator(Seer({"r": [8] * 200}, 1.0), known, WEIGHTS_WORTH["cpu"])
    options = wish(ahead=True)._replace(speculator=speculator)
    found = Crowd([(0, one)]).run(runner(tiny_model, options))
    assert texts(found) == texts(expected)
    assert 10 < speculator.counts.draft_tokens < 100
    assert math.isclose(speculator.counts.accepted_tokens, 0, abs_tol=3)
