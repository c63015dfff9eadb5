from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers.lora.adapter_files import AdapterFiles
from servekit.engines.vllm.adapters import judge_config, measure_effect
from servekit.errors import RequestError


def files(**config: Any) -> AdapterFiles:
    return AdapterFiles(Path("/a"), {"peft_type": "LORA", "r": 8} | config, {})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "BOFT"}, "this one is BOFT; `engine: transformers` serves it"),
        ({"use_dora": True}, "this one is DoRA"),
        ({"r": 65}, "rank is 65, and at most 64"),
    ],
)
def test_what_vllm_cannot_run_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        judge_config(files(**config), 64)


def test_a_plain_lora_may_come() -> None:
    judge_config(files(), 64)


def test_an_adapter_has_to_change_something() -> None:
    assert measure_effect([(-1.0, -2.0)], [(-1.5, -2.0)]) == 0.5
    with pytest.raises(RequestError, match="changes nothing"):
        measure_effect([(-1.0,)], [(-1.0,)])
    with pytest.raises(RequestError, match="NaN or Inf"):
        measure_effect([(float("nan"),)], [(-1.0,)])
