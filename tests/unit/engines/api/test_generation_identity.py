"""What tells two loads of a model apart: the content of its path, and of its options' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.engines import create_engine
from servekit.engines.api.base import Engine
from tests.unit.engines.contract.subjects import spec


@pytest.mark.parametrize("portable", [False, True])
def test_each_file_of_an_option_is_part_of_the_identity(tmp_path: Path, portable: bool) -> None:
    """Also of an engine without a path."""
    words, folder = tmp_path / "words.txt", tmp_path / "folder"
    folder.mkdir()
    files = [str(words), str(folder)]

    def identity(path: str = "") -> str:
        engine = create_engine(spec("echo", path, files=tuple(files)))
        return Engine.identify(engine, portable=portable)  # echo's own ignores its files

    words.write_text("one")
    (folder / "a").write_text("a")
    seen = [identity()]
    assert seen[0] and seen[0] == identity()
    words.write_text("three")
    seen.append(identity())
    (folder / "b").write_text("b")
    seen.append(identity())
    seen.append(identity(str(words)))
    files.pop()
    seen.append(identity())
    assert len(set(seen)) == len(seen)


def test_a_file_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    engine = create_engine(spec("echo", "", files=(str(tmp_path / "gone"),)))
    assert Engine.identify(engine) == ""
