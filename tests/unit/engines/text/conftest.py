"""What tests of grammars need on a machine that is busy with others."""

from __future__ import annotations

import pytest

from servekit.engines.text import grammar_trial


@pytest.fixture(autouse=True)
def trials_get_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a trial its CPU time however busy the machine: it would stand behind all else."""
    monkeypatch.setattr(grammar_trial, "NICE", 0)
    monkeypatch.setattr(grammar_trial, "PATIENCE_S", 300.0)
