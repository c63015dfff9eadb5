from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import AutoTokenizer

from servekit.engines.vllm import generation_defaults
from tests.unit.engines.harness import write_tiny_llama


def test_what_a_folder_says(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = generation_defaults.read_defaults(folder, tokenizer, len(tokenizer))
    assert found.eos == {tokenizer.eos_token_id} and found.primary == tokenizer.eos_token_id
    with safe_open(folder / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert generation_defaults.count_parameters(folder) == count > 0


def test_a_folder_without_weights_has_none_to_count(tmp_path: Path) -> None:
    assert generation_defaults.count_parameters(tmp_path) == 0
