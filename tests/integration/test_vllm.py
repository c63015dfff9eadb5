"""Two replicas of SmolLM2 on vLLM built for CPUs, and what dies under sixteen streams.

A worker is three processes there: ours, vLLM's engine core, and the one that runs the model. In
float32 the arithmetic repeats, so that what goes on elsewhere has to be the very same text.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from servekit.config.engines.installed import is_there
from servekit.config.engines.options import KINDS
from servekit.engines.model_files.source import resolve_folder
from tests.integration.instance import Instance
from tests.unit.engines.conftest import SMOLLM2

STREAMS = 16
#: For a start on two busy cores: vLLM is imported by three processes of each replica.
START_S = 500.0
#: The process below a worker that dies; "" is the worker itself.
VICTIMS = ["", "EngineCore", "Worker"]
pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.model,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (is_there("vllm") and KINDS["vllm"].is_for_cpus), reason="no vLLM built for CPUs"
    ),
]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    path = resolve_folder(SMOLLM2, None, lambda progress: None)
    known = {"name": "m", "engine": "vllm", "path": str(path), "device": "cpu"}
    model = {**known, "replicas": 2, "max_context": 1024}
    with Instance.up(tmp_path_factory.mktemp("vllm"), [model]) as started:
        until_ready(started)
        yield started


def until_ready(instance: Instance) -> None:
    def all_ready() -> bool:
        return all(one.state == "ready" for one in instance.model("m").replicas)

    instance.until("both replicas are ready", all_ready, START_S)


@pytest.fixture(scope="module")
def undisturbed(instance: Instance) -> list[str]:
    """The texts of all streams while nothing dies."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: "".join(stream(instance.url, number)), range(STREAMS)))


def stream(url: str, number: int) -> Iterator[str]:
    """One chat, greedy or with a seed."""
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": 1000 + number}
    prompt = f"Tell me about the number {number}."
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 64, "stream": True}
    asked = httpx.stream("POST", f"{url}/v1/chat/completions", json=body | sampling, timeout=300)
    with asked as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                if event["choices"]:
                    yield event["choices"][0]["delta"].get("content") or ""


@pytest.mark.parametrize("victim", VICTIMS, ids=lambda victim: victim or "the worker")
def test_nothing_is_lost_whichever_process_dies(
    instance: Instance, undisturbed: list[str], victim: str
) -> None:
    until_ready(instance)
    worker = psutil.Process(instance.replica("m/0").pid)
    below = {name: one for one in worker.children(recursive=True) for name in one.cmdline()}
    doomed = next(one for name, one in below.items() if victim in name) if victim else worker
    begun: list[int] = []

    def read(number: int) -> str:
        text = ""
        for piece in stream(instance.url, number):
            text += piece
            begun.append(number)
        return text

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(read, number) for number in range(STREAMS)]
        instance.until("most streams are under way", lambda: len(set(begun)) > STREAMS // 2)
        doomed.send_signal(signal.SIGKILL)
        texts = [answer.result() for answer in answers]
    assert texts == undisturbed

    def is_another() -> bool:
        now = instance.replica("m/0")
        return now.pid not in (0, worker.pid) and now.state == "ready"

    instance.until("it is replaced", is_another, START_S)


def test_an_answer_keeps_to_a_schema(instance: Instance) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    told = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "Make up a person."}]
    body = {"model": "m", "messages": messages, "max_tokens": 80, "response_format": told}
    answer = httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"]).keys() == {"name", "age"}
