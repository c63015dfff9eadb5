"""Where one more replica has room: beside all that is there, and all that may come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.autoscaling.capacity import KEPT_BYTES, LocalCapacity, NoCapacity
from servekit.supervisor.deployments.config_diff import Slots
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import claims_of, room_bytes
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu

GIB = 2**30
GPUS = tuple(Gpu(index, f"GPU-{index}", "H200", 100 * GIB, 100 * GIB) for index in range(3))


def model(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"name": name, "path": "p", "engine": "transformers", "replicas": {"max": 9}, **keys}
    )


def deployment(
    model: ModelConfig, *slots: int, rss_bytes: int = 0, there: bool = True
) -> Deployment:
    """With a replica on each of these GPUs; none: one on the CPU."""
    planned: Slots = tuple((GPUS[index],) for index in slots) or ((),)
    living = [
        SimpleNamespace(place=SimpleNamespace(gpus=slot), rss_bytes=rss_bytes, state="ready")
        for slot in planned
    ]
    made = SimpleNamespace(model=model, planned=planned, living=living if there else [])
    made.slots = lambda: planned
    return cast(Deployment, made)


def one_more(*deployments: Deployment, dead: dict[str, dict[str, int]] | None = None) -> object:
    """For the first of them: the index of a GPU, () for the CPU, or why not."""
    ledger = GpuReservations(GPUS)
    for name, claim in (dead or {}).items():
        ledger.reserve(name, claim)

    def has_room(model: ModelConfig, slot: tuple[Gpu, ...]) -> bool:
        return all(
            sum(
                claim
                for one in deployments
                for living in one.living
                for on, claim in zip(
                    living.place.gpus, claims_of(one.model, living.place.gpus, None), strict=True
                )
                if on == gpu
            )
            + claims_of(model, (gpu,), None)[0]
            <= room_bytes(gpu, None)
            for gpu in slot
        )

    here = LocalCapacity(
        cast(
            DeploymentManager,
            SimpleNamespace(
                plan=SimpleNamespace(config=SimpleNamespace(gpus=SimpleNamespace(reserve=None))),
                gpus=GPUS,
                served=list(deployments),
                all_deployments=lambda: list(deployments),
                pool=SimpleNamespace(
                    has_room=has_room,
                    claims=lambda model, slot: claims_of(model, slot, None),
                    gate=SimpleNamespace(ledger=ledger),
                ),
            ),
        )
    )
    found = here.one_more(deployments[0])
    if isinstance(found, NoCapacity):
        return found.reason
    return found[0].index if found else ()


NO_GPU = "no room: no GPU that it may use has room for the claim of a replica"


@pytest.mark.parametrize(
    ("deployments", "expected"),
    [
        ([deployment(model("a"), 0)], 1),
        ([deployment(model("a", gpus=[0, 2]), 0)], 2),
        ([deployment(model("a", gpus=[0]), 0)], NO_GPU),
        ([deployment(model("a"), 0), deployment(model("b"), 1, 2)], NO_GPU),
        ([deployment(model("a"), 0), deployment(model("b"), 1)], 2),
        # by claims: beside another, and beside its own where all GPUs have one
        ([deployment(model("a", memory="40%"), 0), deployment(model("b", memory="50%"), 1, 2)], 1),
        ([deployment(model("a", memory="40%"), 0, 1, 2)], 0),
        ([deployment(model("a", memory="60%"), 0, 1, 2)], NO_GPU),
        ([deployment(model("a", memory="40%"), 0), deployment(model("b", memory="70%"), 1, 2)], 0),
        # one that is away keeps its place: else nobody would make room for it
        (
            [
                deployment(model("a"), 0),
                deployment(model("b", load="on_demand"), 1, there=False),
                deployment(model("c"), 2),
            ],
            NO_GPU,
        ),
        # two that come and go may overlap, as long as only one of them is there
        (
            [
                deployment(model("a", load="on_demand"), 0),
                deployment(model("b", load="on_demand"), 1, 2, there=False),
            ],
            1,
        ),
        (
            [
                deployment(model("a", load="on_demand"), 0),
                deployment(model("b", load="on_demand"), 1, 2),
            ],
            NO_GPU,
        ),
    ],
)
def test_gpus(deployments: list[Deployment], expected: object) -> None:
    assert one_more(*deployments) == expected


def test_what_a_dead_worker_may_still_hold_is_nobodys_yet() -> None:
    own = deployment(model("a", gpus=[0, 1]), 0)
    assert one_more(own, dead={"a/1": {"GPU-1": 100 * GIB}}) == NO_GPU


@pytest.mark.parametrize(
    ("keys", "there", "expected"),
    [
        ({}, 5 * GIB + KEPT_BYTES, ()),
        ({}, 3 * GIB + KEPT_BYTES, "a replica takes 4.0 GiB of this machine's memory, which has 3"),
        ({"memory": "25GiB"}, 0, ()),
        ({"memory": "60GiB"}, 0, "a replica takes 60.0 GiB of this machine's memory, which has 40"),
    ],
)
def test_the_cpu(
    keys: dict[str, Any], there: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: there)
    monkeypatch.setattr(cgroup, "total_memory_bytes", lambda: 100 * GIB)
    found = one_more(deployment(model("a", device="cpu", **keys), rss_bytes=4 * GIB))
    assert found == expected if expected == () else str(expected) in str(found)


@pytest.mark.parametrize("there", [8 * GIB, 13 * GIB])
def test_on_the_cpu_a_replica_that_is_starting_has_not_taken_its_memory_yet(
    there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: there)
    own, other = (deployment(model(name, device="cpu"), rss_bytes=4 * GIB) for name in "ab")
    for one, rss_bytes in ((own, 0), (other, GIB)):
        coming: Any = SimpleNamespace(
            place=SimpleNamespace(gpus=()), rss_bytes=rss_bytes, state="starting"
        )
        one.living.append(coming)
    told = "a replica takes 4.0 GiB of this machine's memory, which has 0 B left"
    assert one_more(own, other) == (() if there > 12 * GIB else f"no room: {told}")
