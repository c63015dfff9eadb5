"""What may happen while an instance drains, a long stream under way."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.supervisor.process.child_process import GOODBYE_S
from tests.integration.instance import Instance, echo, write_config
from tests.integration.test_faults_supervisor import cli, complete

LENGTH = 3000  # a minute: longer than anybody reads, and than the drain may take


def stream(url: str, begun: threading.Event, enough: threading.Event) -> str:
    """The text of a streamed answer until `enough`; `begun` when some is there."""
    text = ""
    body = {"model": "slow", "prompt": "abc", "max_tokens": LENGTH, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"])
                begun.set()
            if enough.is_set():
                break
    return text


@pytest.mark.lane("long")
@pytest.mark.parametrize("changed", [False, True])
def test_a_reload_while_it_drains_is_refused_and_disturbs_nothing(
    tmp_path: Path, changed: bool
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.02)]) as instance,
    ):
        begun, enough = threading.Event(), threading.Event()
        under_way = pool.submit(stream, instance.until_settled().url, begun, enough)
        assert begun.wait(10)
        pid = instance.replica("slow/0").pid
        instance.signal(signal.SIGTERM)
        instance.until("it drains", lambda: instance.status().draining)
        if changed:
            write_config(tmp_path, [echo("slow", step_s=0.01), echo("new")])
        asked = cli(instance, "reload")
        sentence = "servekit is shutting down; there is nothing to reload"
        assert (asked.returncode, asked.stdout, asked.stderr) == (1, "", f"{sentence}\n")
        for refused in (2, 3):
            instance.signal(signal.SIGHUP)
            told = lambda: instance.log.count(f"reason='{sentence}'") == refused  # noqa: B023, E731
            instance.until("a hangup is refused as well, and said to be", told)
        assert not under_way.done(), "all that was asked while it was under way"
        assert [model.name for model in instance.status().models] == ["slow"]
        assert instance.replica("slow/0").pid == pid
        enough.set()
        text = under_way.result(30)
        assert text == ("abc" * LENGTH)[: len(text)]
        assert instance.wait() == 0
        assert instance.survivors() == []


def last_words(url: str, path: str, **body: object) -> tuple[int, str]:
    answer = httpx.post(f"{url}{path}", json=body, timeout=30)
    return answer.status_code, answer.text


def test_what_does_not_finish_in_time_is_told_so_in_its_own_envelope(tmp_path: Path) -> None:
    slow = echo("slow", step_s=0.05)
    messages = [{"role": "user", "content": "abc"}]
    chat: dict[str, Any] = {"model": "slow", "messages": messages, "max_tokens": 4000}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat | {"n": 2}),
        ("/v1/messages", chat),
        ("/api/chat", {"model": "slow", "messages": messages}),
        ("/v1/responses", {"model": "slow", "input": "abc"}),
    ]
    server = {"drain_timeout_s": 1}
    with (
        ThreadPoolExecutor(len(asks)) as pool,
        Instance.up(tmp_path, [slow], server=server) as instance,
    ):
        url = instance.until_settled().url
        asked = [pool.submit(last_words, url, path, **body) for path, body in asks]
        everyone = len(asks) + 1  # of two choices, each is a request
        instance.until("all are under way", lambda: instance.gateway().in_flight == everyone)
        instance.signal(signal.SIGTERM)
        plain, streamed, choices, message, lines, response = [one.result(30) for one in asked]
        assert instance.wait() == 0
        for status, text in (plain, choices, response):
            assert (status, json.loads(text)["error"]["code"]) == (503, "model_unavailable")
        assert (message[0], json.loads(message[1])["type"]) == (503, "error")
        last = streamed[1].strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_unavailable"
        assert "error" in json.loads(lines[1].strip().split("\n")[-1])
        assert "Traceback" not in instance.log


@pytest.mark.lane("long")
def test_nobody_waits_for_a_model_that_loads_when_it_is_told_to_end(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("loads", load_s=600)]) as instance:
        instance.until("it loads", lambda: instance.replica("loads/0").state == "loading")
        instance.until("a gateway serves", lambda: instance.gateway().state == "ready")
        began = time.monotonic()
        instance.signal(signal.SIGTERM)
        assert instance.wait(60) == 0
        assert time.monotonic() - began < GOODBYE_S, "it was waited for"
        assert instance.survivors() == []


@pytest.mark.lane("long")
def test_only_a_model_that_requests_wait_for_is_loaded_to_the_end(tmp_path: Path) -> None:
    asked = echo("asked", load_s=8) | {"load": "on_demand"}
    models = [echo("slow", step_s=0.05), echo("loads", load_s=600), asked]
    with ThreadPoolExecutor(2) as pool, Instance.up(tmp_path, models) as instance:
        begun, enough = threading.Event(), threading.Event()
        instance.until("slow is ready", lambda: instance.replica("slow/0").state == "ready")
        url = instance.url
        serves = lambda: complete(url, "slow", max_tokens=1).status_code == 200  # noqa: E731
        instance.until("a gateway knows of it", serves)
        under_way = pool.submit(stream, url, begun, enough)
        assert begun.wait(60)
        waits = pool.submit(complete, url, "asked")
        instance.until("it is loaded for it", lambda: instance.model("asked").replicas)
        instance.signal(signal.SIGTERM)
        ended = lambda: instance.replica("loads/0").state == "stopped"  # noqa: E731
        instance.until("what nobody waits for is ended", ended)
        assert not under_way.done(), "it is not ended with the rest"
        assert waits.result(60).status_code == 200
        enough.set()
        assert under_way.result(60)
        assert instance.wait(60) == 0
