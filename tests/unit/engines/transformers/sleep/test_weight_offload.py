"""On a CPU: what was mapped is left to the kernel, what was converted is dropped and read again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from servekit.engines.transformers import weights
from servekit.engines.transformers.sleep import weight_offload
from servekit.engines.transformers.sleep.weight_offload import (
    DiskReload,
    tensors_of,
    unique_storages,
)
from tests.unit.engines.harness import Harness, make_spec, write_tiny_llama

MIB = 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that its weights are seen in this process's memory."""
    return write_tiny_llama(tmp_path_factory.mktemp("large"), hidden_size=4096)


def loader(folder: Path, dtype: str) -> Callable[[], Any]:
    spec = make_spec(folder, dtype=dtype)
    return lambda: weights.load_model(folder, spec, None, lambda progress: None)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    return found


def size_of(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(model))


@pytest.mark.lane("long")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_memory_is_given_back_and_it_says_the_same_again(large: Path, dtype: str) -> None:
    load = loader(large, dtype)
    model = load()
    before = logits(model)
    bed = DiskReload(model, load)
    awake = resident()
    bed.sleep()
    ctypes.CDLL(None).malloc_trim(0)
    assert awake - resident() > 0.6 * size_of(model) > 20 * MIB
    bed.wake()
    assert torch.equal(logits(model), before)


@pytest.mark.lane("long")
def test_twice_is_as_once(large: Path) -> None:
    load = loader(large, "bfloat16")
    model = load()
    before = logits(model)
    bed = DiskReload(model, load)
    for _ in range(2):
        bed.sleep()
        bed.sleep()
        bed.wake()
        bed.wake()
    assert torch.equal(logits(model), before)


def test_weights_that_were_written_to_are_kept(large: Path) -> None:
    load = loader(large, "float32")
    model = load()
    weight = next(iter(model.parameters()))
    assert not weight.untyped_storage().resizable()  # mapped
    with torch.no_grad():
        weight[0, 0] = 42.0
    DiskReload(model, load).sleep()
    assert weight[0, 0] == 42.0


def test_what_is_shared_is_counted_once() -> None:
    whole = torch.zeros(10)
    assert len(unique_storages([whole, whole[2:], whole.view(5, 2), torch.zeros(3)])) == 2


def test_of_a_sharded_tensor_the_part_of_this_rank_is_taken() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.zeros(10), mesh, [Shard(0)])
        [storage] = unique_storages([sharded])
        assert storage.nbytes() == 40
    finally:
        dist.destroy_process_group()


def test_a_load_that_fails_leaves_it_asleep_to_be_woken_later(large: Path) -> None:
    load = loader(large, "bfloat16")
    model = load()
    before = logits(model)
    again: list[Callable[[], Any]] = [_fail, load]
    bed = DiskReload(model, lambda: again.pop(0)())
    bed.sleep()
    with pytest.raises(MemoryError):
        bed.wake()
    bed.wake()
    assert torch.equal(logits(model), before)


def _fail() -> Any:
    raise MemoryError("none left")


def test_the_kernels_list_is_read() -> None:
    """Source: proc(5), /proc/PID/smaps."""
    found = list(weight_offload._file_mappings(Path("/proc/self/smaps")))
    assert found
    assert all(start < end for start, end, _ in found)


def test_adapters_are_left_where_they_are_on_a_cpu(harness: Callable[..., Harness]) -> None:
    one = harness(options={"batching": "continuous"})
    before = one.generate("The quick", max_tokens=12, ignore_eos=True)
    one.engine.sleep()
    one.engine.wake()
    assert one.generate("The quick", max_tokens=12, ignore_eos=True) == before
