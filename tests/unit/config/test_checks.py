"""Keys that are right by themselves, and wrong together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from servekit.config.engines.installed import Machine
from servekit.config.load import load_here
from servekit.errors import ConfigError

MODEL = {"name": "m", "engine": "echo", "path": "m"}


def read(folder: Path, **keys: Any) -> None:
    path = folder / "servekit.yaml"
    path.write_text(json.dumps({"models": [{**MODEL, **keys}]}))
    load_here(path, Machine(False, lambda module: False))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"idle_sleep_s": 60, "idle_unload_s": 30}, "unloaded before it sleeps"),
        ({"replicas": {"min": 0, "max": 2}}, "0 replicas answer nobody"),
        ({"replicas": {"min": 3, "max": 2}}, "`min`, 3, is more than `max`, 2"),
        ({"scale": {"wait_s": 2.0}}, "only with `replicas: {min: …, max: …}`"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"idle_sleep_s": 30, "idle_unload_s": 60},
        {"replicas": {"min": 0, "max": 2}, "load": "on_demand"},
        {"replicas": {"min": 2, "max": 2}, "scale": {"wait_s": 2.0}},
    ],
)
def test_keys_that_agree(tmp_path: Path, keys: dict[str, Any]) -> None:
    read(tmp_path, **keys)
