"""Spans of time, and directories that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli import instance_lookup
from servekit.errors import ConfigError, StartError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 D ", 172_800), ("5min", 300)],
)
def test_spans(text: str, seconds: float) -> None:
    assert instance_lookup.span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1w", "1h30", "٣m\n"])
def test_what_is_no_span_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="90s, 10m, 2h or 1d"):
        instance_lookup.span_s(text)


def test_no_run_directory_is_told_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no servekit runs in .*servekit up.*--run-dir"):
        instance_lookup.folder(tmp_path / "none")
