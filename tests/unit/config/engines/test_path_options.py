"""Options of an engine that are paths: which they are, and where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from servekit.config.base_model import Section
from servekit.config.engines.path_options import (
    ConfigPath,
    list_paths,
    path_options,
    resolve_options,
)


class Options(Section):
    words: ConfigPath
    voice: ConfigPath | None = None
    more: tuple[ConfigPath, ...] = ()
    table: ConfigPath = "table.txt"
    made: ConfigPath | None = Field(default_factory=lambda: "made.txt")
    name: str = "no path"
    count: int = 3


def test_paths_are_known_by_their_type_wherever_it_stands() -> None:
    assert path_options(Options) == ("words", "voice", "more", "table", "made")


def test_written_paths_and_those_of_the_defaults_are_listed_with_their_places() -> None:
    written = {"words": "a", "more": ["b", "c"], "name": "d", "made": None}
    assert list(list_paths(Options, written)) == [
        (("words",), "a"),
        (("more", 0), "b"),
        (("more", 1), "c"),
        (("table",), "table.txt"),
    ]


def test_what_is_no_text_is_left_to_the_schema() -> None:
    written = {"words": 5, "more": ["b", 6], "voice": {"a": "b"}, "table": None, "made": "m"}
    assert list(list_paths(Options, written)) == [(("more", 0), "b"), (("made",), "m")]


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    written = {"words": "a", "more": ["../b", "/c"], "voice": "~/d", "name": "e"}
    assert resolve_options(Options, written, tmp_path / "conf") == {
        "words": str(tmp_path / "conf" / "a"),
        "more": [str(tmp_path / "b"), "/c"],
        "voice": "/home/ann/d",
        "name": "e",
        "table": str(tmp_path / "conf" / "table.txt"),
        "made": str(tmp_path / "conf" / "made.txt"),
    }
    assert written == {"words": "a", "more": ["../b", "/c"], "voice": "~/d", "name": "e"}
