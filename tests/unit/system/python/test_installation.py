"""Files of servekit that were replaced under a running process."""

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
