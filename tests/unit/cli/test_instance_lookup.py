"""Run directories that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli import instance_lookup
from servekit.errors import StartError


def test_no_run_directory_is_told_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no servekit runs in .*servekit up.*--run-dir"):
        instance_lookup.find_run_dir(tmp_path / "none")
