"""File descriptors used up: by a crowd of clients at a gateway, and in the other processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.instance import PROGRAM, Instance, echo, stream_completion
from tests.polling import poll

FEW = 128
#: Tokens of a stream that lasts as long as the crowds.
LONG = 400
#: Starts servekit with a low limit, which nothing in it can raise.
LIMITED = ("bash", "-c", f'ulimit -n {FEW} && exec "$@"', "bash", *PROGRAM)
BODY = {"model": "a", "prompt": "hello", "max_tokens": 5}
VITAL = ("/livez", "/readyz", "/health")


def status_of(url: str) -> int:
    return httpx.get(url, timeout=10).status_code


def complete(url: str) -> int:
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(f"{url}/v1/completions", json=BODY, timeout=10).status_code
    return 0


@contextlib.contextmanager
def crowd(instance: Instance, says: bytes) -> Iterator[None]:
    """Hold more connections open than a process may have, each with `says` as its request."""
    port = httpx.URL(instance.url).port
    with contextlib.ExitStack() as clients:
        for _ in range(2 * FEW):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with contextlib.suppress(ConnectionError):
                client.sendall(says)
        yield


@pytest.mark.lane("long")
def test_a_crowd_cuts_off_neither_health_checks_nor_streams(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", step_s=0.01)], program=LIMITED) as instance:
        instance.until_settled()
        url, came = instance.url, list[str]()
        begun = threading.Event()

        def read() -> None:
            for text in stream_completion(url, model="a", prompt="x" * LONG, max_tokens=LONG):
                came.append(text)
                begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        for says in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            with crowd(instance, says):
                for path in VITAL:
                    assert [status_of(url + path) for _ in range(3)] == [200] * 3
                assert complete(url) in (200, 503)  # idle clients have to make room
                instance.until("it is told", lambda: "too_many_connections" in instance.log, 10)
            poll("it serves all again", lambda: complete(url) == 200)
        reader.join(60)
        assert "".join(came) == "x" * LONG


@contextlib.contextmanager
def no_files_left(pid: int) -> Iterator[None]:
    """Allow a process no more files than it has open."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    there = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208
    lowest = next(number for number in range(before[0]) if number not in there)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.lane("long")
def test_a_supervisor_and_a_worker_without_files_serve_on_and_recover(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", replicas=2)]) as instance:
        instance.until_settled()
        url = instance.url  # a supervisor without files cannot be asked
        dies, lives = (instance.replica(name).pid for name in ("a/0", "a/1"))
        with no_files_left(lives), no_files_left(instance.pid):
            os.kill(dies, signal.SIGKILL)
            said = ("Too many open files", "open_files_scarce", "child=a/1 limit=")
            instance.until("it is told", lambda: all(one in instance.log for one in said), 20)
            assert complete(url) == 200
        instance.until("it is back", lambda: instance.replica("a/0").state == "ready", 60)
        assert complete(url) == 200
        assert "Traceback" not in instance.log, instance.log
