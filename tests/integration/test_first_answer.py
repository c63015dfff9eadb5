"""A new user's path: from nothing to an answer of the demo's model in three commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.first_answer import walk


@pytest.mark.lane("models")
@pytest.mark.timeout(300)
def test_three_commands_to_the_first_answer(tmp_path: Path) -> None:
    """The log is JSON, each line of it, or `walk` would fail."""
    steps = walk(tmp_path, "demo")
    assert [step.command.split("servekit ")[1].split()[0] for step in steps] == [
        *("init", "up", "chat"),
    ]
    assert "Paris" in steps[-1].said
    assert "servekit up --config servekit.yaml" in steps[0].said  # which tells what is next
