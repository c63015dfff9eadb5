"""A file that is no configuration is told by what it is, and a neighbour that may be meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.config.yaml.file_reader import MAX_BYTES, read_document
from servekit.config.yaml.nodes import plain_value
from servekit.errors import ConfigError

GOOD = "models: []\n"


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    return said.removeprefix(str(path))


def test_a_file_may_begin_with_the_mark_that_editors_on_windows_write(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert plain_value(read_document(path)) == {"models": []}


def test_a_file_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    path.write_bytes(GOOD.encode() + b"#" * (MAX_BYTES - len(GOOD)))
    assert plain_value(read_document(path)) == {"models": []}
    path.write_bytes(path.read_bytes() + b"#")
    assert refusal(path).startswith(": is larger than 1 MiB")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfea\0", ": is saved as UTF-16; save it as UTF-8."),
        (b"\xfe\xff\0a", ": is saved as UTF-16; save it as UTF-8."),
        (b"a: b\0", ": is binary, not YAML."),
        ("a: 1\nbé: ".encode() + b"\xe9\n", ":2:5: not UTF-8 text (byte 0xe9)."),
        (b"\xe9", ":1:1: not UTF-8 text (byte 0xe9)."),
        (b"a: 1\n- b\n", ":2:1: the indentation does not fit the lines above."),
    ],
)
def test_what_is_no_text_is_told_with_its_place(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "servekit.yaml"
    path.write_bytes(data)
    assert refusal(path).startswith(said)


def test_a_folder_is_told_with_the_files_that_may_be_meant(tmp_path: Path) -> None:
    said = ": is a folder, not a configuration file."
    assert refusal(tmp_path) == said
    for name in ("b.yml", "a.yaml", "c.json", *(f"{n}.yaml" for n in "defg")):
        (tmp_path / name).touch()
    assert refusal(tmp_path) == f"{said} It holds a.yaml, b.yml, d.yaml, e.yaml, f.yaml."


def test_a_file_that_is_not_there_is_told_with_one_of_a_like_name(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    assert refusal(path) == ": there is no such file."
    (tmp_path / "servekit.yml").mkdir()
    assert refusal(path) == ": there is no such file.", "a folder is not meant"
    (tmp_path / "serve-kit.yaml").touch()
    near = tmp_path / "serve-kit.yaml"
    assert refusal(path) == f": there is no such file. Did you mean '{near}'?"
    assert refusal(tmp_path / "nowhere" / "a.yaml") == ": there is no such file."


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/null")):
        assert refusal(path) == ": is not a regular file."
    file = tmp_path / "file"
    file.touch()
    assert refusal(file / "servekit.yaml") == ": cannot be read: Not a directory."
