"""Every edit of `python -m tests.mutants` makes a test fail, as a lane."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import try_all
from tests.mutants.edits import read_edits


@pytest.mark.lane("mutants")
@pytest.mark.timeout(3600)
def test_every_edit_of_the_source_is_noticed(tmp_path: Path) -> None:
    results = try_all(read_edits(), tmp_path, jobs=2)
    left = [f"{one.edit.name}: {one.verdict} {one.detail}" for one in results]
    assert not [line for line, one in zip(left, results, strict=True) if one.verdict != "killed"]
