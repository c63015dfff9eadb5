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
        ({"replicas": {"min": 0, "max": 2}}, "with 0 replicas no request is answered"),
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


COMMAND = {"engine": "command", "options": {"command": "sh --port {port}"}}


def command(words: str | list[str], **more: Any) -> dict[str, Any]:
    return {"engine": "command", "options": {"command": words, **more}}


def remote(**more: Any) -> dict[str, Any]:
    return {"engine": "openai", "options": {"url": "http://a/v1", **more}}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (command("sh --port {prot}"), "{prot} is no placeholder; did you mean {port}?"),
        (command("sh {port} {x}"), "{x} is no placeholder; there are {path}, {port}, {host},"),
        (command("sh --port 8000"), "{port} is missing: servekit chooses a free port"),
        (command([]), "it names no program"),
        (command("'sh {port}"), "No closing quotation"),
        (command("llama-srever {port}"), "there is no program llama-srever in PATH"),
        (command("./none {port}"), "that can be run"),
        (command("sh {port}", prot=1), "unknown key"),
        ({"engine": "command"}, "models[0].options"),
        (command("sh {port}", endpoints=["/v1/../sleep"]), "endpoints"),
        (command("sh {port}", endpoints=["/v1/*/b"]), "endpoints"),
        (command("sh {port}", endpoints=["v1/score"]), "endpoints"),
        (command("sh {port}", endpoints=["/*"]), "endpoints"),
        (command("sh {port}", key_environment="A-B"), "key_environment"),
        (remote(endpoints=["/rerank"]), "endpoints"),
        (COMMAND | {"dtype": "float16"}, "set this in its command"),
        (COMMAND | {"idle_sleep_s": 5}, "it needs `sleep` and `wake` in `options`"),
        (COMMAND | {"adapters": [{"name": "x", "path": "x"}]}, "has no adapters"),
    ],
)
def test_commands_that_are_wrong(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, **keys)


@pytest.mark.parametrize(
    "keys",
    [
        command("sh {port} {path} {host} {name} {gpus} '{\"a\": 1}'"),
        command(["sh", "--port={port}"], sleep="/sleep?level=1", wake="/wake_up")
        | {"idle_sleep_s": 5},
        COMMAND | {"gpus_per_replica": 2, "max_context": 100, "memory": "1GiB"},
    ],
)
def test_commands_that_are_right(tmp_path: Path, keys: dict[str, Any]) -> None:
    read(tmp_path, **keys)


def test_a_program_with_a_slash_is_relative_to_the_file(tmp_path: Path) -> None:
    program = tmp_path / "serve.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "servekit.yaml"
    path.write_text(json.dumps({"models": [{**MODEL, **command("./serve.sh {port}")}]}))
    config, _ = load_here(path, Machine(False, lambda module: False))
    assert config.models[0].options["command"] == [str(program), "{port}"]


def test_a_command_is_found_by_auto(tmp_path: Path) -> None:
    read(tmp_path, **COMMAND | {"engine": "auto"})


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ({"coding": ["m", "gone"]}, "profiles.coding[1]: no model is called 'gone'; there are: m."),
        ({"coding": []}, "profiles.coding: must be a list of at least 1, but is an empty list."),
        ({"all": ["m"]}, "profiles.all: 'all' stands for all models; give the profile another"),
        ({"a b": ["m"]}, "profiles.a b: a name begins with a letter or digit"),
    ],
)
def test_profiles_that_are_wrong(tmp_path: Path, profiles: dict[str, Any], said: str) -> None:
    path = tmp_path / "servekit.yaml"
    model = {"name": "m", "path": "m", "engine": "echo"}
    path.write_text(json.dumps({"models": [model], "profiles": profiles}))
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_here(path, Machine(False, lambda module: False))
