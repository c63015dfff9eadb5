"""A folder that is no model, or lacks a part of one, is told before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from servekit.errors import LoadError
from servekit.model_metadata.model_folder import check, damage, lacks_tokenizer, no_weights

WEIGHTS = "model.safetensors"


def write_weights(path: Path, *sizes: int, lost: int = 0, metadata: bool = True) -> Path:
    """Write a safetensors file with tensors of these sizes; `lost` bytes at its end are missing."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    at = 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at - lost))
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        check(folder)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that is whole."""
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / WEIGHTS, 8, 16)
    return tmp_path


def test_a_whole_model_passes(folder: Path) -> None:
    check(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    path = folder / WEIGHTS
    assert refusal(path) == (
        f"{path} is a file; name the folder that holds the model, or a .gguf file."
    )


def test_a_folder_without_a_config_is_told_by_what_it_has_instead(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == f"{folder} is not a model: it has no config.json."
    for name in ("b.gguf", "a.gguf"):
        (folder / name).touch()
    assert refusal(folder) == f"{folder} holds GGUF files; name one of them: a.gguf, b.gguf."
    (folder / "adapter_config.json").touch()
    assert refusal(folder) == (
        f"{folder} holds an adapter, not a whole model: it has no config.json."
    )


def test_a_folder_without_safetensors_is_told_by_what_it_has_instead(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refusal(folder) == f"{folder} has no *.safetensors file."
    (folder / "m.gguf").touch()
    assert refusal(folder) == f"{folder} holds GGUF files; name one of them: m.gguf."
    for name in ("pytorch_model.bin", "a.pth"):
        (folder / name).touch()
    assert refusal(folder).startswith(f"{folder} has its weights only as a.pth, a pickle format")


def test_at_most_eight_gguf_files_are_named() -> None:
    names = [f"{number}.gguf" for number in range(10)]
    assert no_weights("It", names).endswith(": " + ", ".join(names[:8]) + ".")


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    files = {"a": WEIGHTS, "b": "model-3.safetensors", "c": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    assert refusal(folder) == f"{folder} lacks 2 of its weights: model-2.safetensors …"
    for name in ("model-2.safetensors", "model-3.safetensors"):
        write_weights(folder / name, 4)
    check(folder)


NESTED = "[" * 100_000
#: Files whose form is not that of an index.
NO_INDEX = ["{", "[]", "{}", '{"weight_map": []}', "\udcff", NESTED, '{"weight_map": {"a": 3}}']


@pytest.mark.parametrize("text", NO_INDEX)
def test_an_index_that_cannot_be_read_is_told(folder: Path, text: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(text, errors="surrogateescape")
    assert refusal(folder).startswith(f"{index} cannot be read (")


def test_a_file_that_was_cut_off_is_told(folder: Path) -> None:
    path = write_weights(folder / WEIGHTS, 8, 16, lost=1)
    size = path.stat().st_size
    assert refusal(folder) == (
        f"{path} is damaged: it has {size} bytes where {size + 1} belong. Fetch it again."
    )


@pytest.mark.parametrize("metadata", [True, False])
def test_the_size_of_a_file_is_that_of_its_header_and_its_last_tensor(
    tmp_path: Path, metadata: bool
) -> None:
    path = tmp_path / WEIGHTS
    for sizes in ((), (5,), (8, 0, 3)):
        assert damage(write_weights(path, *sizes, metadata=metadata)) is None
        path.write_bytes(path.read_bytes() + b"\0")
        assert damage(path) == f"it has {path.stat().st_size} bytes where " + (
            f"{path.stat().st_size - 1} belong"
        )


@pytest.mark.parametrize(
    ("data", "reason"),
    [  # the length of the header, and the header
        (b"", "its header cannot be read"),
        (b"\0" * 7, "its header cannot be read"),
        (struct.pack("<Q", len(NESTED)) + NESTED.encode(), "its header cannot be read"),
        (struct.pack("<Q", 4) + b"null", "its header cannot be read"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "its header cannot be read"),
        (struct.pack("<Q", 100_000_000) + b"{}", "it has 10 bytes where 100000008 belong"),
        (struct.pack("<Q", 100_000_001) + b"{}", "it does not start with a safetensors header"),
        (b"<!doctype html>", "it does not start with a safetensors header"),
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(data)
    assert damage(path) == reason


def test_a_file_that_is_gone_cannot_be_read(tmp_path: Path) -> None:
    assert damage(tmp_path / WEIGHTS) == "its header cannot be read"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "tekken.json", "x.bpe"]
)
def test_each_form_of_a_tokenizer_is_known(folder: Path, name: str) -> None:
    assert lacks_tokenizer(folder) == (
        f"{folder} has no tokenizer: tokenizer.json, for example, lies beside its config.json."
    )
    (folder / name).touch()
    assert lacks_tokenizer(folder) == ""
