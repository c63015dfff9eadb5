"""The headers of CTranslate2's models, as its own converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctranslate2.specs import WhisperSpec

from servekit.errors import LoadError
from servekit.model_metadata import ctranslate2, model_folder
from tests.unit.model_metadata.ctranslate2_file import write_model


def test_a_model_of_the_library_is_read(tmp_path: Path) -> None:
    spec: Any = WhisperSpec(1, 2, 1, 2)
    spec._visit(_fill)
    spec.register_vocabulary(["<|endoftext|>"] * 4)
    spec.validate()
    spec.optimize(quantization="int8")
    spec._serialize(str(tmp_path / ctranslate2.FILE))
    header = ctranslate2.read_header(tmp_path / ctranslate2.FILE)
    assert header.name == "WhisperSpec" and ctranslate2.is_model(tmp_path)
    found = header.variables["decoder/layer_0/ffn/linear_0/weight"]
    assert (found.shape, found.type, found.size) == ((4, 4), "int8", 16)
    assert header.variables["encoder/layer_norm/gamma"].type == "float32"


def _fill(layer: Any, name: str, value: Any) -> None:
    last = name.rpartition("/")[2]
    if value is None:
        shape = (4, 4) if last == "weight" else (4,)
        # different for each name: the library writes equal ones once
        numbers = np.random.default_rng(list(name.encode()))
        setattr(layer, last, numbers.random(shape, np.float32))


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    assert not ctranslate2.is_model(tmp_path)
    for content in (b"", b"\x06\0\0\0", b"\x06\0\0\0\x0c\0WhisperSpec", b"PK\3\4" + bytes(100)):
        (tmp_path / ctranslate2.FILE).write_bytes(content)
        assert not ctranslate2.is_model(tmp_path)
        with pytest.raises(ValueError, match="does not start as a model of CTranslate2"):
            ctranslate2.read_header(tmp_path / ctranslate2.FILE)


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        (26, b"\0\0", "variable 0 has no name"),
        (30, b"\xff", "a has 255 dimensions"),
        (39, b"\x63", "index out of range"),
        (31, b"\x02", "a has 20 bytes"),
    ],
)
def test_a_damaged_model_is_told(tmp_path: Path, at: int, wrong: bytes, words: str) -> None:
    file = write_model(tmp_path, a=10) / ctranslate2.FILE
    content = file.read_bytes()
    file.write_bytes(content[:at] + wrong + content[at + len(wrong) :])
    with pytest.raises(ValueError, match=f"is damaged: .*{words}"):
        ctranslate2.read_header(file)


def test_every_cut_is_told(tmp_path: Path) -> None:
    file = write_model(tmp_path, a=10, b=3) / ctranslate2.FILE
    content = file.read_bytes()
    whole = len(content) - 4  # without the number of aliases
    for size in range(1, whole):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="is damaged"):
            ctranslate2.read_header(file)


@pytest.mark.parametrize(
    ("compute_type", "on_gpu", "due"),
    [
        ("default", True, 200),
        ("default", False, 400),
        ("float32", True, 400),
        ("float16", True, 200),
        ("int8", True, 100),
        ("int8_float16", True, 100),
    ],
)
def test_weights_are_counted(tmp_path: Path, compute_type: str, on_gpu: bool, due: int) -> None:
    file = write_model(tmp_path, a=60, b=40) / ctranslate2.FILE
    assert ctranslate2.count_bytes(file, compute_type, on_gpu=on_gpu) == due


def test_only_a_whisper_is_loaded(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "TransformerSpec")
    with pytest.raises(LoadError, match="of the kind TransformerSpec; engine faster_whisper"):
        ctranslate2.check_whisper(other)
    with pytest.raises(LoadError, match="`engine: faster_whisper` loads it, if it is a Whisper"):
        model_folder.check(other)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    with pytest.raises(LoadError, match="ct2-transformers-converter --model"):
        ctranslate2.check_whisper(plain)
