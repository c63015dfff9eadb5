"""Projectors: found beside models, and estimated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servekit.model_metadata.gguf import Header
from servekit.model_metadata.projector import (
    estimate_bytes,
    find_fault,
    find_models,
    find_projectors,
)


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


# ---------------------------------------------------------------- faults


def whole(metadata: dict[str, Any] | None = None, **shapes: tuple[int, ...] | None) -> Header:
    """A whole projector of two layers, with other metadata and tensors (None: without)."""
    eyes: dict[str, Any] = {
        "image_size": 32,
        "patch_size": 8,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "embedding_length": 16,
        "feed_forward_length": 64,
        "block_count": 2,
        "projection_dim": 24,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 1e-6,
        "projector.scale_factor": 2,
    }
    stated = {"clip.projector_type": "idefics3", "clip.has_vision_encoder": True}
    stated |= {f"clip.vision.{key}": value for key, value in eyes.items()} | (metadata or {})
    tensors: dict[str, Any] = {
        f"v.blk.{n}.{part}.weight": (16, 16) for n in range(2) for part in ("attn_q", "ffn_up")
    }
    tensors |= {f"v.blk.{n}.ln1.weight": (16,) for n in range(2)}
    tensors |= {"v.patch_embd.weight": (8, 8, 3, 16), "mm.model.fc.weight": (64, 24)}
    tensors |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    kept = {name: shape for name, shape in tensors.items() if shape is not None}
    known = {key: value for key, value in stated.items() if value != "none"}
    return Header("clip", len(kept), 1, {}, known, shapes=kept)


MODEL = Header("llama", 1, 1, {}, {"llama.embedding_length": 24})


def test_a_whole_projector_has_no_fault() -> None:
    assert find_fault(whole(), MODEL) == find_fault(whole()) == ""
    fewer = {"clip.vision.block_count": 1}  # the last layer is not used, as of LLaVA's
    assert find_fault(whole(fewer), MODEL) == ""
    wide = {"clip.projector_type": "gemma3", "clip.vision.projector.scale_factor": "none"}
    assert find_fault(whole(wide), MODEL) == ""  # as of Gemma 3's published ones
    uneven = {"clip.projector_type": "something-newer"}
    assert find_fault(whole(uneven, v__blk__1__attn_q__weight=None), MODEL) == ""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", "none", "is damaged: it has no clip.vision.block_count"),
        ("block_count", 3, "is damaged: it has no tensor v.blk.2.attn_q.weight"),
        ("patch_size", 0, "is damaged: its clip.vision.patch_size is 0"),
        ("patch_size", 16, "its tensor for patches (8, 8, 3, 16)"),
        ("patch_size", "x", "is damaged: its clip.vision.patch_size is 'x'"),
        ("image_mean", [0.5], "is damaged: its clip.vision.image_mean has to be three numbers"),
        ("image_std", None, "is damaged: its clip.vision.image_std has to be three numbers"),
        ("embedding_length", 32, "v.blk.0.ln1.weight has 16 numbers, and its layers have 32"),
        ("attention.head_count", 5, "attention.head_count is 5, and its width 16"),
        ("projector.scale_factor", 1026, "projector.scale_factor is 1026"),
        ("projector.scale_factor", "none", "projector.scale_factor is None"),
    ],
)
def test_what_a_projector_says_of_itself(key: str, value: Any, said: str) -> None:
    assert said in find_fault(whole({f"clip.vision.{key}": value}), MODEL)


@pytest.mark.parametrize(
    "name", ["v.patch_embd.weight", "v.blk.1.attn_q.weight", "v.blk.0.ffn_up.weight"]
)
def test_a_tensor_that_is_not_there(name: str) -> None:
    found = find_fault(whole(**{name.replace(".", "__"): None}), MODEL)
    assert found == f"is damaged: it has no tensor {name}"


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("clip.vision.attention.head_count", 4, 5),
        ("clip.vision.patch_size", 4, 6),
        ("clip.vision.attention.layer_norm_epsilon", 6, 4),
        ("clip.has_vision_encoder", 7, 0),
    ],
)
def test_a_value_of_another_type(key: str, right: int, wrong: int) -> None:
    assert find_fault(replace(whole(), types={key: right, "clip.other": 99}), MODEL) == ""
    found = find_fault(replace(whole(), types={key: wrong}), MODEL)
    assert found == f"is damaged: its {key} is of GGUF's type {wrong} instead of {right}"


def test_a_projector_of_another_model() -> None:
    wider = whole(mm__model__fc__weight=(64, 32))
    assert find_fault(wider) == ""
    assert find_fault(wider, MODEL) == (
        "belongs to another model: it makes embeddings of 32 numbers, and this model's have 24"
    )
    assert "is no projector: it is a model of the architecture 'llama'" in find_fault(MODEL)
    neither = find_fault(whole({"clip.has_vision_encoder": False}))
    assert neither.startswith("reads neither images nor recordings")


@pytest.mark.parametrize(("positions", "said"), [(1500, ""), (100, "hears less than 30 s")])
def test_ears_of_a_shorter_window(positions: int, said: str) -> None:
    """llama.cpp pads each window to 30 s, and ends its process if that has no position."""
    ears: dict[str, Any] = {"embedding_length": 16, "feed_forward_length": 16, "block_count": 16}
    ears |= {"projection_dim": 16, "attention.head_count": 4, "num_mel_bins": 80}
    stated: dict[str, Any] = {f"clip.audio.{key}": value for key, value in ears.items()}
    stated |= {"clip.audio.attention.layer_norm_epsilon": 1e-6, "clip.has_audio_encoder": True}
    shapes: dict[str, tuple[int, ...]] = {
        f"a.{name}.weight": (16,) for name in ("conv1d.1", "conv1d.2", "post_ln")
    }
    shapes |= {"a.post_ln.bias": (16,), "a.position_embd.weight": (16, positions)}
    stated |= {"clip.projector_type": "qwen2a"}
    found = find_fault(Header("clip", len(shapes), 1, {}, stated, shapes=shapes))
    assert found.startswith(said) and bool(found) == bool(said)
