"""Sizes by the headers of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from servekit.model_metadata import safetensors


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A file with a header and no weights: nobody looks for them."""
    header = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}
        for name, (kind, shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def test_numbers_are_counted_by_type(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors", {"a": ("BF16", [3, 4]), "b": ("F32", [5]), "c": ("I8", [])}
    )
    found = safetensors.elements(tmp_path)
    assert found == {"BF16": 12, "F32": 5, "I8": 1}
    assert safetensors.count_bytes(found) == 24 + 20 + 1
    assert safetensors.count_bytes(found, 2) == 24 + 10 + 1, "what is quantised stays as it is"
    assert safetensors.count_bytes({"F4": 6}) == 3


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F16", [10])})
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F16", [20])})
    write(tmp_path / "consolidated.safetensors", {"ab": ("F16", [30])})
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert safetensors.elements(tmp_path) == {"F16": 30}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 4,
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": 1} ',
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        *(
            struct.pack("<Q", 33 + len(size)) + b'{"a": {"dtype":"F32","shape":[%s]}}' % size
            for size in (b"-1", b'"x"', b"1e400", b"[]", b"1" * 30)
        ),
    ],
)
def test_what_is_no_header_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: its header cannot be read$"):
        safetensors.elements(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 200_000],
)
def test_what_is_no_index_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: it has"):
        safetensors.elements(tmp_path)


def test_an_index_that_names_a_file_which_is_missing(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"names model-00001-of-00002\.safetensors, which"):
        safetensors.elements(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights as safetensors"):
        safetensors.elements(tmp_path)
