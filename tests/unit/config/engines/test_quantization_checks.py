"""`quantization` of the transformers engine: what a file is told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.errors import ConfigError
from tests.unit.config.test_load import write

FILE = "models:\n  - {name: a, path: org/name, %s}\n"
HERE = frozenset({"torch", "transformers", "torchao"})


def told(folder: Path, keys: str, *, gpu: bool = False, here: frozenset[str] = HERE) -> str:
    try:
        load_here(write(folder, FILE % keys), Machine(gpu, here.__contains__))
    except ConfigError as error:
        return error.message
    return ""


def test_a_gguf_file_is_quantised_already(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    path = write(tmp_path, "models: [{name: a, path: m.gguf, options: {quantization: int8}}]")
    with pytest.raises(ConfigError, match="engine llamacpp runs it as it is"):
        load_here(path, Machine(False, HERE.__contains__))


@pytest.mark.parametrize(
    ("keys", "gpu", "words"),
    [
        ("device: cpu, options: {quantization: int8}", False, ""),
        ("options: {quantization: fp8}", True, ""),
        ("options: {quantization: fp8}", False, "fp8 needs a GPU, and no NVIDIA GPU was found"),
        ("device: cpu, options: {quantization: fp8}", True, "fp8 needs a GPU. On a CPU there is"),
        ("options: {quantization: int4}", True, "needs bitsandbytes, which is not installed"),
        ("gpus_per_replica: 2, options: {quantization: int8}", True, "is on one GPU"),
        ("options: {quantization: int8}, adapters: [{name: b, path: o/b}]", True, "no adapters"),
        ("options: {quantization: int3}", True, "must be int8, fp8 or int4"),
        ("engine: vllm, options: {quantization: int8}", True, "vLLM has no method of this name"),
    ],
)
def test_what_a_quantised_model_cannot_have(
    tmp_path: Path, keys: str, gpu: bool, words: str
) -> None:
    found = told(tmp_path, keys, gpu=gpu)
    assert words in found
    assert bool(words) == bool(found)
