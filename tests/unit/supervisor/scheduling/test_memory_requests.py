"""What a worker claims, of which GPU or of the host, and how many workers there may be."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import (
    Assignment,
    claim_bytes,
    claims_of,
    device,
    host_claim_bytes,
    least,
    max_replicas,
    reserve_bytes,
    room_bytes,
    with_fixed_replicas,
)
from servekit.system.gpu.gpus import Gpu

GIB = 2**30
SMALL = Gpu(0, "GPU-a", "A10", 24 * GIB, 1)
LARGE = Gpu(1, "GPU-b", "H200", 100 * GIB, 1)
THERE = Gpu(2, "GPU-c", "H200", 100 * GIB, 1, (), "10.0.0.5")


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": "x", "engine": "echo", **keys})


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((), "cpu"),
        ((SMALL,), "GPU 0 (A10)"),
        ((THERE,), "GPU 2 (H200) on 10.0.0.5"),
        ((SMALL, LARGE), "GPUs 0, 1 (A10, H200)"),
        ((THERE, THERE), "GPUs 2, 2 (H200) on 10.0.0.5"),
    ],
)
def test_a_device_is_named_with_its_kind_and_its_node(gpus: tuple[Gpu, ...], words: str) -> None:
    assert device(gpus) == words
    assert Assignment("m", 0, gpus, None).device == words


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 GPU of another machine"), (2, "2 GPUs of another machine")]
)
def test_a_worker_elsewhere_is_named_by_what_it_will_get(count: int, words: str) -> None:
    place = Assignment("m", 3, (), None, elsewhere=count)
    assert (place.name, place.device) == ("m/3", words)


# ---------------------------------------------------------------- bytes


def test_a_reserve_is_no_larger_than_the_gpu() -> None:
    assert reserve_bytes(SMALL, None) == 0
    assert reserve_bytes(SMALL, "2GiB") == 2 * GIB
    assert reserve_bytes(LARGE, "5%") == 5 * GIB
    assert reserve_bytes(SMALL, "30GiB") == 24 * GIB
    assert [room_bytes(SMALL, reserve) for reserve in (None, "2GiB", "30GiB")] == [
        24 * GIB,
        22 * GIB,
        0,
    ]


def test_a_worker_claims_what_its_model_says_or_all_that_is_not_reserved() -> None:
    slot = (SMALL, LARGE)
    assert claims_of(model(), slot, "2GiB") == (22 * GIB, 98 * GIB)
    assert claims_of(model(memory="20GiB"), slot, "2GiB") == (20 * GIB, 20 * GIB)
    assert claims_of(model(memory="50%"), slot, "2GiB") == (12 * GIB, 50 * GIB)
    assert claims_of(model(), (), None) == ()
    assert claim_bytes(model(memory="40GiB"), SMALL, None) == 40 * GIB, "too much is told later"


def test_a_worker_on_the_cpu_claims_host_memory_only_where_the_file_says_so() -> None:
    assert host_claim_bytes(model(), 64 * GIB) == 0
    assert host_claim_bytes(model(memory="3GiB"), 64 * GIB) == 3 * GIB
    assert host_claim_bytes(model(memory="25%"), 64 * GIB) == 16 * GIB
    assert host_claim_bytes(model(memory="25%"), 0) == 0, "the host's memory is not known"


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize(
    ("replicas", "fewest", "most"),
    [
        ("auto", 1, 1),
        (3, 3, 3),
        ({"min": 2, "max": 5}, 2, 5),
        ({"min": 0, "max": 5}, 1, 5),  # none only while it is not loaded
    ],
)
def test_how_many_workers_a_model_has_at_least_and_at_most(
    replicas: Any, fewest: int, most: int
) -> None:
    one = model(replicas=replicas, load="on_demand")
    assert (least(one), max_replicas(one)) == (fewest, most)


def test_a_range_becomes_the_number_that_there_is_now() -> None:
    scaled = model(replicas={"min": 2, "max": 5})
    for there, found in ((0, 2), (1, 2), (4, 4), (9, 5)):
        [one] = with_fixed_replicas([scaled], {"m": there})
        assert one.replicas == found
    [one] = with_fixed_replicas([scaled], {"another": 4})
    assert one.replicas == 2
    fixed, free = model(replicas=3), model()
    assert with_fixed_replicas([fixed, free], {"m": 4}) == [fixed, free]
