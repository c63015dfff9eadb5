"""The pictures. They are real files that real readers open."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from servekit.bench.output.plot import check_plot, draw_plot
from servekit.errors import ConfigError, StartError
from tests.unit.bench.results import result


@pytest.mark.parametrize("name", ["a.jpg", "a", "png"])
def test_only_what_can_be_drawn(name: str) -> None:
    with pytest.raises(ConfigError, match=r"FILE\.png or FILE\.html"):
        check_plot(Path(name))


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_plot(Path("a.png"))


@pytest.mark.parametrize(("loads", "stream"), [(1, False), (3, True)])
def test_a_png(tmp_path: Path, loads: int, stream: bool) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    check_plot(path)
    draw_plot(result(loads, stream=stream), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > height > 600


def test_a_page_of_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.html"
    draw_plot(result(2), path)
    text = path.read_text()
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "&lt;m&gt;: chat" in text and "<m>" not in text.replace("&lt;m&gt;", "")
    assert "src=" not in text and "<script" not in text and "@import" not in text


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(StartError, match="--plot"):
        draw_plot(result(1), tmp_path / "none" / "a.png")
