"""GPUs that another program's file gives a model, on machines that have them and that do not."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.cli.init.brought_models import BroughtModel
from servekit.cli.init.gpu_pins import of_docker, pin_model
from servekit.system.gpu.gpus import Gpu

GPUS = tuple(Gpu(n, f"GPU-{n}{n}", "H100", 80 * 2**30, 80 * 2**30) for n in range(2))


def pinned(
    visible: str | None, gpus: tuple[Gpu, ...] = GPUS, per_replica: int = 0, **keys: Any
) -> BroughtModel:
    model = BroughtModel("m", dict(keys))
    pin_model(model, visible, gpus, per_replica=per_replica)
    return model


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("all", None),
        ("2", None),
        ("device=0", "0"),
        ('"device=0,1"', "0,1"),
        ("'device=GPU-3faa-1,2',capabilities=gpu", "GPU-3faa-1,2"),
    ],
)
def test_dockers_devices_are_read(value: str, devices: str | None) -> None:
    assert of_docker(value) == devices


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        ("1", {"gpus": [1], "replicas": 1}),
        ("0", {"gpus": [0], "replicas": 1}),
        ("GPU-11", {"gpus": ["GPU-11"], "replicas": 1}),
        (" 1 , 0 ", {"gpus": [1, 0], "replicas": 1, "gpus_per_replica": 2}),
        ("", {"device": "cpu"}),
        ("-1", {"device": "cpu"}),
        (" , ", {"device": "cpu"}),
    ],
)
def test_gpus_of_this_machine_become_keys(visible: str, keys: dict[str, Any]) -> None:
    model = pinned(visible)
    assert (model.keys, model.hints, model.notes) == (keys, [], [])


def test_a_number_of_replicas_stays() -> None:
    assert pinned("0,1", per_replica=1, replicas=2).keys == {"replicas": 2, "gpus": [0, 1]}


@pytest.mark.parametrize("visible", ["2", "0,2", "GPU-22"])
def test_gpus_that_are_not_here_become_a_comment(visible: str) -> None:
    model = pinned(visible, memory="40%", gpus_per_replica=2)
    assert model.keys == {}
    assert model.notes == [f"CUDA_VISIBLE_DEVICES={visible}: this machine has no such GPUs"]
    assert model.hints[0] == f"gpus: [{', '.join(visible.split(','))}]"
    assert "replicas: 1" in model.hints
    assert "gpus: [0]" in pinned("0", ()).hints


def test_an_index_is_no_uuid() -> None:
    odd = (Gpu(0, "7", "H100", 1, 1),)
    assert pinned("7", odd).keys == {}


@pytest.mark.parametrize(
    ("gpus", "per_replica", "keys", "hints"),
    [
        (GPUS, 0, {"replicas": 1, "gpus_per_replica": 2}, []),
        (GPUS, 1, {}, []),
        (GPUS, 2, {"replicas": 1, "gpus_per_replica": 2}, []),
        (GPUS, 4, {}, ["gpus_per_replica: 4"]),
        (GPUS[:1], 0, {}, []),
        ((), 0, {}, []),
        ((), 2, {}, ["gpus_per_replica: 2"]),
    ],
)
def test_a_server_that_sees_all_gpus_is_spread_over_those_it_uses(
    gpus: tuple[Gpu, ...], per_replica: int, keys: dict[str, Any], hints: list[str]
) -> None:
    model = pinned(None, gpus, per_replica)
    assert (model.keys, model.hints) == (keys, hints)
    told = [f"{per_replica} GPUs: this machine has fewer"] if hints else []
    assert model.notes == told


def test_a_spread_that_is_too_wide_is_left_out() -> None:
    assert pinned(None, GPUS, 4, gpus_per_replica=4, replicas=1).keys == {"replicas": 1}
