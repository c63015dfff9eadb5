"""The keys of `launcher: ray`, and what they rule out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.config.schema import Config
from servekit.errors import ConfigError

MODEL = {"name": "m", "engine": "echo", "path": "m"}


def read(folder: Path, has: tuple[str, ...] = ("ray", "cryptography"), **sections: Any) -> Config:
    path = folder / "servekit.yaml"
    path.write_text(json.dumps({"models": [MODEL], **sections}))
    return load_here(path, Machine(False, lambda module: module in has))[0]


def test_local_is_the_default_and_needs_no_ray(tmp_path: Path) -> None:
    assert read(tmp_path, has=()).launcher == "local"


def test_ray_alone_is_enough(tmp_path: Path) -> None:
    config = read(tmp_path, launcher="ray", ray={"address": "10.0.0.1:6379"})
    assert config.ray is not None and config.ray.strategy == "PACK"
    assert read(tmp_path, launcher="ray").ray is None


@pytest.mark.parametrize("missing", ["ray", "cryptography"])
def test_a_missing_extra_is_named(tmp_path: Path, missing: str) -> None:
    has = tuple({"ray", "cryptography"} - {missing})
    with pytest.raises(ConfigError, match=rf"{missing} is not installed; pip install 'servekit"):
        read(tmp_path, has=has, launcher="ray")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", ":6379", "head:port"])
def test_an_address_is_that_of_the_head(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT of the cluster's head"):
        read(tmp_path, launcher="ray", ray={"address": address})


def test_a_cluster_without_the_launcher_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only `launcher: ray` reads this"):
        read(tmp_path, ray={})


@pytest.mark.parametrize(("key", "value"), [("gpus", [0]), ("memory", "1GiB"), ("standby", True)])
def test_what_ray_decides_is_not_for_the_file_to_say(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ConfigError, match="Ray says which"):
        read(tmp_path, launcher="ray", models=[{**MODEL, key: value}])


def test_certificates_outlive_the_time_without_a_supervisor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has to be 180 or more, thrice grace_s"):
        read(tmp_path, launcher="ray", ray={"certificate_life_s": 60})
    config = read(tmp_path, launcher="ray", ray={"certificate_life_s": 60, "grace_s": 20})
    assert config.ray is not None and config.ray.certificate_life_s == 60


def test_a_reserve_of_each_gpu_is_not_for_the_file_to_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Ray says which"):
        read(tmp_path, launcher="ray", gpus={"reserve": "1GiB"})
