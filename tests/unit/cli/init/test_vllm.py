"""`vllm serve` command lines, as people paste them, into a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.cli.init.vllm import convert_command
from servekit.config.load import load_config
from servekit.config.schema import ModelConfig, ServerConfig
from servekit.errors import ConfigError
from servekit.system.gpu.gpus import Gpu

GPUS = tuple(Gpu(i, f"GPU-{i}", "H100", 80 * 2**30, 80 * 2**30) for i in range(4))
NATIVE = r"""
CUDA_VISIBLE_DEVICES=1,2 VLLM_USE_V1=1 HF_TOKEN=hf_secret nohup vllm serve Qwen/Qwen3-8B \
  --tensor-parallel-size 2 --max-model-len 32k --gpu-memory-utilization 0.9 \
  --served-model-name qwen qwen3 --enable-auto-tool-choice --tool-call-parser hermes \
  --reasoning-parser qwen3 --max_num_seqs=64 --enable-lora --lora-modules style=org/style \
  --api-key sk-secret --host 0.0.0.0 --port 9000 > vllm.log 2>&1 &
"""
DOCKER = """docker run --runtime nvidia --gpus '"device=2,3"' -v ~/.cache/huggingface:/root/.cache
  --env "HUGGING_FACE_HUB_TOKEN=hf_secret" -e LEVEL=1 -p 8001:8000 --ipc=host
  vllm/vllm-openai:v0.10.0 --model mistralai/Mistral-7B-v0.1 -tp 2""".replace("\n", " ")


def convert(
    folder: Path, text: str, gpus: tuple[Gpu, ...] = GPUS
) -> tuple[ModelConfig, ServerConfig, str]:
    path = folder / "servekit.yaml"
    carried = convert_command(text, gpus)
    path.write_text(carried.text)
    config = load_config(path)
    assert "secret" not in carried.text + "".join(carried.left_out)
    return config.models[0], config.server, "\n".join(carried.left_out)


def test_an_engine_with_the_same_options(tmp_path: Path) -> None:
    model, server, left_out = convert(tmp_path, NATIVE)
    assert (model.engine, model.path, model.name) == ("vllm", "Qwen/Qwen3-8B", "qwen")
    assert (model.aliases, model.gpus, model.gpus_per_replica) == (("qwen3",), (1, 2), 2)
    assert (model.max_context, model.memory, model.tool_parser) == (32000, "90%", "hermes")
    assert (model.options, model.env) == ({"slots": 64}, {"VLLM_USE_V1": "1"})
    assert [(a.name, a.path) for a in model.adapters] == [("style", "org/style")]
    assert (server.host, server.port) == ("127.0.0.1", 9000)
    for said in ("HF_TOKEN: set it", "--reasoning-parser: ", "--api-key: ", "> vllm.log 2>&1 &"):
        assert said in left_out


def test_a_container_is_its_command(tmp_path: Path) -> None:
    model, server, left_out = convert(tmp_path, DOCKER)
    assert (model.engine, model.path) == ("vllm", "mistralai/Mistral-7B-v0.1")
    assert (model.gpus, model.gpus_per_replica, model.env) == ((2, 3), 2, {"LEVEL": "1"})
    assert server.port == 8001
    assert "the container (docker run --runtime nvidia" in left_out


def test_engine_arguments_are_passed_on(tmp_path: Path) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    text = (
        f"vllm serve --enable-expert-parallel org/name --speculative-config '{config}' -tp 2 -pp 2 "
        "--kv-cache-dtype fp8 --no-async-scheduling -O3 --compilation-config.cudagraph-mode FULL "
        "--compilation-config.mode=3 --lora-target-modules q_proj v_proj --max-log-len 20"
    )
    model, _, left_out = convert(tmp_path, text)
    assert (model.engine, model.path, model.gpus_per_replica) == ("vllm", "org/name", 4)
    assert model.options["engine_args"] == {
        "enable_expert_parallel": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "pipeline_parallel_size": 2,
        "kv_cache_dtype": "fp8",
        "async_scheduling": False,
        "optimization_level": 3,
        "compilation_config": {"cudagraph_mode": "FULL", "mode": 3},
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    assert "--max-log-len: it is about the server of vLLM" in left_out


@pytest.mark.parametrize(
    "option",
    ["--chat-template-content-format openai", "--tokenizer org/other", "--no-enable-lora", "-xy 1"],
)
def test_options_of_its_server_keep_its_own_server(tmp_path: Path, option: str) -> None:
    text = f"vllm serve org/name {option} --port=80 --api-key k -tp 4"
    model, _, _ = convert(tmp_path, text)
    assert (model.engine, model.path, model.gpus_per_replica) == ("command", "org/name", 4)
    assert model.options["command"] == [
        *("vllm", "serve", "{path}", *option.split(), "-tp", "4"),
        *("--host", "{host}", "--port", "{port}"),
    ]


def test_the_environment_of_another_vllm_is_its_python(tmp_path: Path) -> None:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder / "vllm").write_text("#!/bin/sh\n")
    (folder / "vllm").chmod(0o755)
    model, _, _ = convert(tmp_path, f"{folder / 'vllm'} serve org/name")
    assert model.python == str(folder / "python")


def test_more_gpus_than_there_are_is_a_comment(tmp_path: Path) -> None:
    model, _, left_out = convert(tmp_path, "vllm serve org/name -tp 8")
    assert model.gpus_per_replica == 1 and "8 GPUs: this machine has fewer" in left_out
    assert "    # gpus_per_replica: 8\n" in (tmp_path / "servekit.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no `vllm serve` command; write it as it is typed, in quotes"),
        ("llama-server -m x.gguf", "this is no `vllm serve` command"),
        ("vllm bench serve", "this is no `vllm serve` command"),
        ("vllm serve", "the command names no model"),
        ("vllm serve --port 80", "the command names no model"),
        ("vllm serve 'x", "cannot be split into words (No closing quotation)"),
        ("docker run ollama/ollama", "this runs no image of vLLM"),
    ],
)
def test_commands_that_are_none(text: str, said: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_command(text, ())
    assert said in str(caught.value)
