"""Which base an adapter was made for, as far as names tell."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.transformers.lora import config_checks
from servekit.errors import RequestError


@pytest.mark.parametrize(
    ("stated", "names", "other"),
    [
        ("org/Model-7B", {"/models/model-7b/", "m"}, ""),
        ("/somewhere/model", {"org/Model"}, ""),
        ("org/Smol-135M", {"pypi:smol==1/dir/Smol-135M.Q4_1.gguf"}, ""),
        ("org/Smol-135M", {"/models/Smol-360M.Q4_1.gguf"}, "org/Smol-135M"),
        ("org/Model", {"org/Model-Instruct"}, "org/Model"),
        ("", {"org/Model"}, ""),
        (None, {"org/Model"}, ""),
        ("org/Model", {""}, "org/Model"),
    ],
)
def test_another_base_by_name(stated: Any, names: set[str], other: str) -> None:
    assert config_checks.other_base({"base_model_name_or_path": stated}, names) == other


def test_the_rank_is_the_highest() -> None:
    assert config_checks.rank_of({"r": 8, "rank_pattern": {"a": 32, "b": 2}}) == 32
    assert config_checks.rank_of({"r": None, "rank_pattern": None}) == 0
    assert config_checks.rank_of({}) == 0


def test_an_adapter_that_names_another_base_is_refused_by_both_names() -> None:
    config = {"base_model_name_or_path": "meta-llama/Llama-3-8B"}
    config_checks.require_base(config, {"/models/Llama-3-8B"}, "chat")
    with pytest.raises(RequestError, match=r"made for meta-llama/Llama-3-8B .* this model is chat"):
        config_checks.require_base(config, {"/models/Llama-3.1-8B"}, "chat")
