"""The gateway's part in faults, as clients see it: workers and gateways that die under them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import CompletionUsage

from tests.integration.instance import Instance, echo
from tests.polling import poll

pytestmark = pytest.mark.timeout(180)
#: One for all: it takes longer to make than many a request.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))
TEXT = "the quick brown fox jumps over the lazy dog and goes on "


def lap(text: str, tokens: int) -> str:
    return (text * (tokens // len(text) + 1))[:tokens]


def connect(url: str) -> openai.OpenAI:
    """One for all threads: it takes longer to make than many a request."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)


def ask(
    client: openai.OpenAI, prompt: str, tokens: int, **fields: Any
) -> tuple[str, CompletionUsage, str]:
    """A completion: its text, usage and finish reason, streamed or not."""
    fields |= {"model": "m", "prompt": prompt, "max_tokens": tokens}
    if not fields.pop("stream", False):
        answer = client.completions.create(**fields)
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage, answer.choices[0].finish_reason
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]  # it is counted once
    return "".join(choice.text for choice in choices), usage, choices[-1].finish_reason


def running(url: str, model: str = "m") -> int:
    return int(HTTP.get(f"{url}/readyz").json()["models"][model]["running"])


def ready(url: str) -> bool:
    return HTTP.get(f"{url}/readyz").status_code == 200


# ---------------------------------------------------------------- death


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.lane("long")), 2])
def test_a_killed_worker_costs_no_answer(tmp_path: Path, replicas: int) -> None:
    laps = TEXT * 4 + "until it ends there. "
    stop = laps[-10:] + laps[:10]  # first seen where the echo begins anew
    with (
        ThreadPoolExecutor(20) as pool,
        Instance.up(tmp_path, [echo("m", replicas=replicas, step_s=0.02)]) as instance,
    ):
        url = instance.until_settled().url
        client = connect(url)
        plain = [pool.submit(ask, client, TEXT, 250, stream=n % 2 == 0) for n in range(14)]
        stopped = [
            pool.submit(ask, client, laps, 400, stop=[stop], stream=n % 2 == 0) for n in range(6)
        ]
        poll("all run", lambda: running(url) == 20, 10)
        os.kill(instance.replica("m/0").pid, signal.SIGKILL)
        for request in plain:
            text, usage, reason = request.result(60)
            assert (text, reason) == (lap(TEXT, 250), "length")
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(TEXT), 250)
        for request in stopped:
            text, usage, reason = request.result(60)
            assert (text, reason) == (laps[:-10], "stop")
            assert usage.completion_tokens == len(laps) + 10
        assert instance.replica("m/0").restarts == 1


def count_restarts(instance: Instance, at_least: int) -> int:
    """The restarts of both workers, once all that are expected have come and both are ready.

    Requests are answered earlier: by the other worker, while the dead one is still being replaced.
    """

    def come() -> int:
        workers = instance.model("m").replicas
        count = sum(one.restarts for one in workers)
        return count if all(one.state == "ready" for one in workers) and count >= at_least else 0

    return poll("both workers are back", come, 30)


@pytest.mark.lane("long")
def test_poison_takes_nobody_along(tmp_path: Path) -> None:
    models = [echo("m", replicas=2, step_s=0.02, crash_on="poison", slots=16)]
    with ThreadPoolExecutor(12) as pool, Instance.up(tmp_path, models) as instance:
        url = instance.until_settled().url
        client = connect(url)
        innocents = [pool.submit(ask, client, TEXT, 250, stream=n % 2 == 0) for n in range(12)]
        poll("they run", lambda: running(url) == 12, 10)
        with pytest.raises(openai.InternalServerError) as refused:
            ask(client, "this is poison", 5)
        assert refused.value.code == "request_quarantined"
        for request in innocents:
            assert request.result(60)[0] == lap(TEXT, 250)
        poll("it is whole again", lambda: ready(url), 20)
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as again:
            ask(client, "this is poison", 5)
        assert again.value.code == "request_quarantined"
        assert time.monotonic() - began < 2.0
        assert ask(client, "another", 7)[0] == "another"
        assert count_restarts(instance, 3) == 3


def through_each(
    instance: Instance, url: str, count: int
) -> list[list[http.client.HTTPConnection]]:
    """So many connections to each of the gateways; which of them accepts is the kernel's choice."""
    host, port = url.removeprefix("http://").split(":")
    pids = [gateway.pid for gateway in instance.status().gateways]
    mine: dict[int, http.client.HTTPConnection] = {}

    def enough() -> bool:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.connect()
        assert alive(connection.sock)
        mine[connection.sock.getsockname()[1]] = connection
        return all(len(mine.keys() & ports(pid)) >= count for pid in pids)

    poll("each has connections", enough, 30)
    found = [[mine.pop(port) for port in list(mine.keys() & ports(pid))[:count]] for pid in pids]
    for connection in mine.values():
        connection.close()
    return found


def complete_on(connection: http.client.HTTPConnection, prompt: str, tokens: int) -> str:
    """The text of a completion, or the code of its error, on a connection that is kept."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens})
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    answer = json.load(connection.getresponse())
    return str(answer["error"]["code"] if "error" in answer else answer["choices"][0]["text"])


@pytest.mark.lane("chaos")
def test_poison_through_two_gateways_takes_nobody_along(tmp_path: Path) -> None:
    """Innocents that have only just begun, all the time, on both: they become suspects, too."""
    models = [echo("m", replicas=2, step_s=0.05, crash_on="poison", slots=32)]
    with (
        ThreadPoolExecutor(20) as pool,
        Instance.up(tmp_path, models, server={"gateways": 2}) as instance,
    ):
        url = instance.until_settled().url
        sides = through_each(instance, url, 7)
        over = threading.Event()

        def innocent(connection: http.client.HTTPConnection, name: str) -> int:
            rounds = 0
            while not over.is_set():
                prompt = f"{name} in round {rounds} "
                assert complete_on(connection, prompt, 4) == prompt[:4]
                rounds += 1
            return rounds

        long = [pool.submit(complete_on, side.pop(), TEXT, 150) for side in sides]
        short = [
            pool.submit(innocent, connection, f"{chr(97 + at)}{number}")
            for at, side in enumerate(sides)
            for number, connection in enumerate(side[1:])
        ]
        poll("they run", lambda: running(url) > 2, 10)
        said = []
        for gateway, side in enumerate(sides):
            said.append(complete_on(side[0], f"poison {gateway}", 5))
            poll("it is whole again", lambda: ready(url), 20)
        over.set()
        assert said == ["request_quarantined"] * 2
        assert all(request.result(60) > 0 for request in short)
        assert [request.result(60) for request in long] == [lap(TEXT, 150)] * 2
        # three deaths each; the second runs alone at once, and takes one worker less, if its
        # gateway has heard by then that requests of this address kill
        assert count_restarts(instance, 5) in (5, 6)


# ---------------------------------------------------------------- gateways


def alive(connection: socket.socket) -> bool:
    """It still answers."""
    try:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(1000).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


def ports(pid: int) -> set[int]:
    """The other ends of a process's TCP connections."""
    return {c.raddr.port for c in psutil.Process(pid).net_connections("tcp") if c.raddr}


def test_a_killed_gateway_leaves_the_others_connections_alone(tmp_path: Path) -> None:
    with (
        contextlib.ExitStack() as stack,
        Instance.up(tmp_path, [echo("m")], server={"gateways": 2}) as instance,
    ):
        url = instance.until_settled().url
        host, port = url.removeprefix("http://").split(":")
        mine: dict[int, socket.socket] = {}
        first, second = (instance.gateway(n).pid for n in range(2))

        def both_have_some() -> bool:
            """Which of them accepts is the kernel's choice."""
            connection = stack.enter_context(socket.create_connection((host, int(port)), 10))
            assert alive(connection)
            mine[connection.getsockname()[1]] = connection
            return all(len(mine.keys() & ports(pid)) > 2 for pid in (first, second))

        poll("both have connections", both_have_some, 30)
        doomed, spared = (mine.keys() & ports(pid) for pid in (first, second))
        os.kill(first, signal.SIGKILL)
        assert {port for port in mine if alive(mine[port])} == spared
        assert doomed == mine.keys() - spared
        assert ask(connect(url), "hello", 5)[0] == "hello", "the port is served on"
        back = lambda: instance.gateway().state == "ready" and instance.gateway().pid != first  # noqa: E731
        instance.until("it is back", back, within_s=60)


# ---------------------------------------------------------------- the queue


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an instance that serves one request at a time, 10 ms a token."""
    models = [{**echo("m", step_s=0.01, slots=1), "max_queue": 200}]
    with Instance.up(tmp_path_factory.mktemp("slow"), models) as instance:
        yield instance.until_settled().url


def complete(url: str, key: str = "x", **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "hello", "max_tokens": 5, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return HTTP.post(f"{url}/v1/completions", json=body, headers=headers)


def waiting(url: str) -> int:
    return int(HTTP.get(f"{url}/readyz").json()["models"]["m"]["waiting"])


@pytest.mark.lane("chaos")
def test_a_heavy_client_does_not_starve_a_light_one(slow: str) -> None:
    with ThreadPoolExecutor(101) as pool:
        heavy = [pool.submit(complete, slow, "heavy", max_tokens=15) for _ in range(100)]
        poll("most of them wait", lambda: waiting(slow) > 80, 20)
        for _ in range(3):
            assert pool.submit(complete, slow, "light").result(30).status_code == 200
        left = sum(not request.done() for request in heavy)
        assert left > 40, "the light client was among the first"
        assert all(request.result(60).status_code == 200 for request in heavy)


def test_priority_goes_first(slow: str) -> None:
    with ThreadPoolExecutor(10) as pool:
        ended: list[int] = []

        def one(priority: int) -> None:
            assert complete(slow, priority=priority, max_tokens=20).status_code == 200
            ended.append(priority)

        blocker = pool.submit(complete, slow, max_tokens=150)
        poll("it runs", lambda: running(slow) == 1, 10)
        low = [pool.submit(one, 5) for _ in range(4)]
        poll("they wait", lambda: waiting(slow) == 4, 10)
        high = pool.submit(one, -5)
        for request in (*low, high):
            request.result(60)
        assert blocker.result(60).status_code == 200
        assert ended[0] == -5
    assert complete(slow, priority=11).json()["error"]["param"] == "priority"


def test_deadlines_of_the_request_itself(slow: str) -> None:
    late = complete(slow, max_tokens=4000, timeout_s=0.3)
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "timeout"
    with connect(slow) as client:
        stream = client.completions.create(
            model="m", prompt="hello", max_tokens=4000, stream=True, extra_body={"timeout_s": 0.3}
        )
        with pytest.raises(openai.APIError, match=r"0\.3 s") as error:
            list(stream)
        assert error.value.code == "timeout"
    for wrong in (0, -1, "1", None):
        answer = complete(slow, timeout_s=wrong)
        assert answer.status_code == (200 if wrong is None else 400)
    poll("nothing runs on", lambda: running(slow) == 0, 5)


def places(url: str) -> tuple[list[str], str]:
    """The comments of a stream, and its text."""
    body = {
        "model": "m", "prompt": "hello", "max_tokens": 5, "stream": True,
        "stream_options": {"queue_position": True},
    }  # fmt: skip
    comments, text = [], ""
    with HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith(":"):
                assert not text, "no places once it runs"
                comments.append(line)
            elif line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return comments, text


def test_places_in_the_queue_are_told_as_comments(slow: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        jobs: list[Future[Any]] = []
        for ahead in range(3):
            jobs.append(pool.submit(complete, slow, max_tokens=250))
            poll("it runs or waits", lambda: running(slow) + waiting(slow) == ahead + 1, 10)  # noqa: B023
        comments, text = pool.submit(places, slow).result(60)
        assert text == "hello"
        assert comments[0] in (": queue position 2", ": queue position 1")  # one may have ended
        numbers = [int(comment.rsplit(" ", 1)[1]) for comment in comments]
        assert numbers == sorted(set(numbers), reverse=True), "each place once, ever nearer"
        assert numbers[-1] <= 1 and len(numbers) + 1 >= numbers[0]
        blocker = pool.submit(complete, slow, max_tokens=100)
        poll("it runs", lambda: running(slow) == 1, 10)
        with connect(slow) as client:
            stream = client.completions.create(
                model="m",
                prompt="hello",
                max_tokens=5,
                stream=True,
                extra_body={"stream_options": {"queue_position": True}},
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == "hello"
        for job in (*jobs, blocker):
            assert job.result(60).status_code == 200
    assert places(slow)[0] == [], "what runs at once has no place"
