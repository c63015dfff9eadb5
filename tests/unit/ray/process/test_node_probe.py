"""What a node says that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.protocol.control.ray_messages import NodeRequirements
from servekit.ray.process import node_probe
from servekit.ray.process.node_probe import describe_lacks


def test_a_node_says_what_a_model_lacks_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    wants = [
        NodeRequirements("here", "echo", str(tmp_path)),
        NodeRequirements("fetched", "echo", ""),
        NodeRequirements("moved", "echo", gone),
        NodeRequirements("strange", "nobodys", ""),
    ]
    assert describe_lacks(wants) == {
        "moved": f"there is no {gone} there",
        "strange": "the engine nobodys is not installed there",
    }


def test_a_node_says_which_package_an_engine_lacks_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "install_command", lambda kind: "pip install it")
    assert describe_lacks([NodeRequirements("a", "echo", "")]) == {
        "a": "the engine echo is not installed there; pip install it"
    }
