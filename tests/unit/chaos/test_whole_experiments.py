"""Whole experiments against a server of this test, with a made-up status and harmless victims."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.chaos import (
    client_experiments,
    command,
    machine_experiments,
    process_experiments,
    run,
)
from servekit.chaos.baseline_answers import BaselineAnswer
from servekit.chaos.client import Client
from servekit.chaos.result import ExperimentContext, ExperimentResult
from servekit.chaos.run import RunOptions
from servekit.chaos.target import Target
from servekit.protocol.messages import ModelInfo, ReplicaStatus, Status, WorkerState
from tests.unit.chaos.test_client import GOOD, QUESTION
from tests.unit.chaos.test_target import record
from tests.unit.cli.instance import listening, make_model, make_replica, make_status

INFO = ModelInfo(4096, 2, True, "echo", "none", "cpu")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
WHOLE = {"id": "x", "choices": [{"message": {"content": "abc"}, "finish_reason": "length"}]}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """A server that streams, or answers in one piece, as it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = [line for line in head.split("\r\n") if line.startswith("content-length:")]
        asked = await reader.readexactly(int(sizes[0].split(":")[1])) if sizes else b"{}"
        body = json.dumps(WHOLE | {"usage": USAGE}).encode()
        whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        answer = GOOD if json.loads(asked).get("stream") else whole
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(answer), 200):
                writer.write(answer[at : at + 200])
                await asyncio.sleep(0.01)  # so that streams are under way
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening_:
        yield f"http://127.0.0.1:{listening_.sockets[0].getsockname()[1]}"


def status_of(*replicas: ReplicaStatus) -> Status:
    return make_status(replace(make_model("m", *replicas), info=INFO, max_queue=1))


@contextlib.asynccontextmanager
async def scene(
    folder: Path, status: Callable[[], Status] | Status, memory_bytes: int = 0
) -> AsyncIterator[ExperimentContext]:
    """The inputs of an experiment, with a load of a moment."""
    async with serving() as url:
        answer = await Client(url).await_answer(QUESTION, stream=True)
        known = [BaselineAnswer(QUESTION, answer, True)]
        with listening(folder, lambda message: None, status):
            found = status() if callable(status) else status
            target = Target(url, folder, found, "m", "no-such-mark")
            yield ExperimentContext(target, known, 0.05, 2, 0, memory_bytes=memory_bytes)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def test_an_instance_stands_memory_pressure(tmp_path: Path) -> None:
    async with scene(tmp_path, status_of(), memory_bytes=2**20) as context:
        finding = await machine_experiments.memory_pressure(context)
    assert (finding.verdict, finding.detail) == ("kept", "")
    assert finding.deed == "1 MiB allocated beside it" and finding.answered > 0


async def test_a_process_that_is_lost_to_the_pressure_is_told(tmp_path: Path) -> None:
    news = [replace(make_replica(), pid=pid) for pid in (1, 2, 3, 4, 5, 6)]
    async with scene(tmp_path, lambda: status_of(news.pop(0)), memory_bytes=2**20) as context:
        finding = await machine_experiments.memory_pressure(context)
    assert (finding.verdict, finding.detail) == ("broken", "a process was lost")


async def test_a_crowd_is_answered_and_a_light_client_has_its_turn(tmp_path: Path) -> None:
    async with scene(tmp_path, status_of()) as context:
        finding = await client_experiments.flood(context)
    assert finding.verdict == "kept", finding.detail
    assert finding.deed == "30 clients at once for 2 slots and 1 queue places"
    assert finding.answered == finding.sent > 0 and finding.failed == 0
    assert "light client: " in finding.detail


async def test_slow_readers_hold_up_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path, status_of()) as context:
        finding = await client_experiments.slow_client(context)
    assert finding.verdict == "kept", finding.detail
    assert "p99 of the others" in finding.detail and finding.answered > 0


async def test_clients_that_vanish_leave_their_slots(tmp_path: Path) -> None:
    async with scene(tmp_path, status_of()) as context:
        finding = await client_experiments.disconnect_clients(context)
    assert finding.verdict == "kept", finding.detail
    assert finding.deed == "2 clients on 2 slots vanish mid-stream"
    assert "2 streams ran; the next 2 did after" in finding.detail


async def test_a_supervisor_that_is_killed_leaves_nothing(
    tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    async with scene(tmp_path, status_of()) as context:
        context.target.pid = victim.pid
        (tmp_path / "w1.sock").touch()
        finding = await machine_experiments.supervisor_killed(context)
    assert finding.verdict == "kept", finding.detail
    assert "1 processes gone after" in finding.detail
    assert "the next start removes control.sock, w1.sock" in finding.detail
    assert victim.wait() == -9


async def test_a_worker_that_is_killed_is_replaced_and_its_loss_noticed(
    tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    dead = "killed by SIGKILL"

    def look() -> Status:
        if victim.poll() is None:
            return status_of(replace(make_replica(), pid=victim.pid))
        return status_of(replace(make_replica(), pid=os.getpid(), reason=dead))

    async with scene(tmp_path, look) as context:
        finding = await process_experiments.worker_killed(context)
    assert victim.wait() == -9
    assert finding.deed == "SIGKILL to the busiest worker"
    assert finding.whole_s is not None and finding.failed == 0
    assert finding.notice_s is None and finding.verdict == "broken"
    assert "noticed: never, promised within 0.1 s" in finding.detail
    assert f"exit reason: {dead}" in finding.detail


async def test_findings_are_told_as_they_come_and_collected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, os.getpid())
    async with serving() as url:
        status = replace(status_of(), pid=os.getpid(), url=url)
        with listening(tmp_path, lambda message: None, status):
            options = RunOptions(only=["memory", "worker-stopped"])
            found = await command._run_experiments(url, tmp_path, None, options)
    assert [(one.experiment, one.verdict) for one in found] == [
        ("worker stopped", "skipped"),
        ("memory pressure", "skipped"),
    ]
    told = capsys.readouterr().err
    assert told == "worker stopped: skipped\nmemory pressure: skipped\n"


async def test_an_instance_that_does_not_recover_keeps_no_finding_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: list[WorkerState] = ["ready"]

    async def break_it(context: ExperimentContext) -> ExperimentResult:
        state[0] = "failed"
        monkeypatch.setattr(run, "_RECOVER_WITHIN_S", 0.1)
        return ExperimentResult("worker stopped", "", "broken", detail="2 × status 503")

    monkeypatch.setitem(run.EXPERIMENTS, "worker-stopped", break_it)
    record(tmp_path, os.getpid())
    async with serving() as url:

        def look() -> Status:
            found = status_of(make_replica("m/0", state[0]))
            return replace(found, pid=os.getpid(), url=url)

        with listening(tmp_path, lambda message: None, look):
            options = RunOptions(only=["memory", "worker-stopped"])
            first, rest = await command._run_experiments(url, tmp_path, None, options)
    assert first.detail == "2 × status 503"
    assert rest.verdict == "broken"
    assert "(m/0 is failed); memory was not started" in rest.detail
