"""Child, with real processes that behave in all the ways that children do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from servekit.protocol.messages import BootFailed, Drain, FromWorker, Ping, Pong, Stop
from servekit.supervisor.process.child_process import ChildProcess, Command, Exit
from servekit.system import procfs

CHILDREN = Path(__file__).parents[1] / "children"


class Nursery:
    """Starts children, hears what they say, and lets none live on."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.messages: list[FromWorker] = []
        self.lines: list[str] = []
        self.children: list[ChildProcess[FromWorker]] = []
        self.heard = asyncio.Event()

    async def spawn(self, how: str, *, fds: tuple[int, ...] = ()) -> ChildProcess[FromWorker]:
        command = Command(
            name=how,
            module="wire_child",
            args=(how,),
            env={"ONLY": "this", "PYTHONPATH": str(CHILDREN), "PATH": os.environ["PATH"]},
            log_path=self.tmp_path / "child.log",
            pass_fds=fds,
        )
        child = await ChildProcess[FromWorker].spawn(
            command, FromWorker, self._hear, self.lines.append
        )
        self.children.append(child)
        return child

    async def until_it_speaks(self) -> None:
        await asyncio.wait_for(self.heard.wait(), 10)
        self.heard.clear()

    def _hear(self, message: FromWorker) -> None:
        self.messages.append(message)
        self.heard.set()


@pytest.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    for child in nursery.children:
        child.kill("the test is over")
        await asyncio.wait_for(child.exited, 10)
        assert procfs.read_process(child.pid) is None


async def ended(child: ChildProcess[FromWorker]) -> Exit:
    return await asyncio.wait_for(asyncio.shield(child.exited), 10)


async def gone(pid: int, within_s: float = 30.0) -> bool:
    """Whether a process that is not our child ends in time; its end comes as no event."""
    deadline = asyncio.get_running_loop().time() + within_s
    while asyncio.get_running_loop().time() < deadline:
        process = procfs.read_process(pid)
        if process is None or process.state == "Z":
            return True
        await asyncio.sleep(0.01)
    return False


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_messages_go_both_ways(nursery: Nursery) -> None:
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()
    child.send(Ping(42))
    await nursery.until_it_speaks()
    assert nursery.messages[-1] == Pong(42, 0.0, 0, 0, 0.0)
    assert (await child.stop(Stop(), 5.0)).code == 0


async def test_a_stop_returns_when_the_child_is_reaped(nursery: Nursery) -> None:
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()
    exit_ = await child.stop(Drain(), 5.0)
    assert exit_.code == 5
    assert procfs.read_process(child.pid) is None


async def test_a_deaf_child_gets_sigterm(nursery: Nursery) -> None:
    child = await nursery.spawn("deaf")
    await nursery.until_it_speaks()
    assert (await child.stop(Stop(), 0.05)).signal == signal.SIGTERM


async def test_a_stubborn_child_is_killed(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servekit.supervisor.process.child_process.TERM_GRACE_S", 0.1)
    child = await nursery.spawn("stubborn")
    await nursery.until_it_speaks()
    exit_ = await child.stop(Stop(), 0.1)
    assert exit_.signal == signal.SIGKILL
    assert "did not stop within 0.2 s" in str(exit_)


async def test_a_stopped_child_is_killed_too(nursery: Nursery) -> None:
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()
    os.kill(child.pid, signal.SIGSTOP)
    child.kill("stalled")
    assert str(await ended(child)) == "stalled"


async def test_its_end_is_noticed_at_once(nursery: Nursery) -> None:
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()
    loop = asyncio.get_running_loop()
    began = loop.time()
    os.kill(child.pid, signal.SIGKILL)
    exit_ = await ended(child)
    assert str(exit_) == "killed by SIGKILL"
    assert loop.time() - began < 5.0


async def test_its_end_is_noticed_without_pidfds_too(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()
    os.kill(child.pid, signal.SIGKILL)
    assert str(await ended(child)) == "killed by SIGKILL"


async def test_its_end_is_noticed_where_no_thread_can_be_started(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes counts threads, too, and other programs may have used it up."""
    child = await nursery.spawn("serve")
    await nursery.until_it_speaks()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        os.kill(child.pid, signal.SIGKILL)
        assert str(await ended(child)) == "killed by SIGKILL"


async def test_what_it_started_goes_with_it(nursery: Nursery) -> None:
    child = await nursery.spawn("children")
    await nursery.until_it_speaks()
    child.send(Ping(1))  # its line is older than its answer
    await nursery.until_it_speaks()
    grandchild = int(nursery.lines[0].split()[1])
    assert procfs.read_process(grandchild) is not None
    os.kill(child.pid, signal.SIGKILL)
    await ended(child)
    assert await gone(grandchild)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("code", "exit code 7"),
        ("suicide", "killed by SIGSEGV"),
        ("traceback", "exit code 1: RuntimeError: the reason"),
        ("nonsense", "broke the wire protocol"),
    ],
)
async def test_an_exit_is_told_in_words(nursery: Nursery, how: str, words: str) -> None:
    child = await nursery.spawn(how)
    assert words in str(await ended(child))


async def test_the_last_message_before_an_exit_is_heard(nursery: Nursery) -> None:
    child = await nursery.spawn("boot-failed")
    assert (await ended(child)).code == 3
    assert nursery.messages == [BootFailed("no such file", True)]


async def test_who_hangs_up_and_stays_is_killed(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servekit.supervisor.process.child_process.GOODBYE_S", 0.2)
    child = await nursery.spawn("hangs-up")
    assert str(await ended(child)) == "closed its control channel, but did not exit"


async def test_its_lines_are_passed_on_kept_and_remembered(nursery: Nursery) -> None:
    child = await nursery.spawn("talks")
    exit_ = await ended(child)
    assert nursery.lines == ["out", "100%", "err", "last words"]
    assert exit_.tail == ("out", "100%", "err", "last words")
    assert (nursery.tmp_path / "child.log").read_text() == "out\n100%\nerr\nlast words\n"


async def test_it_has_its_own_group_and_environment_and_no_fd_of_ours(nursery: Nursery) -> None:
    with socket.socket() as passed, socket.socket() as ours:
        ours.set_inheritable(True)  # the worst case: somebody's library has made it so
        child = await nursery.spawn("facts", fds=(passed.fileno(),))
        await ended(child)
        facts = {line.split()[0]: line.split()[1:] for line in nursery.lines}
        fds = {int(fd) for fd in facts["fds"]}
        assert fds >= {0, 1, 2, passed.fileno()}
        assert len(fds) == 5, "stdin, stdout, stderr, the control channel, the socket passed on"
        assert ours.fileno() not in fds
    assert facts["parent"] == ["True"]
    assert facts["leads"] == ["True"]
    assert facts["env"] == ["this", "0"]
    assert facts["dev-null"] == ["/dev/null"]


async def test_many_deaths_leak_no_fd_of_ours(nursery: Nursery) -> None:
    async def once() -> None:
        child = await nursery.spawn("code")
        await ended(child)
        await asyncio.sleep(0)

    await once()
    before = open_fds()
    await asyncio.gather(*(once() for _ in range(6)))
    assert open_fds() <= before


def test_out_of_memory_is_a_guess_with_a_reason() -> None:
    killed = Exit(None, signal.SIGKILL, (), out_of_memory=True)
    assert "out of memory" in str(killed)
    assert "out of memory" not in str(Exit(None, signal.SIGKILL, ()))


def test_log_lines_for_machines_are_no_reason() -> None:
    assert str(Exit(70, None, ("boom", '{"event": "x"}', ""))) == "exit code 70: boom"
    assert Exit(1, None, ()).explain(" before it was ready") == "exit code 1 before it was ready"
