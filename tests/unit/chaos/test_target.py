"""The instance under test: whom it may be, what it is made of, and what its gateways noticed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.chaos import target as targets
from servekit.chaos.target import Target
from servekit.errors import ConfigError, NobodyRuns, StartError
from servekit.protocol.messages import Status
from servekit.supervisor.process.run_dir import Record
from servekit.system import procfs
from servekit.system.orphan_cleanup import MARK
from tests.unit.cli.instance import listening, make_model, make_replica, make_status

URL = "http://127.0.0.1:1"


def record(folder: Path, pid: int) -> None:
    fields = Record(pid, 1.0, URL, "f.yaml", "a-mark")
    told = {name: getattr(fields, name) for name in Record.__slots__}
    (folder / "supervisor.json").write_text(json.dumps(told))


@pytest.fixture
def status(tmp_path: Path) -> Status:
    """This process is the supervisor."""
    record(tmp_path, os.getpid())
    models = make_model("m", make_replica("m/0"), make_replica("m/1", "loading")), make_model("n")
    config = str(tmp_path / "servekit.yaml")
    return replace(make_status(*models), pid=os.getpid(), url=URL, config=config)


@pytest.fixture
def running(tmp_path: Path, status: Status) -> Iterator[Path]:
    with listening(tmp_path, lambda message: None, status):
        yield tmp_path


async def test_the_first_model_is_the_target_unless_one_is_named(running: Path) -> None:
    first = await Target.find_target("http://localhost:1", running, None)
    assert (first.name, first.pid) == ("m", os.getpid())
    assert [one.name for one in await first.ready_replicas()] == ["m/0"]
    assert (await Target.find_target(URL, running, "n")).name == "n"
    with pytest.raises(ConfigError, match=r"^there is no model 'o'; there are: m, n$"):
        await Target.find_target(URL, running, "o")


async def test_only_the_instance_of_that_url_is_harmed(running: Path) -> None:
    with pytest.raises(StartError, match=r"serves http://127.0.0.1:1, not http://127.0.0.1:2; "):
        await Target.find_target("http://127.0.0.1:2", running, None)


async def test_one_with_processes_on_other_machines_is_left_alone(
    tmp_path: Path, status: Status
) -> None:
    """Their PIDs are those of other processes here."""
    record(tmp_path, os.getpid())
    worker = replace(make_replica("m/0"), socket="tcp://10.0.0.2:5")
    gateway = replace(status.gateways[0], node="10.0.0.2")
    for served in (
        replace(status, models=(make_model("m", worker),)),
        replace(status, gateways=(gateway,)),
    ):
        with (
            listening(tmp_path, lambda message: None, served),
            pytest.raises(StartError, match="launcher: ray"),
        ):
            await Target.find_target(URL, tmp_path, None)


async def test_one_that_speaks_https_is_told_at_once(tmp_path: Path, status: Status) -> None:
    record(tmp_path, os.getpid())
    served = replace(status, url="https://127.0.0.1:1")
    with (
        listening(tmp_path, lambda message: None, served),
        pytest.raises(StartError, match=r"speaks HTTPS.*server\.tls"),
    ):
        await Target.find_target("https://127.0.0.1:1", tmp_path, None)


@pytest.fixture
def stranger() -> Iterator[int]:
    """The PID of a process of another user."""
    if os.getuid():
        yield 1
        return
    command = ["sh", "-c", "echo it runs; exec sleep 600"]
    with subprocess.Popen(command, user=65534, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


async def test_only_an_instance_of_this_user_is_harmed(
    tmp_path: Path, status: Status, stranger: int
) -> None:
    record(tmp_path, stranger)
    with (
        listening(tmp_path, lambda message: None, replace(status, pid=stranger)),
        pytest.raises(StartError, match="is not yours"),
    ):
        await Target.find_target(URL, tmp_path, None)


async def test_a_record_of_another_process_is_no_instance(tmp_path: Path, status: Status) -> None:
    record(tmp_path, os.getppid())
    with listening(tmp_path, lambda message: None, status):
        with pytest.raises(NobodyRuns):
            await Target.find_target(URL, tmp_path, None)
        (tmp_path / "supervisor.json").unlink()
        with pytest.raises(NobodyRuns):
            await Target.find_target(URL, tmp_path, None)


async def test_settings_are_those_of_the_file_as_it_is_now(running: Path, status: Status) -> None:
    target = Target(URL, running, status, "m", "a-mark")
    assert target.settings() is None and target.option("replicas") is None, "there is no file"
    path = running / "servekit.yaml"
    path.write_text("models: [{name: m, engine: echo, replicas: 2, options: {load_s: 0.5}}]")
    assert target.option("replicas") == 2
    assert target.option("load_s") == 0.5, "an option of the engine"
    assert target.option("no_such") is None
    path.write_text("models: [{name: other, engine: echo}]")
    assert target.settings() is None
    path.write_text("models: [")
    assert target.settings() is None


async def test_a_status_is_awaited_for_so_long(tmp_path: Path, status: Status) -> None:
    news = [status, replace(status, draining=True)]
    with listening(tmp_path, lambda message: None, lambda: news.pop(0)):
        target = Target(URL, tmp_path, status, "m", "a-mark")
        took_s = await target.await_status(lambda found: found.draining, 10.0)
    assert took_s is not None and 0 <= took_s < 10
    with listening(tmp_path, lambda message: None, status):
        assert await target.await_status(lambda found: found.draining, 0.05) is None
        assert await target.until_whole(0.05) is None, "a worker still loads"


def test_processes_are_the_supervisor_its_marked_ones_and_all_below(
    tmp_path: Path, status: Status
) -> None:
    target = Target(URL, tmp_path, replace(status, pid=-1), "m", "a-mark")
    assert target.list_processes() == []
    command = "echo it runs; read x; sleep 600 & echo $!; wait"
    marked = {**os.environ, MARK: "a-mark"}
    with subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marked
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert [one.pid for one in target.list_processes()] == [process.pid]
        process.stdin.write(b"\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        of_supervisor = Target(URL, tmp_path, replace(status, pid=process.pid), "m", "other")
        try:
            for each in (target, of_supervisor):
                found = {one.pid for one in each.list_processes()}
                assert found >= {process.pid, child} and os.getpid() not in found
        finally:
            os.kill(child, 9)
            process.kill()
    assert procfs.read_process(process.pid) is None


def test_the_ports_of_a_process_are_those_of_its_peers(tmp_path: Path, status: Status) -> None:
    target = Target(URL, tmp_path, status, "m", "a-mark")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        own = listener.getsockname()[1]
        with socket.create_connection(listener.getsockname()) as client:
            accepted, peer = listener.accept()
            with accepted:
                held = target.ports_held_by(os.getpid())
                assert {own, peer[1]} <= held and 0 not in held
                assert client.getsockname()[1] == peer[1]


def test_a_loss_is_noticed_once_the_last_gateway_has(tmp_path: Path, status: Status) -> None:
    target = Target(URL, tmp_path, status, "m", "a-mark")
    assert target.await_loss_noticed("m/0", 0.0) is None
    logs = tmp_path / "logs"
    logs.mkdir()

    def line(second: int, event: str, worker: str) -> str:
        told = {"event": event, "worker": worker, "timestamp": f"2026-01-01T00:00:{second:02}Z"}
        return json.dumps(told) + "\n"

    (logs / "gateway-0.log.1").write_text(line(1, "worker_lost", "m/0"))
    (logs / "gateway-0.log").write_text(
        line(12, "worker_lost", "m/0") + "no JSON\n[1]\n{}\n" + line(30, "worker_lost", "m/1")
    )
    (logs / "gateway-1.log").write_text(line(14, "worker_lost", "m/0") + line(40, "ready", "m/0"))
    (logs / "m~0.log").write_text(line(50, "worker_lost", "m/0"))
    began = 1767225600.0 + 10  # ten seconds into 2026
    assert target.await_loss_noticed("m/0", began) == 4.0
    assert [event["at"] for event in target.gateway_events(began)] == [
        began + seconds for seconds in (2, 20, 4, 30)
    ]


def test_a_line_that_is_no_event_is_left_out() -> None:
    for text in ("", "x", "[]", "null", '{"event": "x"}', '{"timestamp": "noon"}'):
        assert targets._parse_line(text) is None
