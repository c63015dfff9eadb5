"""Weights in 8 bits: the library's own texts with the same quantisation, the size, and a sleep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from servekit.engines.transformers import weights
from servekit.engines.transformers.quantize import make_quantization_config
from servekit.errors import LoadError, Unsupported
from servekit.model_metadata import safetensors, weight_quantization
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import CORPUS, Harness, Seeing, make_spec, write_tiny_llama
from tests.unit.engines.seeing_model import (
    write_gemma3,
    write_qwen2_vl,
    write_seeing_model,
)
from tests.unit.engines.transformers.vision.pictures import HISTORY, NONE, ONE, Reference

INT8: dict[str, Any] = {"quantization": "int8"}
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("quantize") / "llama")


@pytest.fixture(scope="module")
def quantised(folder: Path) -> Iterator[Harness]:
    harness = Harness(make_spec(folder, options=INT8))
    yield harness
    harness.close()


def library_tokens(folder: Path) -> list[list[int]]:
    spec = make_spec(folder, options=INT8)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=make_quantization_config(folder, spec)
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for prompt in CORPUS:
        asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        made = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
        told.append(made[0][asked["input_ids"].shape[1] :].tolist())
    return told


def test_texts_are_those_of_the_library_in_any_company(quantised: Harness, folder: Path) -> None:
    due = library_tokens(folder)
    together = [quantised.submit(prompt, max_tokens=TOKENS) for prompt in CORPUS]
    assert [quantised.tokens(one) for one in together] == due
    assert [quantised.generate(prompt, max_tokens=TOKENS) for prompt in CORPUS] == due


def test_its_size_is_that_of_the_estimate(quantised: Harness, folder: Path) -> None:
    info = quantised.info
    count = sum(safetensors.elements(folder).values())
    due = weight_quantization.count_quantized_bytes("int8", safetensors.read_shapes(folder), 4)
    assert (info.dtype, info.parameters) == ("int8", count)
    # with buffers; zero points take 8 bytes in torchao 0.16
    assert 0 <= info.weights_bytes - due < 0.03 * due
    assert info.weights_bytes < 0.8 * 4 * count


def test_it_sleeps_and_says_the_same_when_it_is_awake(quantised: Harness) -> None:
    before = quantised.generate(CORPUS[0], max_tokens=TOKENS)
    quantised.engine.sleep()
    quantised.engine.wake()
    assert quantised.generate(CORPUS[0], max_tokens=TOKENS) == before


def test_it_takes_no_adapters(quantised: Harness, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="quantised, and take no adapters"):
        quantised.engine.load_adapter(AdapterSpec("a", str(tmp_path), "1"))


def test_a_quantised_model_is_not_quantised_again(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="is quantised already, by awq"):
        make_quantization_config(tmp_path, make_spec(tmp_path, options=INT8))


def test_a_package_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"needs bitsandbytes.*servekit\[quantization\]"):
        make_quantization_config(folder, make_spec(folder, options={"quantization": "int4"}))


def test_a_stored_method_without_its_package_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"is stored quantised \(gptq\), and a package"):
        weights.load_model(tmp_path, make_spec(tmp_path), None, lambda progress: None)


def load_quantised_reference(folder: Path) -> Reference:
    """Load the library's own model with the same quantisation."""
    config = make_quantization_config(folder, make_spec(folder, options=INT8), "see")
    return Reference(folder, quantization_config=config)


@pytest.mark.parametrize("write", [write_seeing_model, write_qwen2_vl, write_gemma3])
def test_a_model_with_eyes_says_what_the_library_does(
    write: Any, folder: Path, tmp_path: Path
) -> None:
    made = write(tmp_path / "seeing", folder)
    reference = load_quantised_reference(made)
    conversations = (ONE, HISTORY, NONE)
    due = [reference.ask(messages, TOKENS)[1] for messages in conversations]
    engine = Seeing(make_spec(made, options=INT8))
    try:
        asked = [engine.ask(messages, max_tokens=TOKENS) for messages in conversations]
        assert [engine.tokens(one) for one in asked] == due
        engine.engine.sleep()
        engine.engine.wake()
        assert engine.answer(HISTORY, max_tokens=TOKENS) == due[1]
        size = weight_quantization.count_quantized_bytes("int8", safetensors.read_shapes(made), 4)
        assert abs(engine.info.weights_bytes - size) < 0.03 * size
    finally:
        engine.close()
