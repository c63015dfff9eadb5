"""GGUF files, written by the library of the format."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import gguf as library
import pytest

from servekit.errors import LoadError
from servekit.model_metadata import gguf
from servekit.model_metadata.gguf import read_header
from servekit.model_metadata.kv_cache_shape import of_gguf
from tests.unit.engines.origins import HIDDEN, write_tiny_gguf


def test_it_agrees_with_the_library(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = gguf.read_gguf(path)
    tensors = library.GGUFReader(path).tensors
    assert found.elements == sum(int(tensor.n_elements) for tensor in tensors)
    assert found.elements == read_header(path).parameters
    exact = sum(int(tensor.n_bytes) for tensor in tensors)
    assert exact <= found.weights_bytes < exact + 32 * len(tensors), "aligned to 32 bytes"
    assert found.of_architecture("embedding_length") == HIDDEN
    assert found.metadata["tokenizer.ggml.tokens"] is None, "a vocabulary is not kept"


def test_the_parts_of_a_model_are_added_up(tmp_path: Path) -> None:
    whole = gguf.read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    for number in (1, 2):
        part = tmp_path / f"tiny-{number:05d}-of-00002.gguf"
        part.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    found = gguf.read_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    assert found.weights_bytes == 2 * whole.weights_bytes
    assert found.elements == 2 * whole.elements


def test_its_attention(tmp_path: Path) -> None:
    file = gguf.read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    shape = of_gguf(file)
    kv_heads = file.of_architecture("attention.head_count_kv")
    head = HIDDEN // file.of_architecture("attention.head_count")
    assert shape.per_token == 2 * kv_heads * head
    assert shape.full_layers == file.of_architecture("block_count")


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    ],
)
def test_what_is_none_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ValueError):
        gguf.read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("layers", [2**31 - 1, -1.0, math.nan, math.inf])
def test_no_list_is_made_of_any_number_of_layers(tmp_path: Path, layers: float) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", llama__block_count=layers)
    with pytest.raises(ValueError, match=r"its llama\.block_count is"):
        gguf.read_gguf(path)
    with pytest.raises(LoadError, match=r"its llama\.block_count is"):
        read_header(path)


@pytest.mark.parametrize(
    ("stated", "description", "expected"),
    [
        (15, "llama 8B Q4_K - Medium", "Q4_K_M"),
        (7, "", "Q8_0"),
        (None, "llama 8B Q4_K - Medium", "Q4_K_M"),
        (None, "llama 135M Q8_0", "Q8_0"),
        (None, "gemma3 4B all F32", "F32"),
        (None, "qwen2 1.5B IQ2_XXS - 2.0625 bpw", "IQ2_XXS"),
        (4711, "llama ?B BF16", "BF16"),
        (None, "", ""),
    ],
)
def test_the_quantization_has_the_name_that_files_have(
    stated: int | None, description: str, expected: str
) -> None:
    metadata = {} if stated is None else {"general.file_type": stated}
    assert gguf.quantization(metadata, description) == expected


def test_a_file_is_sampled_as_it_says_and_else_as_by_llama_cpp() -> None:
    default = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert gguf.read_sampling_defaults(lambda _: "") == default
    stated = {"general.sampling.temp": "0", "general.sampling.penalty_repeat": 1.1}
    found = gguf.read_sampling_defaults(lambda key: stated.get(key))
    assert found == default | {"temperature": 0.0, "repetition_penalty": 1.1}
    odd = {"top_k": "7.000000", "temp": "hot", "top_p": [0.5], "min_p": None}
    found = gguf.read_sampling_defaults(lambda key: odd.get(key.rpartition(".")[2]))
    assert found == default | {"top_k": 7}, "llama.cpp tells a float32 so"
