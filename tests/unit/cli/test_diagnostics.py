"""`servekit doctor` and `trace-cuda`: the file that is checked, the output, the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from servekit.cli import diagnostics
from servekit.diagnostics import runner
from servekit.diagnostics.finding import Finding
from tests.unit.cli.instance import invoke

OK = Finding("disk", "ok", "much room")
WARNING = Finding("port", "warning", "odd")
ERROR = Finding("gpus", "error", "none")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SERVEKIT_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_file_that_up_would_serve_is_checked_if_there_is_one(tmp_path: Path) -> None:
    assert diagnostics._find_default() is None
    (tmp_path / "servekit.yaml").touch()
    assert diagnostics._find_default() == Path("servekit.yaml")


@pytest.mark.parametrize(
    ("found", "code"), [([OK], 0), ([OK, WARNING], 0), ([WARNING, ERROR, OK], 1), ([], 0)]
)
def test_errors_alone_make_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: list[Finding], code: int
) -> None:
    asked: list[object] = []

    def run_checks(file: Path | None, run_dir: Path | None) -> list[Finding]:
        asked.append((file, run_dir))
        return found

    monkeypatch.setattr(runner, "run_checks", run_checks)
    done = invoke("doctor", "-c", "other.yaml", run_dir=tmp_path)
    assert done.exit_code == code
    assert done.stdout == runner.format_findings(found, as_json=False) + "\n"
    as_json = invoke("doctor", "--json")
    assert [one["said"] for one in json.loads(as_json.stdout)] == [one.said for one in found]
    assert asked == [(Path("other.yaml"), tmp_path), (None, None)]


def test_a_program_is_traced_and_its_exit_code_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit(3)")
    done = invoke("trace-cuda", "--", sys.executable, str(tmp_path / "program.py"))
    assert done.exit_code == 3
    assert done.stderr, "what was found is told beside the program's own output"


def test_nothing_to_trace_is_said() -> None:
    done = invoke("trace-cuda")
    assert done.exit_code == 2
    assert "trace-cuda" in done.stderr
