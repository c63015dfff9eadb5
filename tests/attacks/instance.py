"""Attacks on the instance itself: its run directory, its guard, its supervisor while it starts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from servekit.system import procfs
from tests.attacks.scene import Attack, Scene, fragile, segments
from tests.integration.instance import PROGRAM, Instance, echo

ROOT = Path(__file__).parents[2]


def two_replicas(folder: Path) -> list[dict[str, Any]]:
    return [fragile(folder, replicas=2)]


def with_grandchildren(folder: Path) -> list[dict[str, Any]]:
    return [echo("m", replicas=2, escaped_grandchildren=2, shared_memory_bytes=65536)]


async def remove_run_dir(scene: Scene) -> None:
    """The run directory goes, as at a logout; workers are killed, and come back."""
    async with scene.bystanders(8, scene.ask_fragile):
        workers = await scene.workers()
        shutil.rmtree(scene.instance.run_dir)
        await asyncio.sleep(1.0)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(3.0)
    await scene.until_serving(2)
    config = scene.folder / "servekit.yaml"
    told = await run_command("ps", "--run-dir", str(scene.instance.run_dir))
    scene.account.expect(told.returncode == 0, f"ps says: {told.stderr.strip()[:100]}")
    assert config.exists()


async def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of servekit."""
    command = [*PROGRAM, *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


async def kill_guard(scene: Scene) -> None:
    """The guard is killed, then, after a moment, the supervisor: nothing survives both."""
    [guard] = guards(scene.instance.pid)
    os.kill(guard, signal.SIGKILL)

    async def is_replaced() -> bool:
        found = guards(scene.instance.pid)
        return bool(found) and guard not in found

    await scene.until("the guard is started again", is_replaced, 10.0)
    await expect_nothing_left(scene)


async def kill_guard_and_supervisor(scene: Scene) -> None:
    """Both are killed at once: lifelines end the workers, and the next start sweeps the rest."""
    known = lost_sleepers()
    await asyncio.sleep(2.0)  # until the shared memory of the workers has been noted
    for pid in (*guards(scene.instance.pid), scene.instance.pid):
        os.kill(pid, signal.SIGKILL)
    await expect_nothing_left(scene)
    config, run_dir = scene.folder / "servekit.yaml", scene.instance.run_dir
    following = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "up", "--config", str(config), "--run-dir", str(run_dir)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    async def are_swept() -> bool:
        return lost_sleepers() <= known

    await scene.until("the next start sweeps what escaped", are_swept, 20.0)
    told = await run_command("down", "--run-dir", str(run_dir))
    scene.account.expect(told.returncode == 0, f"down says: {told.stderr.strip()[:100]}")
    await following.wait()


async def expect_nothing_left(scene: Scene) -> None:
    """Kill the supervisor, and wait two seconds for the end of all that it started."""
    scene.instance.process.kill()
    await asyncio.to_thread(scene.instance.process.wait)

    async def are_gone() -> bool:
        return not scene.instance.survivors()

    await scene.until("nothing survives the supervisor", are_gone, 2.0)


def guards(supervisor: int) -> list[int]:
    """PIDs of the guard processes of a supervisor."""
    return [
        process.pid
        for process in procfs.all_processes()
        if "servekit.supervisor.process.orphan_guard" in procfs.command_line(process.pid, 1000)
        and procfs.read_variable(process.pid, "SERVEKIT_TEST")
        == procfs.read_variable(supervisor, "SERVEKIT_TEST")
    ]


async def kill_while_starting(scene: Scene) -> None:
    """Instances are killed at moments of their first five seconds; the next start sweeps."""
    before, known = segments(), lost_sleepers()
    config = scene.folder / "servekit.yaml"
    for number, delay_s in enumerate((0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.5)):
        run_dir = scene.folder / f"run-{number % 2}"
        mark = f"servekit-attack-{os.getpid()}-{number}"
        process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, "up", "--config", str(config), "--run-dir", str(run_dir)),
            env={**os.environ, "SERVEKIT_MARK": mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        await asyncio.sleep(delay_s)
        process.kill()
        await process.wait()
        scene.account.requests += 1

        async def are_gone(mark: str = mark) -> bool:
            started = procfs.find_marked(f"SERVEKIT_MARK={mark}")
            return not any(started) and lost_sleepers() <= known

        await scene.until(f"all is gone of what was killed after {delay_s:g} s", are_gone, 3.0)
    left = segments() - before
    scene.account.expect(not left, f"{len(left)} segments of shared memory are left")


def lost_sleepers() -> set[int]:
    """PIDs of escaped grandchildren of the echo engine whose parent has died."""
    return {
        process.pid
        for process in procfs.all_processes()
        if process.parent == 1 and procfs.command_line(process.pid) == "/bin/sleep 1000"
    }


async def break_gateway(scene: Scene) -> None:
    """A gateway that cannot be imported ends `up`, with the reason."""
    site = scene.folder / "broken"
    site.mkdir()
    (site / "uvicorn.py").write_text("raise ImportError('no uvicorn for you')\n")
    config = scene.folder / "servekit.yaml"
    command = [
        *PROGRAM,
        "up",
        "--config",
        str(config),
        "--run-dir",
        str(scene.folder / "broken-run"),
    ]
    env = {**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    scene.account.requests += 1
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        scene.account.expect(False, "`up` does not end where no gateway can be imported")
        return
    scene.account.expect(done.returncode != 0, "`up` ended with 0")
    said = done.stdout + done.stderr
    scene.account.expect("no uvicorn for you" in said, f"`up` does not say why: {said[-200:]}")


async def look_without_environment(scene: Scene) -> None:
    """An instance in its default run directory is found by a shell without any variable."""
    await asyncio.to_thread(find_without_environment, scene)


def find_without_environment(scene: Scene) -> None:
    """Start a second instance as a user would, remove its runtime directory, and look for it."""
    folder = scene.folder / "d"
    runtime = folder / "runtime"
    runtime.mkdir(parents=True)
    env = {"XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(runtime)}
    with Instance.begun(folder, [echo("m")], env=env, run_dir=None) as second:
        second.run_dir = folder / "state" / "servekit" / "default"
        second.until("it runs", second.running)
        url = second.until_settled().url
        shutil.rmtree(runtime)
        for given in ({}, {"HOME": "/"}, {"XDG_STATE_HOME": str(folder / "elsewhere")}):
            told = subprocess.run(
                [*PROGRAM, "ps", "--json"],
                env=given,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            scene.account.requests += 1
            found = url in told.stdout + told.stderr  # others may run on this machine, too
            scene.account.expect(found, f"ps with {given} says: {told.stderr.strip()[:100]}")


def plain(folder: Path) -> list[dict[str, Any]]:
    return [echo("m")]


ATTACKS = [
    Attack("run-dir-removed", "the run directory is removed", two_replicas, remove_run_dir),
    Attack(
        "guard-killed", "the guard is killed, then the supervisor", with_grandchildren, kill_guard
    ),
    Attack(
        "guard-and-supervisor",
        "guard and supervisor are killed at once",
        with_grandchildren,
        kill_guard_and_supervisor,
    ),
    Attack(
        "killed-while-starting",
        "the supervisor is killed in its first seconds",
        with_grandchildren,
        kill_while_starting,
    ),
    Attack("broken-gateway", "a gateway that cannot be imported", plain, break_gateway),
    Attack(
        "no-environment",
        "ps without environment variables",
        plain,
        look_without_environment,
    ),
]
