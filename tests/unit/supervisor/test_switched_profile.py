"""The profile of a start after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.supervisor.process.run_dir import PROFILE, find_switched_profile


@pytest.mark.parametrize(
    ("written", "profile"),
    [
        ('["coding", "writing"]', "writing"),  # a crash of what was started alike
        ('["", "writing"]', "coding"),  # this command line asks for another profile
        ('["coding", ""]', ""),  # it was switched to all models
        ('["coding"', "coding"),
        ("7", "coding"),
        ("[1, 2, 3]", "coding"),
    ],
)
def test_a_switch_outlives_a_crash(tmp_path: Path, written: str, profile: str) -> None:
    assert find_switched_profile(tmp_path, {}, "coding") == "coding"
    (tmp_path / PROFILE).write_text(written)
    assert find_switched_profile(tmp_path, {}, "coding") == profile
