"""What an engine does not serve is refused by the name of the parameter, before it gets there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import Unsupported
from servekit.protocol.messages import Generate, ModelInfo, SamplingParams
from servekit.protocol.types import Grammar
from servekit.worker.preparation.request_validation import check_request, check_text
from tests.unit.worker.serving import spec

INFO = ModelInfo(100, 1, True, "echo", "none", "cpu")


def asked(**params: Any) -> Generate:
    return Generate(1, SamplingParams(**params), prompt="x")


@pytest.mark.parametrize(
    ("params", "capability", "param"),
    [
        ({"logprobs": 0}, "logprobs", "logprobs"),
        ({"logit_bias": {5: 1.0}}, "logit_bias", "logit_bias"),
        ({"min_p": 0.1}, "min_p", "min_p"),
        ({"presence_penalty": 0.1}, "penalties", "presence_penalty"),
        ({"frequency_penalty": 0.1}, "penalties", "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "penalties", "repetition_penalty"),
        ({"stop_token_ids": (1,)}, "stop_token_ids", "stop_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "prompt_logprobs"),
        ({"prompt_logprobs": 0, "echo": True}, "prompt_logprobs", "echo"),
        ({"bad_words": ("x",)}, "bad_words", "bad_words"),
        ({"grammar": Grammar("regex", "a")}, "grammar", "response_format"),
    ],
)
def test_a_parameter_is_taken_by_those_who_serve_it(
    tmp_path: Path, params: dict[str, Any], capability: Any, param: str
) -> None:
    request = asked(**params)
    check_request(request, replace(INFO, serves=("generate", capability)), spec(tmp_path))
    with pytest.raises(Unsupported, match=f"^{param}: the echo engine of 'm' ") as refused:
        check_request(request, replace(INFO, serves=("generate",)), spec(tmp_path))
    assert refused.value.param == param


def test_what_every_engine_takes(tmp_path: Path) -> None:
    request = asked(temperature=0.5, top_p=0.9, top_k=3, seed=1, max_tokens=5, stop=("x",))
    check_request(request, replace(INFO, serves=("generate",)), spec(tmp_path))


@pytest.mark.parametrize(
    ("task", "serves", "hint"),
    [
        ("generate", ("embed",), "it is an embedding model"),
        ("embed", ("generate",), "it is a language model"),
        ("tokenize", ("generate",), "does not"),
    ],
)
def test_a_task_is_taken_by_those_who_serve_it(
    tmp_path: Path, task: Any, serves: Any, hint: str
) -> None:
    request = Generate(1, SamplingParams(), prompt="x", task=task)
    with pytest.raises(Unsupported, match=hint):
        check_request(request, replace(INFO, serves=serves), spec(tmp_path))


@pytest.mark.parametrize(
    ("fields", "params", "param"),
    [
        ({"prompt": [1, 2]}, {}, "prompt"),
        ({"inputs": [[1, 2]]}, {}, "input"),
        ({"prompt": "x"}, {"include_stop": True}, "include_stop_str_in_output"),
        ({"prompt": "x"}, {"truncate_prompt": 5}, "truncate_prompt_tokens"),
        ({"prompt": "x"}, {"echo": True}, "echo"),
        ({"prompt": "x"}, {}, ""),
    ],
)
def test_an_engine_of_text_takes_no_tokens(
    tmp_path: Path, fields: dict[str, Any], params: dict[str, Any], param: str
) -> None:
    request = Generate(1, SamplingParams(**params), **fields)
    if not param:
        check_text(request, spec(tmp_path))
        return
    with pytest.raises(Unsupported) as refused:
        check_text(request, spec(tmp_path))
    assert refused.value.param == param
