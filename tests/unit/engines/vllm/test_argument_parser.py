"""Engine arguments: values of a file as flags, and by vLLM's own parser."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.config.engines.installed import is_there
from servekit.engines.vllm.argument_parser import format_flags, parse_arguments
from servekit.errors import LoadError


def of_vllm(test: Any) -> Any:
    """Mark a test that imports vLLM."""
    missing = pytest.mark.skipif(not is_there("vllm"), reason="vLLM is not installed")
    return missing(pytest.mark.lane("vllm")(pytest.mark.timeout(300)(test)))


def test_values_become_flags() -> None:
    arguments: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "max_model_len": -1,
        "cpu_offload_gb": 0.5,
        "async_scheduling": False,
        "enable_dbo": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "cudagraph_capture_sizes": [1, 2],
        "logits_processors": ["a.b:C"],
        "quantization": None,
    }
    assert format_flags(arguments) == [
        "--kv-cache-dtype=fp8",
        "--max-model-len=-1",
        "--cpu-offload-gb=0.5",
        "--no-async-scheduling",
        "--enable-dbo",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 4}',
        *("--cudagraph-capture-sizes", "1", "2"),
        *("--logits-processors", "a.b:C"),
    ]


def test_without_arguments_vllm_is_not_asked() -> None:
    assert parse_arguments({}) == {}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"seed": 3}, 3),
        ({"seed": "3"}, 3),
        ({"async_scheduling": False}, False),
        ({"aggregate_engine_logging": False}, False),
        ({"speculative_config": {"method": "ngram"}}, {"method": "ngram"}),
        ({"hf_overrides": {"rope_theta": 5}}, {"rope_theta": 5}),
        ({"cudagraph_capture_sizes": [1, 2]}, [1, 2]),
        ({"quantization": None}, None),
    ],
)
@of_vllm
def test_vllm_reads_values(argument: dict[str, Any], value: Any) -> None:
    assert list(parse_arguments(argument).values()) == [value]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"kv_cache_dtype": "fp7"}, "argument --kv-cache-dtype: invalid choice: 'fp7'"),
        ({"seed": "many"}, "argument --seed: "),
        ({"kv_cache_dtype": True}, "argument --kv-cache-dtype: expected one argument"),
        ({"kv_transfer_config": {"kv_role": "none"}}, "kv_role: Input should be 'kv_producer'"),
    ],
)
@of_vllm
def test_vllm_refuses_values_with_a_sentence(argument: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_arguments(argument)
    assert str(caught.value).startswith("vLLM refuses engine_args: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value) and "pydantic.dev" not in str(caught.value)
