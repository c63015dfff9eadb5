from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.engines.vllm import arguments
from servekit.errors import LoadError
from servekit.wire.adapters import AdapterSpec
from tests.unit.engines.harness import make_spec

GIB = 2**30


def made(free: int = 80 * GIB, *, embeds: bool = False, **fields: Any) -> dict[str, Any]:
    spec = make_spec("/model", engine="vllm", device="cuda", **fields)
    return arguments.arguments(spec, Path("/model"), (80 * GIB, free), embeds=embeds)


def test_a_gpu_of_its_own_is_used_but_for_a_margin() -> None:
    assert made()["gpu_memory_utilization"] == pytest.approx(0.95 - 0.75 / 80)
    assert made()["max_model_len"] == -1
    assert "enable_lora" not in made()


def test_a_claim_is_kept_to_with_what_vllm_does_not_count() -> None:
    share = made(memory_bytes=20 * GIB)["gpu_memory_utilization"]
    assert share * 80 == pytest.approx(20 - 0.75)
    several = made(memory_bytes=20 * GIB, gpus=2, parallel="tensor")
    assert several["gpu_memory_utilization"] * 80 == pytest.approx(20 - 1.75)
    assert (several["tensor_parallel_size"], several["distributed_executor_backend"]) == (2, "mp")


def test_no_more_than_is_free() -> None:
    assert made(10 * GIB)["gpu_memory_utilization"] * 80 == pytest.approx(9.25)


@pytest.mark.parametrize(("claim", "permanent"), [(GIB // 2, True), (20 * GIB, False)])
def test_too_little_is_refused_with_the_figures(claim: int, permanent: bool) -> None:
    with pytest.raises(
        LoadError, match=r"of which 0\.5 GiB are free, and vLLM needs 0\.75"
    ) as told:
        made(GIB // 2, memory_bytes=claim)
    assert told.value.permanent is permanent


def test_options_are_vllms() -> None:
    options = {"slots": 7, "max_batch_tokens": 512, "prefix_caching": False, "max_loras": 3}
    found = made(options=options, max_context=100, sleeps=True)
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (7, 512)
    assert (found["enable_prefix_caching"], found["max_model_len"]) == (False, 100)
    assert (found["enable_lora"], found["max_loras"], found["enable_sleep_mode"]) == (True, 3, True)


def test_adapters_in_the_file_make_room_for_some() -> None:
    found = made(adapters=(AdapterSpec("a", "/a"),))
    assert (found["max_loras"], found["max_lora_rank"]) == (8, 64)
    embeds = made(adapters=(AdapterSpec("a", "/a"),), embeds=True)
    assert embeds["runner"] == "pooling" and "enable_lora" not in embeds


def test_without_a_gpu_it_is_said() -> None:
    with pytest.raises(LoadError, match="vLLM needs a GPU, and NVML says"):
        arguments.memory_of("0")
