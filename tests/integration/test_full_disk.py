"""No room under the run directory and its logs: before a start, and while an instance serves.

Twice: on a disk of its own that is really full (a tmpfs in a mount namespace, which goes when the
instance goes), and with RLIMIT_FSIZE, which every user may set and which refuses the supervisor's
own log as well.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servekit.system.orphan_cleanup import read_children
from tests.integration.instance import PROGRAM, Instance, echo, stream_completion, write_config
from tests.integration.test_faults_supervisor import cli, complete, traffic

MOUNT = 'mount -t tmpfs -o size=128k,mode=700 servekit-test "$0" && '
#: Fills what was mounted, then starts what follows.
FULL = MOUNT + 'head -c 1m /dev/zero >"$0/ballast" 2>/dev/null; '
TELL_WHAT_IS_LEFT = '"$@"; code=$?; ls -A "$0"; exit $code'


class Disk(ABC):
    """What an instance's run directory, `path`/run, is on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def command(self) -> tuple[str, ...]:
        """What starts servekit on it."""

    @abstractmethod
    def full_from_the_start(self) -> tuple[str, ...]:
        """The same, with the disk full; prints what is left on it besides the ballast."""

    def here(self, instance: Instance) -> Path:
        """The path by which we see it."""
        return self.path

    @abstractmethod
    def fill(self, instance: Instance) -> None: ...

    @abstractmethod
    def clear(self, instance: Instance) -> None: ...


class Mounted(Disk):
    """Seen by the instance alone, and by us through /proc."""

    def command(self) -> tuple[str, ...]:
        return (*namespace(), "sh", "-c", MOUNT + 'exec "$@"', str(self.path), *PROGRAM)

    def full_from_the_start(self) -> tuple[str, ...]:
        script = FULL + TELL_WHAT_IS_LEFT
        return (*namespace(), "sh", "-c", script, str(self.path), *PROGRAM)

    def here(self, instance: Instance) -> Path:
        return Path(f"/proc/{instance.pid}/root{self.path}")

    def fill(self, instance: Instance) -> None:
        with (
            contextlib.suppress(OSError),
            (self.here(instance) / "ballast").open("wb", buffering=0) as file,
        ):
            while file.write(b"\0" * 4096) == 4096:
                pass

    def clear(self, instance: Instance) -> None:
        (self.here(instance) / "ballast").unlink()


class Limited(Disk):
    """No file of the supervisor can grow."""

    def command(self) -> tuple[str, ...]:
        return PROGRAM

    def full_from_the_start(self) -> tuple[str, ...]:
        return ("sh", "-c", "ulimit -S -f 0; " + TELL_WHAT_IS_LEFT, str(self.path), *PROGRAM)

    def fill(self, instance: Instance) -> None:
        _, hard = resource.prlimit(instance.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(instance.pid, resource.RLIMIT_FSIZE, (0, hard))

    def clear(self, instance: Instance) -> None:
        _, hard = resource.prlimit(instance.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(instance.pid, resource.RLIMIT_FSIZE, (hard, hard))


def namespace() -> tuple[str, ...]:
    return ("unshare", "-m") if os.getuid() == 0 else ("unshare", "-Urm")


def may_mount(path: Path) -> str:
    """Why not, or nothing."""
    command = (*namespace(), "sh", "-c", MOUNT + "true", str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


@pytest.fixture(params=[pytest.param(Mounted, marks=pytest.mark.lane("chaos")), Limited])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Disk:
    # Its own short path: /proc/PID/root goes in front of it, and sockets' paths are short.
    found: Disk = request.param(tmp_path_factory.mktemp("d"))
    if isinstance(found, Mounted) and (reason := may_mount(found.path)):
        pytest.skip(f"this machine lets us mount nothing: {reason}")
    return found


@contextlib.contextmanager
def up(disk: Disk, folder: Path, models: list[dict[str, Any]]) -> Iterator[Instance]:
    instance = Instance(disk.path, write_config(folder, models), program=disk.command())
    instance.run_dir = disk.here(instance) / "run"
    try:
        instance.until("it answers on its control socket", instance.running, within_s=60)
        yield instance
    finally:
        instance.end()


def stream(url: str, prompt: str, max_tokens: int, begun: threading.Event) -> str:
    """The text of a streamed answer; `begun` when some of it is there."""
    text = ""
    for piece in stream_completion(
        url, timeout=30, model="a", prompt=prompt, max_tokens=max_tokens
    ):
        text += piece
        begun.set()
    return text


def write_something(instance: Instance) -> None:
    """Have a worker write some lines: its stacks."""
    os.kill(instance.replica("a/1").pid, signal.SIGUSR2)


def lines_are_lost(instance: Instance, disk: Disk) -> None:
    def lost() -> bool:
        write_something(instance)
        return "log_file_unwritable" in instance.log or isinstance(disk, Limited)

    instance.until("it says that it cannot log", lost)


def kill_and_see_it_back(instance: Instance, name: str) -> None:
    pid = instance.replica(name).pid
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        now = instance.replica(name)
        return now.state == "ready" and now.pid != pid

    instance.until(f"{name} is back", back, 60)


@pytest.mark.lane("long")
def test_it_serves_on_while_the_disk_is_full_and_logs_again_after(
    tmp_path: Path, disk: Disk
) -> None:
    models = [echo("a", replicas=2, step_s=0.02)]
    with ThreadPoolExecutor(1) as pool, up(disk, tmp_path, models) as instance:
        url = instance.until_settled().url
        with traffic(url, "a") as failed:
            begun = threading.Event()
            under_way = pool.submit(stream, url, "abc", 200, begun)
            assert begun.wait(10)
            disk.fill(instance)
            lines_are_lost(instance, disk)
            kill_and_see_it_back(instance, "a/0")
            assert under_way.result(30) == ("abc" * 67)[:200]
            assert "2 of 2 ready; last death" in cli(instance, "why", "a").stdout
            write_config(tmp_path, [echo("a", replicas=3, step_s=0.02)])
            assert cli(instance, "reload").stdout == "a scaled from 2 to 3\n"
            instance.until("the third serves", lambda: instance.model("a").replicas[2:], 60)
            instance.until_settled()
            shown = cli(instance, "ps")
            assert (shown.returncode, shown.stdout.count(" ready ")) == (0, 3 + 1)
            disk.clear(instance)
            log_again(instance)
            kill_and_see_it_back(instance, "a/0")
        assert failed == []
        recorded = {child.pid for child in read_children(instance.run_dir)}
        assert {replica.pid for replica in instance.model("a").replicas} <= recorded
        if isinstance(disk, Mounted):  # its own log was not on that disk
            assert "children_not_recorded" in instance.log


def log_again(instance: Instance) -> None:
    log = instance.run_dir / "logs" / "a~1.log"

    def written() -> bool:
        write_something(instance)
        return log.exists() and "lines lost: " in log.read_text()

    instance.until("the worker's log goes on, and tells of the gap", written)
    assert log.read_text().count("(most recent call first):") >= 1
    instance.until("ours tells of it too", lambda: "log_file_recovered" in instance.log)


@pytest.mark.lane("long")
@pytest.mark.parametrize("how", ["down", "kill -9"])
def test_it_ends_in_order_while_the_disk_is_full(tmp_path: Path, disk: Disk, how: str) -> None:
    with up(disk, tmp_path, [echo("a", replicas=2, grandchildren=1)]) as instance:
        url = instance.until_settled().url
        run_dir = os.open(instance.run_dir, os.O_DIRECTORY)  # keeps what is mounted there
        try:
            disk.fill(instance)
            kill_and_see_it_back(instance, "a/0")  # that one is in no record
            assert complete(url, "a").status_code == 200
            if how == "kill -9":  # leaving the block sees that nothing survives
                return
            done = cli(instance, "down")
            assert (done.returncode, instance.wait()) == (0, 0), done.stderr
            assert instance.survivors() == []
            # SQLite keeps its rollback journal if the disk fills up within a transaction; it
            # rolls back at the next open.
            kept = {"lock", "logs", "requests"}
            kept |= {f"{name}.db{end}" for name in ("events", "usage") for end in ("", "-journal")}
            assert set(os.listdir(run_dir)) <= kept  # noqa: PTH208 (a descriptor)
        finally:
            os.close(run_dir)


def test_without_room_it_does_not_start_and_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    config = write_config(tmp_path, [echo("a")])
    run_dir = str(disk.path / "run")
    command = [*disk.full_from_the_start(), "up", "-c", str(config), "--run-dir", run_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stdout.split() in ([], ["ballast"])
    room = "No space left on device; free some space there, or choose"
    refused = room if isinstance(disk, Mounted) else "File too large; choose"
    sentence = f"cannot use the run directory {run_dir}: {refused} another with --run-dir\n"
    assert done.stderr == sentence


FILL = """
import asyncio, contextlib, os, pathlib, sys, time
from servekit.gateway.storage.batch_store import BatchStore, StoredFile
from servekit.gateway.storage.response_store import ResponseStore
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import BatchRules, ResponseStorage

disk = pathlib.Path(sys.argv[1])

def fill():
    with contextlib.suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
"""

DELETE_FILES = """
RULES = BatchRules(max_bytes=2**20, max_files=9, max_batches=9, days=30.0, concurrent=1)

async def main():
    store, now_s = BatchStore(disk / "files"), time.time()
    for at in range(2):
        (path := store.make_path()).write_bytes(bytes(40_000))
        file = StoredFile(f"file-{at}", "", "batch", "", 40_000, now_s, now_s + 7200)
        await store.add_file(path, file, RULES)
    fill()
    await store.remove_file("file-0")
    fill()
    time.time = lambda: now_s + 7300
    await store.sweep(RULES)
    time.time = lambda: now_s
    print(await store.list_files("", None), [*(disk / "files").iterdir()])
    store.close()

asyncio.run(main())
"""

DELETE_RESPONSES = """
RULES = ResponseStorage(max_bytes=2**30, days=30.0)
SIZE_BYTES = 2**22

async def main():
    before = ResponseStore(disk / "r.db")
    for id in "abc":
        before.save(id, "", os.urandom(SIZE_BYTES), lambda: b"[]", SIZE_BYTES, RULES)
    assert await before.find("c", "", RULES)
    before.close()
    first, second = ResponseStore(disk / "r.db"), ResponseStore(disk / "r.db")
    assert await first.find("a", "", RULES) and await second.find("b", "", RULES)
    fill()
    first.save("late", "", os.urandom(2**16), lambda: b"[]", 2**16, RULES)
    assert await first.find("late", "", RULES) is None, "the disk is not full"
    for at, (store, id) in enumerate([(first, "a"), (second, "b")]):
        assert await store.remove_response(id, "")
        free = os.statvfs(disk)
        assert free.f_bavail * free.f_frsize > SIZE_BYTES * 0.95
        fill()
    assert [await second.find(id, "", RULES) is not None for id in "abc"] == [False, False, True]
    (disk / "ballast").unlink()
    first.save("d", "", os.urandom(SIZE_BYTES), lambda: b"[]", SIZE_BYTES, RULES)
    assert await second.find("d", "", RULES)
    assert await second.remove_response("d", "") and await second.remove_response("c", "")
    first.close(), second.close()
    print("left", sum(path.stat().st_size for path in disk.glob("r.db")))

asyncio.run(main())
"""


def run_on_full_disk(folder: Path, size: str, script: str) -> str:
    """Run a script with its own disk of this size; return what it printed."""
    if reason := may_mount(folder):
        pytest.skip(f"this machine lets us mount nothing: {reason}")
    mount = MOUNT.replace("128k", size) + 'exec "$1" -c "$2" "$0"'
    command = (*namespace(), "sh", "-c", mount, str(folder), sys.executable, FILL + script)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_files_of_a_full_disk_can_be_deleted_and_expire(tmp_path: Path) -> None:
    assert run_on_full_disk(tmp_path, "512k", DELETE_FILES) == "[] []\n"


def test_responses_of_a_full_disk_can_be_deleted(tmp_path: Path) -> None:
    """Each is larger than SQLite's log may become there, and makes its whole room free."""
    told = run_on_full_disk(tmp_path, "32m", DELETE_RESPONSES)
    assert int(told.split()[-1]) < 2**17
