"""What a node says that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cluster import look
from servekit.cluster.look import _lacks
from servekit.wire.cluster import Want


def test_a_node_says_what_a_model_lacks_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    wants = [
        Want("here", "echo", str(tmp_path)),
        Want("fetched", "echo", ""),
        Want("moved", "echo", gone),
        Want("strange", "nobodys", ""),
    ]
    assert _lacks(wants) == {
        "moved": f"there is no {gone} there",
        "strange": "the engine nobodys is not installed there",
    }


def test_a_node_says_which_package_an_engine_lacks_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "lacking", lambda kind: "pip install it")
    assert _lacks([Want("a", "echo", "")]) == {
        "a": "the engine echo is not installed there; pip install it"
    }
