"""The published schema says what the loader does, and every example conforms to both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from servekit.config.engines.options import ENGINE_OPTIONS
from servekit.config.json_schema import json_schema
from servekit.config.load import load_config
from servekit.config.schema import Config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*"))
VALIDATOR = jsonschema.Draft202012Validator(json_schema())

GOOD = {"name": "a", "path": "org/name"}
WRONG = [
    {},
    {"models": []},
    {"models": [{"name": "a"}]},
    {"models": [GOOD | {"replcas": 2}]},
    {"models": [GOOD | {"replicas": "two"}]},
    {"models": [GOOD | {"name": "bad name"}]},
    {"models": [GOOD | {"engine": "nope"}]},
    {"models": [GOOD | {"options": {"step_s": 1}}]},
    {"models": [GOOD | {"engine": "transformers", "options": {"step_s": 1}}]},
    {"models": [GOOD | {"engine": "echo", "options": {"threads": 1}}]},
    {"models": [GOOD | {"options": {"threads": "4"}}]},
    {"models": [GOOD | {"sampling": {"top_p": 2}}]},
    {"models": [GOOD], "server": {"port": 65536}},
    {"models": [GOOD], "sever": {}},
    {"models": [GOOD | {"idle_unload_s": "5 parsecs"}]},
    {"models": [GOOD | {"max_context": "4x"}]},
    {"models": [GOOD | {"replicas": "4k"}]},
]
SHORT = [
    {"models": [GOOD | {"load": "on_demand", "idle_unload_s": "5m", "max_context": "4k"}]},
    {"models": [GOOD | {"load": "on_demand", "idle_sleep_s": "1h30m", "timeout_s": "500ms"}]},
    {"models": [GOOD | {"load": "on_demand", "idle_unload_s": "2 min", "max_context": "1.5 K"}]},
    {"models": [{"name": "e", "engine": "echo", "options": {"step_s": "20ms"}}]},
]


def test_there_are_examples() -> None:
    assert {"demo.yaml", "echo.yaml", "two-gpus.yaml", "several-models.yaml"} <= {
        path.name for path in CONFIGS
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_loads_and_conforms(path: Path) -> None:
    config = load_config(path)
    assert path.read_text().startswith("# "), "an example begins by saying what it is"
    VALIDATOR.validate(yaml.safe_load(path.read_text()))
    for model in config.models:
        model.engine_options()


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json_schema()["title"] == "servekit configuration"


@pytest.mark.parametrize("data", WRONG, ids=str)
def test_what_is_wrong_is_wrong_to_both(data: dict[str, Any], tmp_path: Path) -> None:
    from servekit.errors import ConfigError

    assert not VALIDATOR.is_valid(data)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError):
        load_config(path)


@pytest.mark.parametrize("data", SHORT, ids=str)
def test_shorthands_are_right_to_both(data: dict[str, Any], tmp_path: Path) -> None:
    VALIDATOR.validate(data)
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(data))
    load_config(path)


#: What an engine cannot do without.
NEEDED = {
    "openai": {"url": "https://example.com/v1"},
    "command": {"command": "llama-server --port {port}"},
}


@pytest.mark.parametrize("engine", ENGINE_OPTIONS)
def test_the_options_are_those_of_the_engine(engine: str) -> None:
    needed = NEEDED.get(engine, {})
    for key in ENGINE_OPTIONS[engine].model_fields:
        bad = GOOD | {"engine": engine, "options": needed | {key: [["never valid"]]}}
        good = GOOD | {"engine": engine, "options": needed}
        assert VALIDATOR.is_valid({"models": [good]})
        assert not VALIDATOR.is_valid({"models": [bad]}), key


def test_options_of_what_is_chosen_later_are_checked_later() -> None:
    assert VALIDATOR.is_valid({"models": [GOOD | {"engine": "auto", "options": {"any": 1}}]})


def _properties(schema: object) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(schema, dict):
        return []
    here = list(schema.get("properties", {}).items()) if "additionalProperties" in schema else []
    return here + [found for value in schema.values() for found in _properties(value)]


def test_every_key_is_described() -> None:
    properties = _properties(json_schema())
    assert len(properties) > len(Config.model_fields)
    for key, value in properties:
        assert value.get("description"), key
