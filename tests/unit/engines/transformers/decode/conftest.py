"""Proposals of tiny models: they never pay, and are made all the same."""

from __future__ import annotations

import pytest

from servekit.engines.transformers.decode import speculative


@pytest.fixture(autouse=True)
def proposals_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speculative.Speculator, "_rates_of", lambda self, rows: speculative.StepRates(1, rest=0)
    )
