"""How findings are written: as JSON, as Markdown for a file, as a table on a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from servekit.chaos import command
from servekit.chaos.result import ExperimentResult
from servekit.chaos.run import RunOptions
from servekit.errors import ConfigError, StartError

FINDINGS = [
    ExperimentResult("killed", "SIGKILL", "kept", 90, 88, 1, 2, 0.0123, 1.5, "all well"),
    ExperimentResult("flood", "", "skipped", detail="why not"),
]


def test_each_finding_is_a_row_with_a_dash_for_what_was_not_measured() -> None:
    kept, skipped = map(command.table_cells, FINDINGS)
    assert kept == ["SIGKILL", "90", "88", "1", "2", "12.3 ms", "1.5 s", "kept", "all well"]
    assert skipped == ["flood", "-", "-", "-", "-", "-", "-", "skipped", "why not"]


def test_a_file_gets_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    text = command.format_findings(FINDINGS, as_json=False)
    head, rule, first, second = text.splitlines()
    assert head.startswith("| what was done | sent | answered | failed | wrong text | noticed |")
    assert rule == "|---|---|---|---|---|---|---|---|---|"
    assert first == "| SIGKILL | 90 | 88 | 1 | 2 | 12.3 ms | 1.5 s | kept | all well |"
    assert second.count("|") == 10


def test_a_cell_does_not_break_the_table() -> None:
    assert command._escape_cell("a|b\nc") == "a\\|b c"


def test_json_has_the_fields_by_name() -> None:
    told = json.loads(command.format_findings(FINDINGS, as_json=True))
    assert told[0]["experiment"] == "killed" and told[0]["whole_s"] == 1.5
    assert told[1]["notice_s"] is None


def test_a_terminal_gets_a_table_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    shown = command.format_findings(FINDINGS, as_json=False)
    assert "\x1b[" in shown and "what was done" in shown and "| sent" not in shown


def test_a_wrong_name_is_told_before_the_instance_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment 'x'"):
        command.run_chaos("http://127.0.0.1:1", tmp_path, None, RunOptions(only=["x"]))
    with pytest.raises(StartError, match="no servekit runs"):
        command.run_chaos("http://127.0.0.1:1", tmp_path, None, RunOptions())
