"""Servers that a command starts, well and badly behaved, through the whole of servekit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.system import procfs
from tests.integration.instance import Instance
from tests.integration.made_up_gpus import GIB, MadeUpGpus
from tests.integration.test_faults_supervisor import cli
from tests.integration.test_llamacpp import environment
from tests.polling import poll
from tests.unit.engines.origins import SMOLLM2

SERVER = [sys.executable, str(Path(__file__).parents[1] / "odd_server.py"), "--port", "{port}"]
LLAMA_SERVER = [sys.executable, str(Path(__file__).parents[1] / "llama_server.py"), "{path}"]


def odd(name: str, *args: str, options: dict[str, Any] | None = None, **keys: Any) -> Any:
    command = {"command": [*SERVER, *args], "slots": 8, **(options or {})}
    return {"name": name, "engine": "command", "path": "counter", "options": command, **keys}


def numbers(count: int) -> str:
    return "".join(f" {number};" for number in range(count))


def chat(instance: Instance, model: str, text: str = "count", **body: Any) -> httpx.Response:
    known = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    return httpx.post(f"{instance.url}/v1/chat/completions", json=known | body, timeout=60)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(instance: Instance, page: str, **body: Any) -> tuple[str, Any]:
    """The text of a stream, and its usage."""
    text, usage = "", None
    asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20} | body
    with httpx.stream("POST", f"{instance.url}/v1/{page}", json=asked, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
                for one in chunk["choices"]:
                    text += one.get("text") or one.get("delta", {}).get("content") or ""
    return text, usage


def server_of(instance: Instance, worker: str) -> procfs.Process:
    pid = instance.replica(worker).pid
    return poll("its worker has a server", lambda: procfs.find_descendants(pid))[0]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    sleeps: dict[str, Any] = {"options": {"sleep": "/sleep", "wake": "/wake"}, "idle_sleep_s": 0.5}
    models = [
        odd("two", "--step-s", "0.01", "--prints", "3000", replicas=2, stall_timeout_s=2),
        odd("beginner", "--no-prefix", "--step-s", "0.01", replicas=2),
        odd("sleeper", **sleeps),
        odd("lazy", load="on_demand"),
        odd("vectors", options={"task": "embed"}),
    ]
    folder = tmp_path_factory.mktemp("command")
    with Instance.up(folder, models) as instance:
        instance.until_settled()
        yield instance


def test_whole_and_streamed(instance: Instance) -> None:
    whole = chat(instance, "two")
    assert text_of(whole) == numbers(20)
    expected = {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert whole.json()["usage"] == expected
    messages = [{"role": "user", "content": "count"}]
    assert streamed(instance, "chat/completions", model="two", messages=messages) == (
        numbers(20),
        expected,
    )
    assert streamed(instance, "completions", model="two", prompt="count") == (
        numbers(20),
        expected,
    )


@pytest.mark.parametrize(
    ("page", "trouble"),
    [
        ("completions", "DIE=7"),
        *(("chat/completions", trouble) for trouble in ("DIE=7", "EXIT=7", "STALL=7", "ILL=7")),
        *(
            pytest.param("completions", trouble, marks=pytest.mark.lane("long"))
            for trouble in ("EXIT=7", "STALL=7", "ILL=7")
        ),
    ],
)
def test_an_answer_goes_on_in_another_server(instance: Instance, page: str, trouble: str) -> None:
    instance.until_settled()
    messages = {"messages": [{"role": "user", "content": trouble}]}
    asked = messages if page == "chat/completions" else {"prompt": trouble}
    text, usage = streamed(instance, page, model="two", **asked)
    assert (text, usage["prompt_tokens"], usage["completion_tokens"]) == (numbers(20), 5, 20)


def test_why_has_the_real_cause(instance: Instance) -> None:
    instance.until_settled()
    assert text_of(chat(instance, "two", "EXIT=3")) == numbers(20)
    told = cli(instance, "why", "two").stdout
    assert "odd_server" in told or "exited with code 7" in told
    assert "exited with code 7" in told and "out of luck" in told


def test_without_prefixes_a_started_stream_ends_and_a_whole_answer_begins_anew(
    instance: Instance,
) -> None:
    pid = server_of(instance, "beginner/0").pid
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 300}
    asked = {"model": "beginner", "stream": True} | body
    with httpx.stream("POST", f"{instance.url}/v1/chat/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if " 3;" in line)
        for worker in ("beginner/0", "beginner/1"):
            os.kill(server_of(instance, worker).pid, signal.SIGKILL)
        assert any("cannot continue it" in line for line in lines)
    instance.until_settled()
    assert server_of(instance, "beginner/0").pid != pid


def test_errors_are_passed_on_and_closed_connections_tried_again(instance: Instance) -> None:
    failed = chat(instance, "two", "ERROR")
    assert (failed.status_code, "told to fail" in failed.text) == (502, True), failed.text
    assert text_of(chat(instance, "two", "CLOSE")) == numbers(20)


def test_it_sleeps_and_is_woken_by_a_request(instance: Instance) -> None:
    instance.until("it sleeps", lambda: instance.replica("sleeper/0").state == "asleep")
    assert text_of(chat(instance, "sleeper")) == numbers(20)


def test_it_is_loaded_on_demand(instance: Instance) -> None:
    assert text_of(chat(instance, "lazy")) == numbers(20)


def test_embeddings(instance: Instance) -> None:
    body = {"model": "vectors", "input": "a"}
    answer = httpx.post(f"{instance.url}/v1/embeddings", json=body)
    assert answer.json()["data"][0]["embedding"] == [0.5, 0.25]


def test_a_killed_worker_leaves_no_server(tmp_path: Path) -> None:
    models = [odd("m", "--ignore-sigterm", "--grandchildren", "2")]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        worker = instance.replica("m/0").pid
        below = procfs.find_descendants(worker)
        assert len(below) == 3
        os.kill(worker, signal.SIGKILL)
        instance.until(
            "all of them are dead",
            lambda: not any(procfs.is_alive(one.pid, one.started) for one in below),
        )
        instance.until_settled()
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0
        assert not instance.survivors()


@pytest.mark.lane("long")
def test_servers_that_never_serve_say_why(tmp_path: Path) -> None:
    models = [odd("never", "--never-ready", load_timeout_s=1.5), odd("exits", "--exit-code", "3")]
    with Instance.up(tmp_path, models) as instance:
        instance.until(
            "the reasons are known",
            lambda: all(
                said in " ".join(one.reason for one in instance.model(name).replicas)
                for name, said in (
                    ("never", "no progress"),
                    ("exits", "exited with code 3 while it loaded"),
                )
            ),
        )


@pytest.mark.lane("long")
def test_its_gpus_are_pinned_and_what_it_holds_is_its_models(tmp_path: Path) -> None:
    gpus = MadeUpGpus(tmp_path, count=2)
    both = odd("both", "--prints={gpus}", gpus_per_replica=2, memory="40GiB", device="cuda")
    models = [both, odd("one", gpus=[1], memory="40GiB", device="cuda")]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        server = server_of(instance, "both/0")
        assert "--prints=2" in procfs.command_line(server.pid)
        pinned = {
            name: environment(server_of(instance, name).pid)["CUDA_VISIBLE_DEVICES"]
            for name in ("both/0", "one/0")
        }
        assert pinned == {"both/0": "0,1", "one/0": "1"}
        gpus.hold({server.pid: 50})
        instance.until("it is seen", lambda: instance.replica("both/0").gpu_bytes == 100 * GIB)
        assert "where it claims 40" in instance.replica("both/0").excess


@pytest.mark.model
@pytest.mark.lane("models")
def test_llama_cpps_own_server_goes_on_after_its_death(tmp_path: Path) -> None:
    """The server in xllamacpp; chats and completions, streamed, with the same text."""
    command = [*LLAMA_SERVER, "{port}"]
    model = {"name": "smol", "engine": "command", "path": SMOLLM2, "replicas": 2}
    model |= {"options": {"command": command, "slots": 4}}
    prompt = "Once upon a time there was a lighthouse keeper who"
    messages = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled(within_s=180)
        for page, asked in (
            ("completions", {"prompt": prompt}),
            ("chat/completions", {"messages": messages}),
        ):
            body = {"model": "smol", "max_tokens": 60, "temperature": 0.0, **asked}
            expected = streamed(instance, page, **body)
            killed = subprocess.Popen(
                ["sh", "-c", f"sleep 0.5; kill -9 {server_of(instance, 'smol/0').pid}"]
            )
            again = streamed(instance, page, **body)
            for _, usage in (expected, again):
                usage.pop("prompt_tokens_details", None)  # what a server's cache has is its own
            assert again == expected
            killed.wait()
            instance.until_settled(within_s=180)
