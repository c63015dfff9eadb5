"""A whole measurement of a server in a thread, and the figures of the machine beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from servekit.bench import run
from servekit.bench.client.client_protocol import Asking, Target
from servekit.bench.lengths import Lengths
from servekit.bench.options import Load, Options
from servekit.bench.output.live_display import watch_load
from servekit.errors import ConfigError
from servekit.system.python.python_command import module_command
from tests.unit.bench.serving import completion, whole

PROGRAM = module_command("servekit.bench")
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


def options(target: Target, *loads: Load) -> Options:
    fixed = Lengths("fixed", 4)
    asking = Asking("chat", "", False, fixed, fixed, Lengths("fixed", 1))
    return Options(target, asking, loads, 5, None, 0, 0, 10.0, None, {"e2e": 10.0})


@pytest.fixture
def target() -> Iterator[Target]:
    """A server that has one model and answers each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                sizes = [one for one in head.split("\r\n") if one.startswith("content-length:")]
                await reader.readexactly(int(sizes[0].split(":")[1]) if sizes else 0)
                writer.write(whole(MODELS if head.startswith("get ") else completion()))
        writer.close()

    ready, done = threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def listen() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await done.wait()
        server.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield Target("127.0.0.1", ports[0], "/v1")
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    loop.close()


def test_each_load_has_its_figures(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    loads = Load(users=1), Load(users=2), Load(rate=100.0)
    found = run.run_benchmark(options(target, *loads), PROGRAM, os.environ, watch_load)
    assert [one.completed for one in found.runs] == [5, 5, 5]
    assert [(one.concurrency, one.rate) for one in found.runs] == [
        (1, None),
        (2, None),
        (None, 100.0),
    ]
    assert not any(one.interrupted for one in found.runs)
    assert found.url == target.url
    assert (found.asked["model"], found.asked["requests"]) == ("m", 5), "the only model"
    [told, *_] = capsys.readouterr().err.splitlines()
    assert told.startswith("1 at once: 5 requests in ")


def test_a_model_that_is_not_there_is_told_before_any_load(target: Target) -> None:
    asked = options(target, Load(users=1))
    asked = replace(asked, asking=replace(asked.asking, model="other"))
    with pytest.raises(ConfigError, match="'other'"):
        run.run_benchmark(asked, PROGRAM, os.environ, watch_load)


def test_the_request_is_described_without_the_key() -> None:
    asked = options(Target("h", 1, "/v1", key="sk-secret"), Load(users=1))
    told = run.describe_request(asked)
    assert told["prompt_tokens"] == "4" and told["timeout_s"] == 10.0
    assert "sk-secret" not in str(told)
    of_file = replace(asked, asking=replace(asked.asking, dataset="x.jsonl"))
    assert run.describe_request(of_file)["prompt_tokens"] is None, "the file's own"


def test_a_first_interrupt_stops_and_a_second_one_aborts() -> None:
    course: list[str] = []

    async def measure() -> None:
        stop = asyncio.Event()
        with run._handle_interrupts(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 10)
            course.append("it reports what it has")
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asyncio.Event().wait(), 10)
        course.append("it was not aborted")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(measure())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it is handled no more"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert course == ["it reports what it has"]


def test_the_use_of_the_cores_is_between_two_readings() -> None:
    assert run.busy_share((10.0, 100.0), (30.0, 200.0)) == 0.2
    assert run.busy_share((0.0, 0.0), (0.0, 0.0)) == 0.0, "it is not known"
    busy, total = run.machine_cpu_s()
    assert 0 < busy < total
