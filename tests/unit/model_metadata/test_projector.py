"""Projectors: found beside models, and estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.model_metadata.gguf import Header
from servekit.model_metadata.projector import estimate_bytes, find_models, find_projectors


def test_projectors_are_no_models(tmp_path: Path) -> None:
    names = ["model.gguf", "mmproj-model-f16.gguf", "MMPROJ-x.GGUF", "x-mmproj.gguf", "mmproj.txt"]
    for name in names:
        (tmp_path / name).touch()
    assert [one.name for one in find_models(tmp_path)] == ["model.gguf", "x-mmproj.gguf"]
    found = find_projectors(tmp_path / "model.gguf")
    assert [one.name for one in found] == ["MMPROJ-x.GGUF", "mmproj-model-f16.gguf"]
    assert find_projectors(tmp_path / "none" / "model.gguf") == []


def header(kind: str, **metadata: Any) -> Header:
    sizes = {"v.patch_embd.weight": 1000}
    keys = {f"clip.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Header("clip", 1, 1, {}, {"clip.projector_type": kind} | keys, sizes)


EYES = {"vision__embedding_length": 10, "vision__feed_forward_length": 40}


@pytest.mark.parametrize(
    ("kind", "patches"), [("gemma3", 16), ("qwen2.5vl_merger", 4 * 4096), ("pixtral", 4 * 4096)]
)
def test_memory(kind: str, patches: int) -> None:
    """The weights, and activations of the largest image that llama.cpp takes as it is."""
    made = header(kind, vision__image_size=64, vision__patch_size=16, **EYES)
    assert estimate_bytes(made) == 1000 + 4 * patches * (80 + 80)
    fewer = 16 if kind == "gemma3" else 4 * 100
    assert estimate_bytes(made, 100) == 1000 + 4 * fewer * (80 + 80)


def test_ears() -> None:
    ears = {"audio__embedding_length": 10, "audio__feed_forward_length": 40}
    assert estimate_bytes(header("qwen2a", **ears)) == 1000 + 4 * 3000 * 160


@pytest.mark.parametrize("odd", [{}, {"vision__image_size": "x", "vision__patch_size": None}])
def test_a_header_that_says_nothing(odd: dict[str, Any]) -> None:
    assert estimate_bytes(header("gemma3", **odd)) == 1000
