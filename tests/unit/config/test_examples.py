"""Ready-made files have a place for each worker on the machine that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.scheduling.placement import place
from servekit.system.gpus import Gpu

CONFIGS = Path(__file__).parents[3] / "configs"
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("vllm", 1, 24),
        ("rag", 1, 24),
        ("one-gpu", 1, 24),
        ("two-gpus", 2, 24),
        ("workstation-24gb", 1, 24),
    ],
)
def test_a_file_fits_its_gpus(name: str, count: int, total: int) -> None:
    gpus = [Gpu(i, f"GPU-{i}", "A GPU", total * GIB, total * GIB) for i in range(count)]
    config = load_config(CONFIGS / f"{name}.yaml")
    places = place(config.models, gpus, 8, {}, config.gpus.reserve, {})
    assert {one.model for one in places} == {model.name for model in config.models}
    assert all(len(one.gpus) == 1 for one in places)


@pytest.mark.parametrize("name", ["autoscaling", "demo", "echo", "keys", "llamacpp"])
def test_a_file_for_any_machine_has_a_plan(name: str) -> None:
    assert Source(CONFIGS / f"{name}.yaml").plan(()).places
