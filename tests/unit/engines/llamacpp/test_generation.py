"""What the runner of llama.cpp tells others of its steps."""

from __future__ import annotations

from collections.abc import Callable

from servekit.engines.api.speculation import StepRates
from tests.unit.engines.harness import Harness

NGRAM = {"speculative": {"method": "ngram", "tokens": 6, "ngram_min": 1}}


def test_steps_without_proposals_are_measured_before_any_is_tried(
    gguf: Callable[..., Harness],
) -> None:
    engine = gguf(NGRAM)
    tokens = engine.generate([5, 6, 7], max_tokens=40, ignore_eos=True)
    rates: StepRates = engine.engine._runner._speculator._rates_of(1)
    assert len(tokens) == 40
    # those that were tried may rest by now: the machine was busy meanwhile
    assert rates.tried or rates.rest < StepRates(1).rest, "else none would ever be tried"
    assert 0 < rates.made <= 40 and rates.took_s > 0
