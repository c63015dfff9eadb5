"""What goes onto a GPU, and how much cache there is: arithmetic, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from servekit.engines.llamacpp.memory_fit import (
    HEADROOM_BYTES,
    FitOptions,
    Shape,
    _mask_bytes,
    _workspace_bytes,
    fit_memory,
    read_parts,
    shape_of,
)
from servekit.errors import LoadError
from tests.unit.engines.origins import write_tiny_gguf

GIB = 2**30
MIB = 2**20
#: As an 8B model in Q4: 32 layers of 128 MiB, a cache of 4 KiB a token and layer.
SHAPE = Shape(
    architecture="llama",
    layers=(128 * MIB,) * 32,
    output=512 * MIB,
    weights=5 * GIB,
    cached=4096,
    activations=4 * 40_000,
    vocabulary=4 * 128_000,
    own_context=8192,
)
WISH = FitOptions(
    slots=8,
    batch=512,
    max_context=None,
    gpu_layers=None,
    cache_type="f16",
    budgets=(80 * GIB,),
    host_bytes=0,
)


def taken(shape: Shape, wish: FitOptions, gpu_layers: int, tokens: int) -> int:
    layers = min(gpu_layers, len(shape.layers))
    weights = layers * shape.layers[0] + (shape.output if gpu_layers > layers else 0)
    cache = tokens * shape.cached * layers
    return weights + cache + _workspace_bytes(shape, wish) + tokens * _mask_bytes(wish)


def test_a_big_gpu_takes_it_all() -> None:
    plan = fit_memory(SHAPE, WISH)
    assert plan.gpu_layers == 33
    assert (plan.max_context, plan.context) == (8192, 8 * 8192)
    assert plan.cache_bytes == 8 * 8192 * 4096 * 32


def test_less_memory_is_less_cache_first() -> None:
    wish = replace(WISH, budgets=(8 * GIB,))
    plan = fit_memory(SHAPE, wish)
    assert plan.gpu_layers == 33
    assert 8192 <= plan.context < 8 * 8192
    assert taken(SHAPE, wish, 33, plan.context - 256) <= 8 * GIB
    assert taken(SHAPE, wish, 33, plan.context + 256) > 8 * GIB


def test_a_draft_model_takes_its_share() -> None:
    draft = replace(SHAPE, layers=(16 * MIB,) * 8, weights=GIB, cached=1024)
    wish = replace(WISH, budgets=(8 * GIB,), speculates=True, draft=draft)
    plan, alone = fit_memory(SHAPE, wish), fit_memory(SHAPE, replace(WISH, budgets=(8 * GIB,)))
    assert 8192 <= plan.context < alone.context
    beside = draft.weights + plan.context * 8 * 1024
    assert taken(SHAPE, wish, 33, plan.context - 256) + beside - 256 * 8 * 1024 <= 8 * GIB
    assert taken(SHAPE, wish, 33, plan.context + 256) + beside + 256 * 8 * 1024 > 8 * GIB
    assert plan.cache_bytes == plan.context * (4096 * 32 + 1024 * 8)
    on_cpu = replace(wish, budgets=(), host_bytes=GIB)
    assert fit_memory(SHAPE, on_cpu).max_context == int(0.4 * GIB) // (4096 * 32 + 1024 * 8)


def test_then_fewer_layers() -> None:
    wish = replace(WISH, budgets=(4 * GIB,))
    plan = fit_memory(SHAPE, wish)
    assert 0 < plan.gpu_layers < 32
    assert taken(SHAPE, wish, plan.gpu_layers, plan.context - 256) <= 4 * GIB
    assert taken(SHAPE, wish, plan.gpu_layers + 1, 8192) > 4 * GIB
    assert plan.context >= plan.max_context == 8192


def test_a_gpu_without_room_gets_no_layer() -> None:
    assert fit_memory(SHAPE, replace(WISH, budgets=(HEADROOM_BYTES,))).gpu_layers == 0


def test_two_gpus_share() -> None:
    assert fit_memory(SHAPE, replace(WISH, budgets=(4 * GIB, 4 * GIB))).gpu_layers == 33


#: As SmolLM2-135M in Q4_1: 30 layers of a cache of 768 bytes a token each.
SMALL = Shape(
    architecture="llama",
    layers=(2 * MIB,) * 30,
    output=30 * MIB,
    weights=92 * MIB,
    cached=768,
    activations=4 * (8 * 576 + 2 * 1536),
    vocabulary=4 * 49_152,
    own_context=8192,
)


@pytest.mark.parametrize(("layers", "gpus"), [(31, 1), (15, 1), (31, 2)])
def test_what_an_h200_held_is_within_the_claim(layers: int, gpus: int) -> None:
    """Beside weights and cache it held 0.66 GiB, and 3.8 kB for each cached token.

    Spread over two, four times the latter on each of them; a little more in all.
    """
    budget, copies = 2 * GIB, 4 if gpus > 1 else 1
    wish = replace(WISH, slots=64, batch=2048, gpu_layers=layers, budgets=(budget,) * gpus)
    plan = fit_memory(SMALL, replace(wish, max_context=2048))
    weights = sum(SMALL.layers[:layers]) + (SMALL.output if layers > 30 else 0)
    own = (weights + plan.context * 768 * min(layers, 30)) / gpus
    held = own + 0.66 * GIB + plan.context * 3830 * copies
    assert plan.context > 16_384
    assert 0.85 * budget < held <= budget


def test_layers_that_were_asked_for_and_do_not_fit_are_refused() -> None:
    with pytest.raises(LoadError, match=r"33 layers of 4\.5 GiB do not fit"):
        fit_memory(SHAPE, replace(WISH, budgets=(4 * GIB,), gpu_layers=33))
    assert fit_memory(SHAPE, replace(WISH, gpu_layers=5)).gpu_layers == 5


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    wish = replace(WISH, budgets=(6 * GIB,), gpu_layers=33, max_context=8192)
    with pytest.raises(LoadError, match=r"takes 1\.0 GiB of cache") as caught:
        fit_memory(SHAPE, wish)
    assert caught.value.permanent
    assert fit_memory(SHAPE, replace(wish, max_context=None)).max_context < 8192


def test_on_a_cpu_the_hosts_memory_counts() -> None:
    wish = replace(WISH, budgets=(), host_bytes=10 * GIB)
    assert fit_memory(SHAPE, wish).gpu_layers == 0
    assert fit_memory(SHAPE, wish).context == 8192  # more than 8 × 512, for one may be that long
    assert fit_memory(SHAPE, replace(wish, host_bytes=GIB)).max_context == int(0.4 * GIB) // (
        4096 * 32
    )


def test_the_header_says_it(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", float32=True)
    shape = shape_of(read_parts(path), "f32")
    narrow = 2 * 16
    layer = 4 * (2 * 64 + 2 * 64 * 64 + 2 * narrow * 64 + 3 * 96 * 64)
    assert shape.layers == (layer, layer)
    assert shape.weights == 2 * layer + 4 * (261 * 64 + 64)
    assert shape.output == 4 * 261 * 64  # tied: the embedding, once more
    assert shape.cached == narrow * 2 * 4
    assert shape.own_context == 256


def test_experts_on_the_host_are_no_part_of_the_layers(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "moe.gguf", float32=True, experts=4)
    parts = read_parts(path)
    whole, first, all_ = (shape_of(parts, "f32", layers) for layers in (0, 1, 99))
    experts = 4 * 4 * 3 * 96 * 64
    assert [a - b for a, b in zip(whole.layers, first.layers, strict=True)] == [experts, 0]
    assert [a - b for a, b in zip(whole.layers, all_.layers, strict=True)] == [experts] * 2
    assert first.weights == whole.weights
    dense = read_parts(write_tiny_gguf(tmp_path / "dense.gguf"))
    with pytest.raises(LoadError, match="cpu_moe_layers: this model has no experts"):
        shape_of(dense, "f32", 1)
