"""Proposals of tiny models: they never pay, and are made all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from servekit.engines.api import speculation


@pytest.fixture(autouse=True)
def proposals_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        speculation.Speculator, "_rates_of", lambda self, rows: speculation.StepRates(1, rest=0)
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
