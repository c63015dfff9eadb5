"""Proposals of tiny models: they never pay, and are made all the same."""

from __future__ import annotations

import pytest

from servekit.engines.api import speculation


@pytest.fixture(autouse=True)
def proposals_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speculation.Speculator, "_rates_of", lambda self, rows: speculation.StepRates(1, rest=0)
    )
