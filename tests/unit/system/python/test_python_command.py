"""Commands that start a Python interpreter, in the source folder and elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import servekit
from servekit.system.python.python_command import module_command

SOURCE = Path(servekit.__file__).resolve().parents[1]


def test_the_source_folder_stays_on_the_path_where_it_is_all_that_has_servekit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(SOURCE)
    asked = [*module_command("servekit"), "--help"]
    assert "-P" not in asked
    assert asked[:3] == [sys.executable, "-m", "servekit"]


def test_a_users_file_with_the_name_of_a_module_breaks_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    command = module_command("json.tool")  # it imports argparse
    assert command == (sys.executable, "-P", "-m", "json.tool")
    assert "usage" in _run_help(command)
    assert "a file of the user" in _run_help([part for part in command if part != "-P"])


def test_children_start_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    command = module_command("json.tool")
    assert command == (sys.executable, "-P", "-m", "json.tool")
    assert "usage" in _run_help(command)


def _run_help(command: Sequence[str]) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_another_interpreter_never_has_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(SOURCE)
    assert module_command("servekit.worker", "/opt/vllm/bin/python") == (
        "/opt/vllm/bin/python", "-P", "-m", "servekit.worker",
    )  # fmt: skip
