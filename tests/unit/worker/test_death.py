"""A worker whose engine has died: what it made is out, what it had not begun is given back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from servekit.engines.api.base import StepOutput
from servekit.errors import EngineFailed, WorkerLost
from servekit.protocol.forwarding import HttpRequest
from servekit.protocol.messages import (
    PROTOCOL,
    Failed,
    Hello,
    SamplingParams,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address
from tests.unit.gateway.conftest import until
from tests.unit.worker.serving import serving, spec
from tests.unit.worker.test_steps import SAID, text


async def test_what_was_made_is_out_before_it_hangs_up_and_the_rest_given_back(
    tmp_path: Path,
) -> None:
    async with serving(spec(tmp_path, step_s=3600.0)) as client:
        ran = client.send(SamplingParams(max_tokens=9), prompt=SAID)
        await until(lambda: client.runner.busy)
        (peer,) = [peer for peer in client.runner.peers if peer.jobs]
        (job_id,) = peer.jobs.values()
        client.runner.ward.closed = True  # a suspect is alone: what comes is held
        held = client.send(SamplingParams(max_tokens=9), prompt=SAID)
        await until(lambda: len(peer.jobs) == 2)
        arriving = client.send(http=HttpRequest("/v1/x", size_bytes=9), body=b"a part")
        client.runner.emit([StepOutput(job_id, [ord("h")]), StepOutput(job_id, [ord("e")])])
        client.engine.fatal = RuntimeError("it broke")
        late = client.send(SamplingParams(max_tokens=9), prompt=SAID)
        await until(lambda: late in client.failures)
        last = StepOutput(job_id, [ord("l")])  # which the event loop has not seen yet
        emitting = threading.Thread(target=client.runner.emit, args=([last],))
        emitting.start()
        emitting.join()
        await client.runner.disconnect_all()
        await until(client.connection.closed.done)
        assert text(client.deltas[ran]) == "hel" and ran not in client.failures
        given_back = (held, late, arriving)
        assert {client.failures[one].code for one in given_back} == {WorkerLost.code}
        ended: list[Exception | None] = []
        again: Connection[WorkerToGateway] = await dial_address(
            client.engine.spec.socket,
            lambda: Connection(WorkerToGateway, lambda message: None, ended.append),
        )
        again.send(Hello(PROTOCOL, "gateway", "g"))
        await until(lambda: ended, "it greets nobody any more")


@pytest.mark.parametrize("dead", [True, False])
async def test_a_dead_engines_refusal_is_no_answer(tmp_path: Path, dead: bool) -> None:
    async with serving(spec(tmp_path)) as client:

        def refuse(job: object) -> None:
            if dead:
                client.engine.fatal = RuntimeError("it broke")
            raise EngineFailed("it takes nothing")

        client.engine.submit = refuse  # type: ignore[method-assign]
        said = await client.failure(client.send(SamplingParams(max_tokens=9), prompt=SAID))
        assert isinstance(said, Failed)
        assert said.code == (WorkerLost.code if dead else EngineFailed.code)


async def test_who_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    async with serving(spec(tmp_path, step_s=3600.0, max_context=10**7)) as client:
        client.send(SamplingParams(max_tokens=9), prompt=SAID)
        await until(lambda: client.runner.busy)
        (peer,) = [peer for peer in client.runner.peers if peer.jobs]
        (job_id,) = peer.jobs.values()
        assert client.connection._transport is not None
        client.connection._transport.pause_reading()
        client.runner.emit([StepOutput(job_id, [ord("x")] * 2_000_000)])
        client.engine.fatal = RuntimeError("it broke")
        async with asyncio.timeout(10):
            await client.runner.disconnect_all()
        client.connection._transport.resume_reading()


@pytest.mark.parametrize("bad", ["\ud800", 2**70], ids=["text", "token"])
@pytest.mark.parametrize("first", [True, False], ids=["delta", "batch"])
async def test_what_cannot_be_sent_fails_its_own_request_only(
    tmp_path: Path, bad: str | int, first: bool
) -> None:
    """Engines of others are to be feared: what they say may be no text, or no token."""
    async with serving(spec(tmp_path, step_s=3600.0)) as client:
        ill, well = (client.send(SamplingParams(max_tokens=9), prompt=SAID) for _ in range(2))
        await until(lambda: len(client.runner._tasks) == 2)
        (peer,) = [peer for peer in client.runner.peers if peer.jobs]
        jobs = dict(peer.jobs)
        outputs = [StepOutput(job, [ord("h")]) for job in jobs.values()]
        if not first:
            client.runner.emit(outputs)
            await until(lambda: len(client.deltas) == 2)
        task = client.runner._tasks[jobs[ill]]
        said, token = (bad, 1) if isinstance(bad, str) else ("x", bad)
        task.decode = task.text.decode = lambda token_ids: said
        client.runner.emit([StepOutput(jobs[ill], [token]), outputs[1]])
        assert (await client.failure(ill)).code == EngineFailed.code
        await until(lambda: text(client.deltas[well]) == ("h" if first else "hh"))
        await until(lambda: list(client.runner._tasks) == [jobs[well]])
        assert peer.jobs == {well: jobs[well]} and well not in client.failures
