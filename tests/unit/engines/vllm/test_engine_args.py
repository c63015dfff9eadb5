from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.vllm import engine_args
from servekit.errors import LoadError
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import make_spec

GIB = 2**30


def made(free: int = 80 * GIB, *, embeds: bool = False, **fields: Any) -> dict[str, Any]:
    spec = make_spec("/model", engine="vllm", device="cuda", **fields)
    return engine_args.engine_arguments(spec, Path("/model"), (80 * GIB, free), embeds=embeds)


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
        LoadError, match=r"of which 512 MiB are free, and vLLM needs 768 MiB"
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
        engine_args.memory_of("0")


def on_cpu(folder: Path, free: int = 16 * GIB, **fields: Any) -> dict[str, Any]:
    spec = make_spec(str(folder), engine="vllm", device="cpu", **fields)
    return engine_args.engine_arguments(spec, folder, (free, free), embeds=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration whose tokens take 2 × 2 layers × 2 heads × 8 numbers in the cache."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 32, "max_position_embeddings": 2048, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def test_on_a_cpu_it_is_exact_and_awake_and_asks_for_no_share_of_a_gpu(folder: Path) -> None:
    found = on_cpu(folder, sleeps=True)
    assert (found["dtype"], found["enforce_eager"], found["max_num_seqs"]) == ("float32", True, 32)
    assert found["distributed_executor_backend"] == "mp"
    assert not {"gpu_memory_utilization", "enable_sleep_mode"} & found.keys()
    asked = on_cpu(folder, dtype="bfloat16", options={"enforce_eager": False, "slots": 3})
    assert (asked["dtype"], asked["enforce_eager"], asked["max_num_seqs"]) == ("bfloat16", False, 3)


def test_on_a_cpu_the_cache_is_what_slots_can_use_within_the_memory(folder: Path) -> None:
    token = 2 * 2 * 2 * 8 * 4
    assert on_cpu(folder)["kv_cache_memory_bytes"] == 32 * 512 * token
    one = on_cpu(folder, options={"slots": 1})  # a full context, and what blocks round up
    assert one["kv_cache_memory_bytes"] == (2048 + 256) * token
    assert on_cpu(folder, dtype="bfloat16")["kv_cache_memory_bytes"] == 32 * 512 * token // 2
    assert on_cpu(folder, 10**6)["kv_cache_memory_bytes"] == 400_000
    claimed = on_cpu(folder, host_memory_bytes=10**6)
    assert claimed["kv_cache_memory_bytes"] == 400_000
    stated = on_cpu(folder, options={"kv_cache_bytes": 2**21})
    assert stated["kv_cache_memory_bytes"] == 2**21


def test_on_a_cpu_a_layer_with_a_window_has_room_for_a_pass_beside_it(folder: Path) -> None:
    """vLLM stores a pass whole, and refuses a cache that has no room for one full context."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    config["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    for batch in (2048, 512):
        given = on_cpu(folder, options={"slots": 1, "max_batch_tokens": batch})
        tokens = 16384 + 256 + 128 + batch + 256
        assert given["kv_cache_memory_bytes"] == 2 * 2 * 8 * 4 * tokens


def test_on_a_cpu_a_model_of_an_unknown_shape_has_a_cache_too(tmp_path: Path) -> None:
    assert on_cpu(tmp_path)["kv_cache_memory_bytes"] == engine_args.CPU_CACHE_BYTES


def test_passed_arguments_are_not_those_of_servekit() -> None:
    spec = make_spec("/m", engine="vllm", options={"engine_args": {"block_size": 64}})
    assert engine_args.passed_arguments(spec) == {"block_size": 64}
    with pytest.raises(LoadError, match="servekit sets dtype itself: write the model's `dtype`"):
        made(options={"engine_args": {"dtype": "float16"}})


def test_pipeline_stages_share_the_gpus_with_tensor_parallelism() -> None:
    options = {"engine_args": {"pipeline_parallel_size": 2}}
    assert made(gpus=4, parallel="tensor", options=options)["tensor_parallel_size"] == 2
    wrong: tuple[Any, ...] = (3, 0, "2")
    for stages in wrong:
        with pytest.raises(LoadError, match=r"has to divide the GPUs of a replica"):
            made(gpus=4, options={"engine_args": {"pipeline_parallel_size": stages}})
