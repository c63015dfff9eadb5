"""Addresses of the hub and commands of other programs, as people paste them for `path`."""

from __future__ import annotations

import pytest

from servekit.config.pasted_paths import HubAddress, explain_text, parse_address


@pytest.mark.parametrize(
    ("text", "path", "revision"),
    [
        ("hf.co/org/name", "org/name", ""),
        ("http://www.huggingface.co/org/name/", "org/name", ""),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M", ""),
        ("https://huggingface.co/org/name/tree/main", "org/name", ""),
        ("https://huggingface.co/org/name/tree/v1.0", "org/name", "v1.0"),
        ("https://huggingface.co/org/name/commit/abc123", "org/name", "abc123"),
        ("https://huggingface.co/org/name/tree/refs/pr/7", "org/name", "refs/pr/7"),
        ("https://huggingface.co/org/name/blob/refs/pr/7/a.gguf", "org/name/a.gguf", "refs/pr/7"),
        ("https://huggingface.co/org/name/resolve/v1/x/a%20b.GGUF", "org/name/x/a b.GGUF", "v1"),
        ("https://huggingface.co/org/name/raw/main/config.json", "org/name", ""),
        ("https://huggingface.co/org/name/tree/main/UD-Q4_K_XL", "org/name:UD-Q4_K_XL", ""),
        ("https://huggingface.co/org/name/discussions/3", "org/name", ""),
        ("https://huggingface.co/org/name?show_file_info=a.gguf#top", "org/name/a.gguf", ""),
        ("https://huggingface.co/org/name?show_file_info=a.safetensors", "org/name", ""),
        ("https://huggingface.co/org/name?other=1", "org/name", ""),
        ("https://huggingface.co/org/name/a.gguf", "org/name/a.gguf", ""),
        ("hf://org/name", "org/name", ""),
        ("HF://org/name@v1", "org/name", "v1"),
        ("hf://org/name@main/a.gguf", "org/name/a.gguf", ""),
        ("hf://org/name/tree/a.gguf", "org/name/tree/a.gguf", ""),  # a folder, and no page
    ],
)
def test_the_model_at_an_address(text: str, path: str, revision: str) -> None:
    assert parse_address(text) == HubAddress(path, revision)


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/datasets/a/b",
        "https://huggingface.co/spaces/a/b",
        "https://huggingface.co/gpt2",
        "hf.co/",
        "hf://name",
    ],
)
def test_an_address_of_something_else_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no address of a model; write its hub id: org/name"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/name/tree/main/onnx",
        "https://huggingface.co/org/name/blob/main/onnx/model.onnx",
        "hf://org/name/onnx/model.onnx",
    ],
)
def test_a_part_of_a_repository_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"write org/name, or org/name/FILE\.gguf"):
        parse_address(text)


@pytest.mark.parametrize("text", ["org/name", "", "https://example.com/org/name", "huggingface.co"])
def test_other_texts_are_no_address(text: str) -> None:
    assert parse_address(text) is None


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("command", "write"),
    [
        ("vllm serve org/name --port 80", "org/name"),
        ("vllm serve --model=org/name", "org/name"),
        ("$ sudo vllm serve org/name", "org/name"),
        ("CUDA_VISIBLE_DEVICES=0 HF_HOME=/x vllm serve org/name", "org/name"),
        ("ollama run llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("ollama pull hf.co/org/name:Q8_0", "org/name:Q8_0"),
        ("ollama run somebodys", "its hub id: org/name"),
        ("ollama pull https://huggingface.co/datasets/a/b", "its hub id: org/name"),
        ("lms get qwen3:4b", "Qwen/Qwen3-4B"),
        ("hf download org/name", "org/name"),
        ("huggingface-cli download org/name config.json", "org/name"),
        ("llama-server -m /models/a.gguf -c 4096", "/models/a.gguf"),
        ("/usr/bin/llama-cli -hf org/name:Q4_0", "org/name:Q4_0"),
        ("docker model run org/name", "org/name"),
        ("python -m sglang.launch_server --model-path org/name", "org/name"),
        ("python3.11 -m mlx_lm.chat x --model org/name", "org/name"),
        ("uv run python -m sglang.server org/name", "org/name"),
        ("text-generation-launcher --model-id org/name", "org/name"),
        ("git clone 'https://huggingface.co/org/name'", "org/name"),
        ("vllm --help", "org/name, a folder or a .gguf file"),
        ("vllm serve --model", "org/name, a folder or a .gguf file"),
    ],
)
def test_of_a_command_the_model_is_to_be_written(command: str, write: str) -> None:
    said = explain_text(command)
    assert said.startswith(f"this is a command, and `path` is the model alone; write {write}")
    is_vllm = "vllm" in command
    assert said.endswith("writes a file with the command's options") == is_vllm


@pytest.mark.parametrize(
    "text",
    ["vllm", "org/name", "vllm serve 'org", "my vllm notes", "sudo", "", "X=1", "models/run a"],
)
def test_other_texts_are_no_command(text: str) -> None:
    assert explain_text(text) == ""


def test_a_name_of_ollama_is_known_with_its_scheme() -> None:
    assert "write Qwen/Qwen3-4B" in explain_text("ollama://qwen3:4b")
