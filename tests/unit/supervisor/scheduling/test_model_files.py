"""What `check` finds in the files of models, before an engine does."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.model_files import problem
from tests.unit.engines.origins import write_tiny_gguf
from tests.unit.model_metadata.ctranslate2_file import write_model


def model(engine: str = "transformers") -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": "p", "engine": engine})


def safetensors(path: Path, size: int = 8, lacking: int = 0) -> None:
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size - lacking))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that could be a model's, as far as its headers go."""
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_a_gguf_that_is_cut_short(tmp_path: Path, engine: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert problem(model(engine), path) == ""
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) // 2, 100, 3):
        path.write_bytes(content[:size])
        said = problem(model(engine), path)
        assert "is not a whole GGUF file" in said and "Fetch it again" in said


def test_a_model_of_ctranslate2(tmp_path: Path, folder: Path) -> None:
    path = write_model(tmp_path / "whisper", a=10)
    assert problem(model("faster_whisper"), path) == ""
    assert "`engine: faster_whisper` loads it" in problem(model("vllm"), path)
    assert "has no model.bin" in problem(model("faster_whisper"), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    assert "ct2-transformers-converter" in problem(model("faster_whisper"), folder)
    (path / "model.bin").write_bytes((path / "model.bin").read_bytes()[:-10])
    assert "is damaged" in problem(model("faster_whisper"), path)


def test_a_projector_that_is_named(tmp_path: Path) -> None:
    path, projector = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "mmproj.gguf"
    asked = model("llamacpp").model_copy(update={"options": {"mmproj": str(projector)}})
    assert problem(asked, path) == ""  # it is still to be fetched
    projector.write_bytes(path.read_bytes())
    assert f"options.mmproj: {projector} is no projector: it is a model" in problem(asked, path)
    projector.write_bytes(path.read_bytes()[:-1])
    assert f"{projector} is not a whole GGUF file" in problem(asked, path)
    writer = gguf.GGUFWriter(projector, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = problem(asked, path)
    assert said == (
        f"options.mmproj: {projector} is damaged: it has no clip.vision.embedding_length."
    )


def test_check_tells_of_a_projector_beside_a_model_that_is_unusable(tmp_path: Path) -> None:
    path, beside = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "mmproj.gguf"

    def check(**more: Any) -> str:
        file = tmp_path / "servekit.yaml"
        named = {"name": "m", "engine": "llamacpp", "path": str(path), "device": "cpu"} | more
        file.write_text(json.dumps({"models": [named]}))  # JSON is YAML
        command = [sys.executable, "-m", "servekit", "check", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert check() == ""
    beside.write_bytes(path.read_bytes())
    said = "warning: models[0].path: m serves texts only: "
    assert check() == f"{said}{beside} is no projector: it is a model of the architecture 'llama'\n"
    assert check(options={"mmproj": False}) == ""
    beside.write_bytes(path.read_bytes()[:-1])
    assert f"{said}{beside} is not a whole GGUF file" in check()
    (tmp_path / "mmproj-b.gguf").touch()
    assert f"{said}mmproj-b.gguf and mmproj.gguf lie beside the model" in check()


def test_models_whose_weights_are_not_quantised(folder: Path) -> None:
    asked = model().model_copy(update={"options": {"quantization": "int8"}})
    assert problem(asked, folder) == ""
    config = json.loads((folder / "config.json").read_bytes())
    stored = config | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(stored))
    assert problem(asked, folder) == "it is quantised already: leave out options.quantization."
    said = "options.quantization is for models that write text, and this one does not."
    for kind in ("BertForSequenceClassification", "WhisperForConditionalGeneration"):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        assert problem(asked, folder) == said
        assert problem(model(), folder) == ""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text("[]")
    assert problem(asked, folder) == said


def test_a_gguf_in_parts(tmp_path: Path) -> None:
    first = tmp_path / "tiny-00001-of-00002.gguf"
    first.write_bytes(write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes())
    said = problem(model("llamacpp"), first)
    assert "is one of 2 parts, and tiny-00002-of-00002.gguf is not there" in said
    (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(first.read_bytes())
    assert problem(model("llamacpp"), first) == ""
    write_without_tokenizer(tmp_path / "tiny-00002-of-00002.gguf")
    assert problem(model("llamacpp"), first) == "", "the first part has it"
    write_without_tokenizer(first)
    assert problem(model("llamacpp"), first) == (
        f"{first} has no tokenizer: its metadata has no tokenizer.ggml.tokens."
    )


def write_without_tokenizer(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_of_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "nobodys-arch")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = problem(model(), tmp_path / "odd.gguf")
    assert "transformers cannot convert the architecture 'nobodys-arch'" in said
    assert problem(model("llamacpp"), tmp_path / "odd.gguf") == ""


def test_a_folder_that_is_whole_and_what_it_may_lack(folder: Path) -> None:
    assert problem(model(), folder) == ""
    safetensors(folder / "model.safetensors", lacking=1)
    assert "model.safetensors is damaged" in problem(model(), folder)
    safetensors(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"w": "model.safetensors", "v": "more.safetensors"}})
    )
    assert "lacks 1 of its weights: more.safetensors" in problem(model(), folder)
    index.unlink()
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in problem(model(), folder)
    (folder / "vocab.txt").touch()
    assert problem(model(), folder) == ""
    (folder / "config.json").write_text(json.dumps({"model_type": "nobodys_type"}))
    assert "does not know the model type 'nobodys_type'" in problem(model(), folder)
    assert problem(model("vllm"), folder) == ""
    (folder / "config.json").write_text("[")
    assert "is damaged" in problem(model(), folder)
