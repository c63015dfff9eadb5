"""What gateways are told of a model's presets."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.config.schema import PresetConfig
from servekit.protocol.messages import Preset
from servekit.supervisor.presets import list_presets
from tests.unit.supervisor.made_up_deployment import config


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, Preset("x", {})),
        ({"sampling": {"temperature": 0}}, Preset("x", {"temperature": 0})),
        ({"system": "Be short."}, Preset("x", {}, "Be short.")),
        (
            {"thinking": False},
            Preset("x", {}, template={"enable_thinking": False, "thinking": False}),
        ),
        (
            {"thinking": True, "template": {"thinking": "low", "a": 1}},
            Preset("x", {}, template={"enable_thinking": True, "thinking": "low", "a": 1}),
        ),
    ],
)
def test_only_what_it_sets_is_told(keys: dict[str, Any], told: Preset) -> None:
    preset = PresetConfig.model_validate({"name": "x", **keys})
    assert list_presets(config(presets=(preset,))) == (told,)
