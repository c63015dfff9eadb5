"""Experiments on processes: workers and gateways that are killed, stopped, or hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from servekit.chaos.client import ChatAnswer, Question
from servekit.chaos.load import Silences
from servekit.chaos.result import ExperimentContext, ExperimentResult, Judge
from servekit.protocol.messages import GatewayStatus, ReplicaStatus, Status
from servekit.system import procfs
from servekit.system.parent_death import CHAOS, FAIL_STEP
from servekit.units import format_latency

#: Limit from a death until the instance is whole, without loading the model.
WHOLE_WITHIN_S = 30.0
#: Limit of the reaction to EOF: the promise is 10 ms; the rest is tolerance for a busy machine.
NOTICE_WITHIN_S = 0.1
#: Limit from the end of `stall_timeout_s` until the worker is dumped, killed and reported.
STALL_GRACE_S = 5.0
#: Limit for the restart of a killed gateway.
GATEWAY_BACK_S = 1.0
#: Marks in the command lines of engines' own processes: vLLM's engine core, with or without its
#: process title, and the ranks of the transformers engine.
_ENGINES = (
    "EngineCore",
    "multiprocessing.spawn",
    "servekit.engines.transformers.tensor_parallel.rank",
)
#: Text of a stack dump (faulthandler) in a hung worker's log.
_DUMPED = "most recent call first"


async def worker_killed(scene: ExperimentContext) -> ExperimentResult:
    """SIGKILL a worker under load: streams continue, answers arrive, clients notice nothing."""
    judge = Judge("worker killed", "SIGKILL to the busiest worker")
    return await _kill_worker(scene, judge, lambda pid: os.kill(pid, signal.SIGKILL))


async def step_raises(scene: ExperimentContext) -> ExperimentResult:
    """Make an engine's step raise under load: its worker dies, and clients notice nothing."""
    judge = Judge("step raises", "an exception in the next step of the busiest worker's engine")
    for replica in await scene.target.ready_replicas():
        if not takes_fail_step(replica.pid):
            return judge.skip(
                f"its workers take no such order; start it with `{CHAOS}=1 servekit up …` (a unit: "
                f"Environment={CHAOS}=1, a container: -e {CHAOS}=1), and run the experiment again"
            )
    return await _kill_worker(scene, judge, lambda pid: os.kill(pid, FAIL_STEP))


async def engine_process_killed(scene: ExperimentContext) -> ExperimentResult:
    """SIGKILL an engine process below a worker: vLLM's engine core, or a rank."""
    judge = Judge("engine process killed", "SIGKILL to a process of the busiest worker's engine")
    for replica in await scene.target.ready_replicas():
        if not engine_processes(replica.pid):
            return judge.skip("its engine has no process but the worker's (vLLM and ranks have)")
    return await _kill_worker(
        scene, judge, lambda pid: os.kill(engine_processes(pid)[0], signal.SIGKILL)
    )


async def _kill_worker(
    scene: ExperimentContext, judge: Judge, end: Callable[[int], None]
) -> ExperimentResult:
    """End the busiest worker, given its PID, under load."""
    async with scene.load() as load:
        await load.until_busy()
        victim = await _find_busiest(scene)
        silences, at = Silences(load.active), time.time()
        end(victim.pid)
        whole_s = await scene.target.until_whole(WHOLE_WITHIN_S, without=victim.pid)
        await asyncio.sleep(scene.seconds)
    notice_s = scene.target.await_loss_noticed(victim.name, at)
    judge.clean(load.tally)
    judge.expect_within("noticed", notice_s, NOTICE_WITHIN_S)
    judge.expect_within("whole again", whole_s, WHOLE_WITHIN_S)
    judge.notes.append(
        f"longest silence of a stream {format_latency(max(silences.silent_s, default=0))}"
    )
    judge.notes.append(f"exit reason: {await _exit_reason(scene, victim.name)}")
    return judge.finding(load.tally, notice_s, whole_s)


def takes_fail_step(pid: int) -> bool:
    """Return whether a worker was started for experiments that make steps raise."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"{CHAOS}=1".encode() in environment


def engine_processes(pid: int) -> list[int]:
    """Return the engine processes below a worker, the leading one first."""
    below = [process.pid for process in procfs.find_descendants(pid)]
    return [
        one for one in below if any(mark in procfs.command_line(one, 4096) for mark in _ENGINES)
    ]


async def worker_stopped(scene: ExperimentContext) -> ExperimentResult:
    """SIGSTOP a worker under load: it does not answer Ping, so it is killed and replaced."""
    judge = Judge("worker stopped", "SIGSTOP to the busiest worker")
    stall_s = scene.target.option("stall_timeout_s")
    if stall_s is None:
        return judge.skip("the model has no stall_timeout_s")
    async with scene.load() as load:
        await load.until_busy()
        victim = await _find_busiest(scene)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            notice_s, whole_s = await _await_replacement(scene, victim, stall_s)
        finally:
            _resume_process(victim.pid)
        await asyncio.sleep(scene.seconds)
    judge.clean(load.tally)
    judge.expect_within("noticed", notice_s, stall_s + STALL_GRACE_S)
    judge.expect_within("whole again", whole_s, stall_s + WHOLE_WITHIN_S)
    return judge.finding(load.tally, notice_s, whole_s)


async def engine_stalled(scene: ExperimentContext) -> ExperimentResult:
    """Hang an engine under load: its stacks are dumped, it is killed, its requests continue.

    Only the echo engine can hang on demand, by a mark in a prompt; the request with the mark hangs
    every worker that runs it, and must be the only one to end with an error.
    """
    mark, stall_s = (scene.target.option(name) for name in ("hang_on", "stall_timeout_s"))
    judge = Judge("engine stalled", "a request that hangs the engine")
    if not mark:
        return judge.skip("the engine cannot be made to hang (echo with hang_on can)")
    if stall_s is None:
        return judge.skip("the model has no stall_timeout_s")
    async with scene.load() as load:
        await load.until_busy()
        at, before = time.monotonic(), await scene.target.read_status()
        written = _log_lengths(scene)
        hanging = asyncio.create_task(_hang_engine(scene, mark))
        notice_s = await scene.target.await_status(
            lambda status: _lost_any(before, status), stall_s + STALL_GRACE_S + 1
        )
        answer = await hanging
        whole_s = await scene.target.until_whole(WHOLE_WITHIN_S)
        whole_s = None if whole_s is None else time.monotonic() - at
        await asyncio.sleep(scene.seconds)
    judge.clean(load.tally)
    judge.expect_within("noticed", notice_s, stall_s + STALL_GRACE_S)
    judge.promise(whole_s is not None, f"not fully ready within {WHOLE_WITHIN_S:g} s of its end")
    judge.promise(_has_dumped(scene, written), "no stack dump in the logs")
    judge.promise(
        answer.status >= 400 or bool(answer.error), "the request that should hang succeeded"
    )
    judge.notes.append(f"the hanging request: {answer.failure} after {answer.took_s:.1f} s")
    return judge.finding(load.tally, notice_s, whole_s)


async def _hang_engine(scene: ExperimentContext, mark: str) -> ChatAnswer:
    # A new text each time: the last one may be quarantined.
    question = Question(scene.target.name, f"please hang {time.time_ns()}: {mark}", 8)
    return await scene.target.client.await_answer(question, stream=False)


async def gateway_killed(scene: ExperimentContext) -> ExperimentResult:
    """SIGKILL a gateway under load: another answers at once, and only its own connections break."""
    status = await scene.target.read_status()
    judge = Judge("gateway killed", f"SIGKILL to the busiest of {len(status.gateways)} gateways")
    async with scene.load() as load:
        await load.until_busy()
        victim, broken = _kill_busiest_gateway(scene, await scene.target.read_status())
        load.excused = lambda answer: answer.port in broken
        at = time.monotonic()
        next_, whole_s = await asyncio.gather(
            scene.target.client.await_answer(scene.known[0].question, stream=True),
            scene.target.until_whole(WHOLE_WITHIN_S, without=victim.pid),
        )
        await asyncio.sleep(scene.seconds)
    first_s = None if next_.first_s is None else next_.first_s - at
    judge.clean(load.tally)
    judge.promise(not next_.failure, f"the next request failed: {next_.failure}")
    judge.expect_within("first chunk of the next request", first_s, GATEWAY_BACK_S)
    judge.expect_within("the gateway is back", whole_s, GATEWAY_BACK_S)
    judge.notes.append(
        f"{load.excuses} of its own {len(broken)} connections broke; the next request had its "
        f"first chunk after {format_latency(first_s)}"
    )
    return judge.finding(load.tally, None, whole_s)


def _kill_busiest_gateway(
    scene: ExperimentContext, status: Status
) -> tuple[GatewayStatus, set[int]]:
    """Kill the gateway with the most clients; return it, and the ports of its clients.

    It is stopped first, so that it cannot accept further clients.
    """
    victim = max(status.gateways, key=lambda g: len(scene.target.ports_held_by(g.pid)))
    os.kill(victim.pid, signal.SIGSTOP)
    ports = scene.target.ports_held_by(victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    return victim, ports


# ---------------------------------------------------------------- shared helpers


async def _find_busiest(scene: ExperimentContext) -> ReplicaStatus:
    return max(await scene.target.ready_replicas(), key=lambda replica: replica.running)


async def _exit_reason(scene: ExperimentContext, name: str) -> str:
    """Return the reason for a worker's last exit, as `servekit ps` shows it."""
    replicas = (await scene.target.model()).replicas
    return next((replica.reason for replica in replicas if replica.name == name), "")


async def _await_replacement(
    scene: ExperimentContext, victim: ReplicaStatus, stall_s: float
) -> tuple[float | None, float | None]:
    """Return the seconds until the supervisor has given up the worker, and until all is whole."""
    notice_s = await scene.target.await_status(
        lambda status: _given_up(status, victim), stall_s + STALL_GRACE_S + 1
    )
    if notice_s is None:
        return None, None
    rest_s = await scene.target.until_whole(WHOLE_WITHIN_S, without=victim.pid)
    return notice_s, None if rest_s is None else notice_s + rest_s


def _given_up(status: Status, victim: ReplicaStatus) -> bool:
    return not any(
        replica.pid == victim.pid and replica.state == "ready"
        for model in status.models
        for replica in model.replicas
    )


def _lost_any(before: Status, now: Status) -> bool:
    ready = [
        {r.pid for m in status.models for r in m.replicas if r.state == "ready"}
        for status in (before, now)
    ]
    return bool(ready[0] - ready[1])


def _resume_process(pid: int) -> None:
    """Resume the process, so that none stays stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _log_lengths(scene: ExperimentContext) -> dict[Path, int]:
    """Return the lengths of the workers' logs, in characters."""
    logs = (scene.target.run_dir / "logs").glob("*~*.log")
    return {path: len(path.read_text(errors="replace")) for path in logs}


def _has_dumped(scene: ExperimentContext, before: dict[Path, int]) -> bool:
    """Return whether a worker has dumped its stacks since then."""
    return any(
        _DUMPED in path.read_text(errors="replace")[before.get(path, 0) :]
        for path in _log_lengths(scene)
    )


EXPERIMENTS = {
    "worker-killed": worker_killed,
    "step-raises": step_raises,
    "engine-process-killed": engine_process_killed,
    "worker-stopped": worker_stopped,
    "engine-stalled": engine_stalled,
    "gateway-killed": gateway_killed,
}
