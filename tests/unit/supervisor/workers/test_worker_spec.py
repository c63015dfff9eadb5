"""What a worker is told of its place."""

from __future__ import annotations

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_spec import digest_settings, make_worker_spec
from servekit.system.gpu.gpus import Gpu

GPUS = tuple(Gpu(index, f"GPU-{index}", "H200", 10, 10) for index in range(2))


@pytest.mark.parametrize(
    ("keys", "count", "expected"),
    [
        ({}, 0, ("cpu", 1, "")),
        ({}, 1, ("cuda", 1, "")),
        ({}, 2, ("cuda", 2, "tensor")),
        ({"parallel": "device_map"}, 2, ("cuda", 2, "device_map")),
        ({"parallel": "device_map"}, 1, ("cuda", 1, "")),
        ({"engine": "llamacpp"}, 2, ("cuda", 2, "split")),
        ({"gpus_per_replica": 2}, 0, ("cpu", 2, "tensor")),
        ({"gpus_per_replica": 2, "parallel": "device_map"}, 0, ("cpu", 1, "")),
        ({"gpus_per_replica": 2, "engine": "echo"}, 0, ("cpu", 1, "")),
    ],
)
def test_how_it_is_spread(
    keys: dict[str, object], count: int, expected: tuple[str, int, str]
) -> None:
    model = ModelConfig.model_validate({"name": "a", "path": "a", **keys})
    spec = make_worker_spec(model, Assignment("a", 0, GPUS[:count], None), "")
    assert (spec.device, spec.gpus, spec.parallel) == expected


@pytest.mark.parametrize(("count", "claim"), [(0, 3 * 2**30), (1, 0)])
def test_what_it_may_take_of_the_host(count: int, claim: int) -> None:
    model = ModelConfig.model_validate({"name": "a", "path": "a", "memory": "3GiB"})
    assert (
        make_worker_spec(model, Assignment("a", 0, GPUS[:count], None), "").host_memory_bytes
        == claim
    )
    unsaid = ModelConfig.model_validate({"name": "a", "path": "a"})
    assert not make_worker_spec(unsaid, Assignment("a", 0, (), None), "").host_memory_bytes


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, True),
        ({"slots": 9, "engine_args": {}}, True),
        ({"engine_args": {"max-cpu-loras": 4, "async_scheduling": False}}, True),
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, False),
        ({"engine_args": {"speculative_config": {"method": "ngram"}}}, False),
        ({"api": "server"}, False),
    ],
)
def test_the_generation_has_what_may_change_the_text(
    options: dict[str, object], same: bool
) -> None:
    def digest(options: dict[str, object]) -> str:
        keys = {"name": "a", "path": "a", "engine": "vllm", "options": options}
        return digest_settings(ModelConfig.model_validate(keys))

    assert (digest(options) == digest({})) is same


def test_the_generation_does_not_depend_on_how_arguments_are_written() -> None:
    def digest(arguments: dict[str, object]) -> str:
        keys = {"name": "a", "path": "a", "engine": "vllm", "options": {"engine_args": arguments}}
        return digest_settings(ModelConfig.model_validate(keys))

    assert digest({"kv-cache-dtype": "fp8", "seed": 1}) == digest(
        {"seed": 1, "--kv_cache_dtype": "fp8"}
    )


def test_the_generation_has_the_sampling_that_is_set_but_not_the_length() -> None:
    def digest(sampling: dict[str, object]) -> str:
        keys = {"name": "a", "path": "a", "sampling": sampling}
        return digest_settings(ModelConfig.model_validate(keys))

    assert digest({"max_tokens": 7}) == digest({"max_tokens": 8}) == digest({})
    assert digest({"temperature": 0.5, "max_tokens": 7}) == digest({"temperature": 0.5})
    assert digest({"temperature": 0.5}) != digest({})
