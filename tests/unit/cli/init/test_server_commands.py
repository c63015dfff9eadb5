"""Command lines of llama-server and vLLM, as people type them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from servekit.cli.init.server_commands import parse_server


@pytest.mark.parametrize(
    ("text", "model", "keys", "unknown"),
    [
        ("llama-server -m /x.gguf --port 80 --jinja", "/x.gguf", {}, []),
        ("/opt/llama-server -hf o/n:Q8_0 -c 0 -ngl 99 -fa on", "o/n:Q8_0",
         {"options": {"flash_attention": "on"}}, []),
        ("llama-server -hf o/n -fa -t 4", "o/n:Q4_K_M",
         {"options": {"flash_attention": "on", "threads": 4}}, []),
        ("llama-server --model=x.gguf -c 32768 -np 4 -ngl 20", "x.gguf",
         {"max_context": 8192, "options": {"slots": 4, "gpu_layers": 20}}, []),
        ("llama-server -m x.gguf -ctk q8_0 -ctv q8_0", "x.gguf",
         {"options": {"cache_type": "q8_0"}}, []),
        ("llama-server -m x.gguf -ctk q8_0", "x.gguf",
         {"options": {"cache_type": "q8_0"}}, ["--cache-type-v f16"]),
        ("llama-server -m x.gguf --mmproj p.gguf -ot a=CPU", "x.gguf",
         {"options": {"mmproj": "p.gguf"}}, ["-ot a=CPU"]),
        ("llama-server -m x.gguf -ctk iq4_nl -ctv f16 -np x", "x.gguf", {},
         ["-ctk iq4_nl", "-np x"]),
        ("vllm serve org/name", "org/name", {}, []),
        ("vllm serve --enforce-eager org/name -tp 2", "org/name",
         {"options": {"enforce_eager": True}, "gpus_per_replica": 2}, []),
        ("vllm serve org/name --max-model-len 32K --dtype half -q awq", "org/name",
         {"max_context": 32768, "dtype": "float16", "options": {"quantization": "awq"}}, []),
        ("vllm serve org/name --max_model_len=auto --gpu-memory-utilization .85", "org/name",
         {"memory": "85%"}, []),
        ("vllm serve org/name --kv-cache-dtype fp8 --response-role x --seed 1", "org/name",
         {"options": {"engine_args": {"kv_cache_dtype": "fp8"}}}, ["--response-role x"]),
        ("python3 -m vllm.entrypoints.openai.api_server --model o/n --no-enable-prefix-caching",
         "o/n", {"options": {"prefix_caching": False}}, []),
    ],
)  # fmt: skip
def test_what_a_command_says(
    text: str, model: str, keys: dict[str, Any], unknown: list[str]
) -> None:
    found = parse_server(shlex.split(text))
    assert found is not None
    assert (found.model, found.nested_keys(), found.unknown) == (model, keys, unknown)


@pytest.mark.parametrize("text", ["", "ollama serve", "vllm bench serve", "python x.py", "vllm"])
def test_other_commands(text: str) -> None:
    assert parse_server(shlex.split(text)) is None


def test_names_and_adapters() -> None:
    text = "vllm serve o/n --served-model-name a b --lora-modules c=d/e f=./g --port 9000"
    found = parse_server(shlex.split(text))
    assert found is not None and found.port == 9000
    assert (found.names, found.adapters) == (["a", "b"], [("c", "d/e"), ("f", "./g")])
