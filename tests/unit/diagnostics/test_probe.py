"""The child that imports a library: one line of JSON, whatever the library does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.diagnostics import probe


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("__version__ = 7\nprint('noise')", {"version": "7", "error": ""}),
        ("", {"version": "", "error": ""}),
        ("raise ValueError('odd')", {"version": "", "error": "ValueError: odd"}),
        ("import sys; sys.exit(3)", {"version": "", "error": "SystemExit: 3"}),
        ("import atexit; atexit.register(print, 'late')", {"version": "", "error": ""}),
    ],
)
def test_only_the_line_of_json_is_on_stdout(
    tmp_path: Path, code: str, said: dict[str, str]
) -> None:
    (tmp_path / "library.py").write_text(code)
    command = [sys.executable, probe.__file__, "library"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [said]
    assert "late" not in done.stderr


def make_torch(cuda: str | None, *uuids: str, error: str = "") -> Any:
    """A library with the parts of torch that are asked."""

    def init() -> None:
        if error:
            raise RuntimeError(error)

    def describe(index: int) -> Any:
        return SimpleNamespace(uuid=uuids[index])

    asked = SimpleNamespace(
        init=init, device_count=lambda: len(uuids), get_device_properties=describe
    )
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda), cuda=asked, zeros=lambda *size, device: None
    )


def test_a_build_for_cpus_is_asked_for_no_gpus() -> None:
    torch = make_torch(None, error="not asked")
    assert probe._probe_torch(torch) == {"cuda": None, "gpus": [], "reason": ""}


def test_gpus_are_named_or_the_first_line_of_the_reason_is() -> None:
    found = probe._probe_torch(make_torch("13.0", "aa-01", "bb-02"))
    assert found == {"cuda": "13.0", "gpus": ["aa-01", "bb-02"], "reason": ""}
    found = probe._probe_torch(make_torch("13.0", "aa-01", error="no driver\nadvice"))
    assert found == {"cuda": "13.0", "gpus": [], "reason": "no driver"}
