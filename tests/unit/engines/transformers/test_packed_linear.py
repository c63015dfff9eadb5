"""Packed weights are a copy that says the same, and is given up where it would not."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from servekit.engines.model_files import file_lock
from servekit.engines.transformers import packed_linear
from servekit.engines.transformers.lora.module_clone import ModuleClones
from servekit.engines.transformers.packed_linear import PackedLinear, pack_layers, packed_in
from servekit.engines.transformers.sleep.weight_offload import DiskReload
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec
from servekit.system import cgroup
from tests.unit.engines.harness import PROMPTS, Harness, make_spec, write_tiny_llama

IDS = torch.tensor([list(range(3, 15))])
#: Whether this CPU has the instructions that torch packs bfloat16 weights with.
PACKS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
#: Of the linear layers of `wide` in float32.
SIZE = 4 * (2 * (3 * 1024 * 1024 + 3 * 128 * 1024) + 393 * 1024)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its linear layers are worth being packed."""
    return write_tiny_llama(tmp_path_factory.mktemp("wide"), hidden_size=1024)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def spec_of(folder: Path, wish: bool | None = True, **more: Any) -> WorkerSpec:
    return make_spec(folder, device="cpu", options={"packed_weights": wish}, **more)


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found.float()


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have this machine's CPU be of some maker."""
    real = packed_linear._no_gain

    def be(vendor: str, flags: str = "fpu avx2 avx512f") -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n")
        monkeypatch.setattr(packed_linear, "_no_gain", lambda: real(path))

    be("AuthenticAMD")
    return be


# ---------------------------------------------------------------- what it says


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_says_what_the_plain_model_says(wide: Path, dtype: torch.dtype, allowed: float) -> None:
    model = load(wide, dtype)
    if dtype is torch.bfloat16 and not PACKS_BF16:
        with pytest.raises(LoadError, match=r"this machine's torch cannot pack them: .*bf16"):
            pack_layers(model, spec_of(wide))
        return
    before = logits(model)
    assert pack_layers(model, spec_of(wide)) == SIZE * dtype.itemsize // 4
    assert len(packed_in(model)) == 15  # seven in each layer, and the head
    assert (logits(model) - before).norm() <= allowed * before.norm()


def test_a_row_is_the_same_in_any_company(wide: Path) -> None:
    model = load(wide)
    pack_layers(model, spec_of(wide))
    layer = packed_in(model)[0]
    rows = torch.randn(300, 1024)
    whole = layer(rows)
    for count in (1, 2, 3, 4, 7, 8, 31, 64, 255):
        assert torch.equal(layer(rows[:count]), whole[:count])


def test_an_engine_answers_with_them_asleep_and_awake(
    wide: Path, harness: Callable[..., Harness]
) -> None:
    plain, packed = (harness(wide, options={"packed_weights": packed}) for packed in (False, True))
    assert packed.info.detail.endswith("; weights packed, 29 MiB")
    assert "packed" not in plain.info.detail
    expected = plain.generate(PROMPTS[0], max_tokens=12)
    assert packed.generate(PROMPTS[0], max_tokens=12) == expected
    packed.engine.sleep()
    assert all(layer.packed.weight is None for layer in layers_of(packed))
    packed.engine.wake()
    assert all(layer.packed.at == layer.weight.data_ptr() for layer in layers_of(packed))
    assert packed.generate(PROMPTS[0], max_tokens=12) == expected


def layers_of(made: Harness) -> list[PackedLinear]:
    runner: Any = made.engine._runner
    found = packed_in(runner._model)
    assert found
    return found


# ---------------------------------------------------------------- copies of layers


def test_a_copy_is_plain_and_goes_its_own_way(wide: Path) -> None:
    model = load(wide)
    before = logits(model)
    pack_layers(model, spec_of(wide))
    twin = ModuleClones(model, "sdpa").new()
    assert not packed_in(twin) and packed_in(model)
    assert torch.equal(logits(twin), before)
    layer, other = model.model.layers[0].mlp.up_proj, twin.model.layers[0].mlp.up_proj
    assert type(other) is nn.Linear and other.weight.data_ptr() == layer.weight.data_ptr()
    clone = copy.deepcopy(layer)
    with torch.no_grad():
        clone.weight.zero_()
    rows = torch.randn(5, 1024)
    assert not clone(rows).any() and layer(rows).any()


def test_a_layer_with_another_weight_makes_no_use_of_it(wide: Path) -> None:
    model = load(wide)
    pack_layers(model, spec_of(wide))
    layer = packed_in(model)[0]
    layer.weight.data = torch.zeros_like(layer.weight)
    assert not layer(torch.randn(5, 1024)).any()


def test_kernels_are_of_few_sizes() -> None:
    sizes = [packed_linear._padded_rows(rows) for rows in range(1, 1025)]
    assert sizes[:12] == [4, 4, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12]
    assert len(set(sizes)) == 31
    assert all(rows <= size <= max(4, rows + 1, rows * 1.25) for rows, size in enumerate(sizes, 1))


@pytest.mark.parametrize("shape", [(1, 1024), (1, 5, 1024), (3, 3, 1024), (1024,), (0, 1024)])
def test_rows_are_filled_up_and_cut_off_again(wide: Path, shape: tuple[int, ...]) -> None:
    model = load(wide)
    pack_layers(model, spec_of(wide))
    layer = packed_in(model)[0]
    given = torch.randn(*shape)
    expected = nn.functional.linear(given, layer.weight)
    assert layer(given).shape == expected.shape
    assert torch.allclose(layer(given), expected, atol=1e-3)


def test_asleep_the_copy_is_given_back(wide: Path) -> None:
    dtype = torch.bfloat16 if PACKS_BF16 else torch.float32
    model = load(wide, dtype)
    pack_layers(model, spec_of(wide))
    before = logits(model)
    bed = DiskReload(model, lambda: load(wide, dtype))
    for _ in range(2):
        bed.sleep()
        bed.sleep()
        assert all(layer.packed.weight is None for layer in packed_in(model))
        bed.wake()
        bed.wake()
        assert all(layer.packed.weight is not None for layer in packed_in(model))
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("seen", [True, False])
def test_with_no_room_to_wake_it_goes_on_with_the_weights_as_they_are(
    wide: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    model = load(wide)
    before = logits(model)
    pack_layers(model, spec_of(wide))
    bed = DiskReload(model, lambda: load(wide))
    bed.sleep()

    def refuse(weight: Tensor) -> Tensor:
        raise MemoryError

    if seen:
        monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: SIZE - 1)
    else:
        monkeypatch.setattr(packed_linear, "_reorder_weight", refuse)
    bed.wake()
    assert all(layer.packed.weight is None for layer in packed_in(model))
    assert torch.equal(logits(model), before)


# ---------------------------------------------------------------- whether it is done


def test_by_itself_where_it_has_been_seen_to_help(wide: Path, amd: Callable[..., None]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert pack_layers(load(wide), spec_of(wide, None)) == SIZE
        assert pack_layers(load(wide), spec_of(wide, False)) == 0
        torch.set_num_threads(5)
        assert pack_layers(load(wide), spec_of(wide, None)) == 0
        assert pack_layers(load(wide), spec_of(wide)) == SIZE
        torch.set_num_threads(2)
        amd("GenuineIntel")
        assert pack_layers(load(wide), spec_of(wide, None)) == 0
        amd("AuthenticAMD", "fpu avx2")
        assert pack_layers(load(wide), spec_of(wide, None)) == 0
        assert pack_layers(load(wide), spec_of(wide)) == SIZE
    finally:
        torch.set_num_threads(threads)


def test_a_small_model_is_left_alone(tiny_model: Path, amd: Callable[..., None]) -> None:
    assert pack_layers(load(tiny_model), spec_of(tiny_model, None)) == 0


TAKEN = SIZE + packed_linear._KERNELS_BYTES
CLAIM = TAKEN + SIZE + packed_linear._REST_BYTES


@pytest.mark.parametrize(
    ("available", "claim", "cache", "by_itself", "asked"),
    [
        (4 * TAKEN, 0, None, True, True),
        (4 * TAKEN - 4, 0, None, False, True),
        (4 * TAKEN, 0, 4, False, True),
        (TAKEN - 1, 0, None, False, False),
        (TAKEN, 0, 1, False, False),
        (4 * TAKEN, CLAIM, None, True, True),
        (4 * TAKEN, CLAIM - 1, None, False, False),
    ],
)
def test_memory_decides(
    wide: Path,
    amd: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    claim: int,
    cache: int | None,
    by_itself: bool,
    asked: bool,
) -> None:
    def spec(wish: bool | None) -> WorkerSpec:
        options = {"packed_weights": wish, "kv_cache_bytes": cache}
        return make_spec(wide, options=options, host_memory_bytes=claim)

    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: available)
    assert bool(pack_layers(load(wide), spec(None))) == by_itself
    if asked:
        assert pack_layers(load(wide), spec(True))
    else:
        with pytest.raises(LoadError, match=r"packed they take .* more"):
            pack_layers(load(wide), spec(True))


def test_where_packing_fails_half_way_none_is_packed(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(wide)
    before = logits(model)
    real, made = packed_linear._reorder_weight, list[Tensor]()

    def give_up(weight: Tensor) -> Tensor:
        if len(made) == 8:  # one of each of the five shapes is tried before
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        made.append(real(weight))
        return made[-1]

    monkeypatch.setattr(packed_linear, "_reorder_weight", give_up)
    with pytest.raises(LoadError, match="there is no memory for it"):
        pack_layers(model, spec_of(wide))
    assert len(made) == 8
    assert not packed_in(model)
    assert torch.equal(logits(model), before)


def test_workers_of_one_instance_pack_one_after_the_other(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(wide, socket=str(tmp_path / "a.sock"))
    real, free = packed_linear._reorder_weight, list[bool]()

    def reordered(weight: Tensor) -> Tensor:
        free.append(is_free())
        return real(weight)

    def is_free() -> bool:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            return file_lock.take_lock(other)
        finally:
            os.close(other)

    monkeypatch.setattr(packed_linear, "_reorder_weight", reordered)
    assert pack_layers(load(wide), spec) == SIZE
    assert free and not any(free)
    assert is_free()


def test_one_that_is_stuck_is_not_waited_for_for_ever(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = os.open(tmp_path, os.O_RDONLY)
    assert file_lock.take_lock(stuck)
    monkeypatch.setattr(packed_linear, "_WAIT_S", 0.3)
    began_s = time.monotonic()
    try:
        assert pack_layers(load(wide), spec_of(wide, socket=str(tmp_path / "a.sock"))) == SIZE
        assert time.monotonic() - began_s >= 0.3  # it was waited for
    finally:
        os.close(stuck)


@pytest.mark.parametrize("kind", ["wrong", "refused", "none"])
def test_where_it_cannot_be_had_that_is_said(
    wide: Path, amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = load(wide)
    before = logits(model)

    def refuse(weight: Tensor) -> Tensor:
        raise NotImplementedError("Could not run 'mkldnn::_reorder_linear_weight'\nand more")

    said = {
        "wrong": r"a product of \(\d+, \d+\) is off by",
        "refused": "torch cannot pack them: Could not run 'mkldnn::_reorder_linear_weight'$",
        "none": "no linear layers",
    }[kind]
    if kind == "wrong":
        monkeypatch.setattr(packed_linear, "_measure_error", lambda layer: 0.5)
    elif kind == "refused":
        monkeypatch.setattr(packed_linear, "_reorder_weight", refuse)
        said = said.replace("$", r"\. Without that option")
    else:
        monkeypatch.setattr(packed_linear, "_LEAST_BYTES", 2**40)
    assert torch.equal(logits(model), before)
    with pytest.raises(LoadError, match=said):
        pack_layers(model, spec_of(wide))


def test_a_layer_that_is_off_is_found_out(wide: Path) -> None:
    layer = load(wide).model.layers[0].mlp.up_proj
    assert packed_linear._measure_error(layer) < 1e-5
    real = packed_linear._multiply_padded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "_multiply_padded", lambda *given: real(*given) * 1.001)
        assert packed_linear._measure_error(layer) == pytest.approx(1e-3, rel=0.1)
