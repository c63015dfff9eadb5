"""Ready-made files have a place for each worker on the machine that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from servekit.errors import ConfigError
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.scheduling.placement import place
from servekit.system.gpu.gpus import Gpu

CONFIGS = Path(__file__).parents[3] / "configs"
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "count", "each"),
    [
        ("vllm", 1, 1),
        ("vllm-two-gpus", 2, 2),
        ("rag", 1, 1),
        ("one-gpu", 1, 1),
        ("two-gpus", 2, 1),
        ("workstation-24gb", 1, 1),
    ],
)
def test_a_file_fits_its_gpus_of_24_gb(name: str, count: int, each: int) -> None:
    gpus = make_gpus(count, 24)
    config = load_config(CONFIGS / f"{name}.yaml")
    places = place(config.models, gpus, 8, {}, config.gpus.reserve, {})
    assert {one.model for one in places} == {model.name for model in config.models}
    assert all(len(one.gpus) == each for one in places)


def make_gpus(count: int, total: int) -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}", "A GPU", total * GIB, total * GIB) for i in range(count)]


@pytest.mark.parametrize(("profile", "model"), [("coding", "coder"), ("writing", "chat")])
def test_a_profile_fits_48_gb_and_all_models_do_not(profile: str, model: str) -> None:
    source = Source(CONFIGS / "workstation-48gb.yaml", profile=profile)
    places = source.plan(make_gpus(1, 48)).places
    assert {one.model for one in places} == {model, "embed"}
    with pytest.raises(ConfigError, match="no place was found"):
        Source(source.path).plan(make_gpus(1, 48))


@pytest.mark.parametrize("name", ["autoscaling", "demo", "echo", "keys", "llamacpp"])
def test_a_file_for_any_machine_has_a_plan(name: str) -> None:
    assert Source(CONFIGS / f"{name}.yaml").plan(()).places
