"""Ollama's names of models, and the hub ids of the same models."""

from __future__ import annotations

import pytest

from servekit.config.ollama_names import explain_name, find_hub_id


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("qwen3", "Qwen/Qwen3-8B"),  # the family's first size
        ("qwen3:latest", "Qwen/Qwen3-8B"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("qwen3:0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B"),  # one that follows no pattern
        ("qwen3:30b-a3b-q4_K_M", "Qwen/Qwen3-30B-A3B"),
        ("library/qwen3:4b", "Qwen/Qwen3-4B"),
        ("gemma3:270m", "google/gemma-3-270m-it"),
        ("llama3.1:70b-instruct-q8_0", "meta-llama/Llama-3.1-70B-Instruct"),
        ("https://www.ollama.com/library/phi4", "microsoft/phi-4"),
        ("registry.ollama.ai/library/bge-m3:latest", "BAAI/bge-m3"),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
        ("mistral-nemo:12b", "mistralai/Mistral-Nemo-Instruct-2407"),
        ("qwen3:7b", ""),  # no such size
        ("qwen3:fast", ""),
        ("qwen3:8bit", ""),
        ("bge-m3:567m", ""),
        ("nobodys", ""),
        ("org/name", ""),
        ("Qwen3", ""),
        ("qwen3 ", ""),
        ("", ""),
    ],
)
def test_the_hub_id_of_a_name(name: str, hub_id: str) -> None:
    assert find_hub_id(name) == hub_id


def test_a_known_name_is_explained_with_its_hub_id() -> None:
    assert explain_name("qwen3:4b") == (
        "'qwen3:4b' is Ollama's name of a model; write Qwen/Qwen3-4B, its hub id; `servekit init"
        " --from ollama` brings the models that Ollama has here"
    )


@pytest.mark.parametrize("text", ["somebody:7b", "library/x", "ollama.com/x", "qwen3:nosuch"])
def test_a_name_that_can_only_be_ollamas_is_explained_too(text: str) -> None:
    assert explain_name(text) == (
        f"'{text}' is a name in Ollama's library; write a hub id, org/name, or a quantisation of"
        " one, org/name-GGUF:Q4_K_M; `servekit init --from ollama` brings the models that Ollama"
        " has here"
    )


@pytest.mark.parametrize("text", ["folder", "org/name", "gpt2", "./qwen3", "model.gguf", ""])
def test_a_text_that_may_be_something_else_is_left_alone(text: str) -> None:
    assert explain_name(text) == ""
