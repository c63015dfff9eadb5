"""What proposing tokens costs on this machine, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.llamacpp import speculation_setup
from servekit.engines.llamacpp.speculation_setup import estimate_worth
from tests.unit.engines.harness import Harness


@pytest.mark.parametrize(
    ("tokens", "ratio", "worth"),
    [
        (5, 1.0, 128.0),
        (5, 0.9, 128.0),
        (5, 133 / 129, 128.0),
        (5, 2.0, 3.0),
        (5, 3.0, 1.0),
        (5, 5.0, 0.0),
        (5, 9.0, 0.0),
        (1, 1.0, 0.0),
    ],
)
def test_tokens_that_cost_little_more_together_are_worth_the_weights(
    tokens: int, ratio: float, worth: float
) -> None:
    assert estimate_worth(tokens, ratio) == pytest.approx(worth)
    if 0 < worth < 128:  # as the docstring has it
        assert (tokens + worth) / (1 + worth) == pytest.approx(ratio)


def test_a_draft_costs_what_its_pass_takes_of_the_models(
    gguf: Callable[..., Harness], gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def time_passes(context: Any, counts: tuple[int, ...]) -> list[float]:
        asked.append(counts)
        return [0.25] if counts == (1,) else [1.0, 2.0]

    monkeypatch.setattr(speculation_setup, "time_passes", time_passes)
    how = {"method": "draft", "model": str(gguf_file), "tokens": 4}
    engine = gguf({"speculative": how})
    speculator = engine.engine._runner._speculator
    assert asked == [(1, 5), (1,)]
    assert speculator.proposer.cost == 0.25
    assert speculator.worth == estimate_worth(5, 2.0)
    assert "5 take 2.0 × the time of one" in engine.info.detail


def test_ngrams_cost_nothing(gguf: Callable[..., Harness]) -> None:
    engine = gguf({"speculative": {"method": "ngram", "tokens": 3}})
    assert engine.engine._runner._speculator.proposer.cost == 0.0
    assert "4 take " in engine.info.detail


def test_passes_are_timed_and_leave_nothing_in_the_cache(gguf: Callable[..., Harness]) -> None:
    engine = gguf()
    context = engine.engine._loaded.context
    one_s, many_s = speculation_setup.time_passes(context, (1, 6))
    assert 0 < one_s < 10 and 0 < many_s < 10
    assert engine.generate([5, 6, 7], max_tokens=3) == gguf().generate([5, 6, 7], max_tokens=3)
