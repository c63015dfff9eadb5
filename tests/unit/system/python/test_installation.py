"""The package that is installed, and files that were replaced under a running process."""

from __future__ import annotations

from pathlib import Path

import pytest

import servekit
from servekit.system.python import installation
from servekit.system.python.installation import PROTOCOL_VARIABLE, UPGRADED


def test_an_upgrade_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not installation.was_upgraded()
    monkeypatch.setattr(servekit, "__file__", str(tmp_path / "other.py"))
    assert installation.was_upgraded(), "between the old files and the new ones"
    (tmp_path / "other.py").write_text("")
    assert installation.was_upgraded()


def test_a_child_of_another_protocol_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    installation.require_protocol(3)
    monkeypatch.setenv(PROTOCOL_VARIABLE, "3")
    installation.require_protocol(3)
    with pytest.raises(SystemExit, match=f"it speaks protocol 4, and its supervisor 3. {UPGRADED}"):
        installation.require_protocol(4)


def install_slim(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `servekit-slim` be among the installed packages."""
    metadata = folder / "servekit_slim-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: servekit-slim\nVersion: 0.1.0\n"
    )
    monkeypatch.syspath_prepend(folder)


def test_extras_are_those_of_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installation.make_pip_command("otel") == "pip install 'servekit[otel]'"
    install_slim(tmp_path, monkeypatch)
    assert installation.make_pip_command("otel") == "pip install 'servekit-slim[otel]'"
