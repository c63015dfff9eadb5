"""`servekit up`, from start to end, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from servekit.protocol.messages import Shutdown
from servekit.supervisor.admin.control_socket import query_supervisor
from servekit.system import procfs
from servekit.system.orphan_cleanup import MARK
from tests.integration.instance import PROGRAM, Instance, echo, write_config
from tests.integration.test_drain import stream
from tests.polling import poll

FORBIDDEN = ("torch", "transformers", "fastapi", "starlette", "uvicorn", "gradio", "uvloop")


def cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def cpu_s() -> float:
    """Time on the processor of all children that have ended; a busy machine does not stretch it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def within_a_second(run: Callable[[], object]) -> bool:
    """Whether it costs less on the processor, the interpreter's start included.

    Tried again if not: what runs on the same core makes the same work cost half as much more.
    """

    def once() -> float:
        began_s = cpu_s()
        run()
        return cpu_s() - began_s

    return any(once() < 1.0 for _ in range(5))


def complete(url: str, model: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": prompt, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30)


def environ_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def links(pid: int) -> set[str]:
    """What the open files of a process are."""
    return {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}


# ---------------------------------------------------------------- it serves


def test_it_serves_and_leaves_nothing(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", replicas=2), echo("b")]) as instance:
        status = instance.until_settled()
        assert [r.state for m in status.models for r in m.replicas] == ["ready"] * 3
        answer = complete(status.url, "b", "abc", max_tokens=4)
        assert answer.json()["choices"][0]["text"] == "abca"
        assert httpx.get(f"{status.url}/readyz").status_code == 200
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0
        assert instance.survivors() == []
        left = sorted(path.name for path in instance.run_dir.iterdir())
        assert left == ["events.db", "lock", "logs", "requests", "usage.db"]
        banner = instance.log[instance.log.index("is up") :]
        assert f"{status.url}/v1" in banner
        assert f"servekit down --run-dir {instance.run_dir}" in banner
        assert "/ui" not in banner


@pytest.mark.lane("long")
def test_gateways_answer_while_models_load(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("slow", load_s=600)]) as instance:
        instance.until("the gateway serves", lambda: instance.gateway().state == "ready", 60)
        url = instance.url
        assert httpx.get(f"{url}/livez").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503
        progress = instance.until("progress is seen", lambda: instance.replica("slow/0").progress)
        assert progress is not None and progress.phase
        assert "is up" not in instance.log
        instance.signal(signal.SIGINT)
        assert instance.wait(within_s=20) == 0, "a model that loads has nothing to finish"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """Several workers and several gateways."""
    folder = tmp_path_factory.mktemp("several")
    with Instance.up(folder, [echo("a", replicas=3)], server={"gateways": 2}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """Models that can be loaded, and one that cannot."""
    models = [echo("a", grandchildren=1), echo("bad", load_error="no such weights"), echo("good")]
    with Instance.up(tmp_path_factory.mktemp("mixed"), models) as instance:
        instance.until_settled()
        yield instance


def test_several_gateways_share_the_port(several: Instance) -> None:
    def counted() -> int:
        return sum(gateway.requests for gateway in several.status().gateways)

    before, url = counted(), several.url
    for _ in range(20):
        assert complete(url, "a", "x", max_tokens=1).status_code == 200
    several.until("both report their requests", lambda: counted() == before + 20)


# ---------------------------------------------------------------- it ends


def slow_request(pool: ThreadPoolExecutor, instance: Instance) -> Future[httpx.Response]:
    """A request of about a second, seen by the supervisor to be in flight."""
    url = instance.url
    request = pool.submit(complete, url, "slow", "x", max_tokens=60)
    instance.until("it is in flight", lambda: instance.gateway().in_flight == 1)
    return request


def test_ctrl_c_finishes_what_is_in_flight(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.05)]) as instance,
    ):
        url = instance.until_settled().url
        request = slow_request(pool, instance)
        instance.signal(signal.SIGINT)
        instance.until("it drains", lambda: "supervisor_draining" in instance.log)
        host, port = url.removeprefix("http://").split(":")

        def refused() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return True
            return False

        instance.until("it accepts no more", refused)
        assert request.result(30).json()["usage"]["completion_tokens"] == 60
        assert instance.wait() == 0
        assert "requests_finishing" in instance.log


@pytest.mark.lane("long")
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.2, ignore_sigterm=True)]) as instance,
    ):
        instance.until_settled()
        pool.submit(complete, instance.url, "slow", "x", max_tokens=5000)
        instance.until("it is in flight", lambda: instance.gateway().in_flight == 1)
        instance.signal(signal.SIGINT)
        instance.until("it drains", lambda: "supervisor_draining" in instance.log)
        assert instance.process.poll() is None
        began = time.monotonic()
        instance.signal(signal.SIGINT)
        assert instance.wait(within_s=5) == 0
        assert time.monotonic() - began < 4.0


@pytest.mark.lane("long")
def test_a_storm_of_signals_ends_it_cleanly(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", replicas=2)]) as instance:
        instance.until_settled()
        while instance.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                instance.signal(number)
        assert instance.wait() == 0
        assert instance.survivors() == []


@pytest.mark.lane("long")
def test_started_by_nohup_it_outlives_its_terminal(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")], program=("nohup", *PROGRAM)) as instance:
        url = instance.until_settled().url
        instance.signal(signal.SIGHUP)
        assert complete(url, "a", "x").status_code == 200
        assert not instance.status().draining
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


def test_it_serves_where_it_was_started_without_standard_streams(tmp_path: Path) -> None:
    """As by `ssh host servekit up … <&- >&- 2>&- &`, or by a program that closes all files."""
    without = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *PROGRAM)
    with Instance.up(tmp_path, [echo("a")], program=without) as instance:
        assert complete(instance.until_settled().url, "a", "x").status_code == 200
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


def test_it_serves_on_where_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    """As with `servekit up 2>&1 | head -1`."""
    read_once = ("bash", "-c", 'exec "$@" 2> >(head -1)', "bash", *PROGRAM)
    with Instance.up(tmp_path, [echo("a")], program=read_once) as instance:
        assert complete(instance.until_settled().url, "a", "x").status_code == 200
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


def test_signals_that_its_parent_had_blocked_or_ignored_count(tmp_path: Path) -> None:
    """The kernel reaps the children of a process that ignores SIGCHLD, and no exit is told."""
    parent = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        " signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT));"
        " os.execvp(sys.argv[1], sys.argv[1:])"
    )
    program = (sys.executable, "-c", parent, *PROGRAM)
    with Instance.up(tmp_path, [echo("a")], program=program) as instance:
        instance.until_settled()
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        instance.until("its end is told", lambda: "reason='killed by SIGKILL'" in instance.log)
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


def test_files_of_the_working_directory_are_no_modules_of_its_children(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("random", "json", "asyncio", "socket"):
        (here / f"{name}.py").write_text("raise SystemExit('shadowed')")
    servekit = Path(sys.executable).with_name("servekit")
    with Instance.up(tmp_path, [echo("a")], cwd=here, program=(str(servekit),)) as instance:
        assert complete(instance.until_settled().url, "a", "x").status_code == 200
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        poll("nothing survives", lambda: not instance.survivors(), within_s=2.0)


@pytest.mark.lane("long")
def test_the_drain_has_a_deadline(tmp_path: Path) -> None:
    models = [echo("slow", step_s=0.2)]
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, models, server={"drain_timeout_s": 0.3}) as instance,
    ):
        instance.until_settled()
        pool.submit(complete, instance.url, "slow", "x", max_tokens=5000)
        instance.until("it is in flight", lambda: instance.gateway().in_flight == 1)
        instance.signal(signal.SIGTERM)
        assert instance.wait(within_s=20) == 0


@pytest.mark.lane("long")
@pytest.mark.parametrize("moment", ["at once", "while loading", "serving", "draining"])
def test_nothing_survives_kill_9(tmp_path: Path, moment: str) -> None:
    options = {"load_s": 600} if moment == "while loading" else {}
    models = [
        echo("a", replicas=2, grandchildren=2, **options),
        echo("b", ignore_sigterm=True, step_s=0.2),
    ]
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, models) as instance,
    ):
        if moment == "while loading":
            instance.until("it loads", lambda: instance.replica("a/0").state == "loading")
        elif moment != "at once":
            instance.until_settled()
            assert any("sleep" in procfs.command_line(p.pid) for p in instance.survivors())
        if moment == "draining":
            pool.submit(complete, instance.url, "b", "x", max_tokens=5000)
            instance.until("it is in flight", lambda: instance.gateway().in_flight == 1)
            instance.signal(signal.SIGTERM)
            instance.until("it drains", lambda: "supervisor_draining" in instance.log)
        assert instance.survivors()
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        poll("nothing survives", lambda: not instance.survivors(), within_s=2.0)


@pytest.mark.lane("long")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_nothing_survives_kill_9_in_the_middle_of_a_start(tmp_path: Path, count: int) -> None:
    """Killed as soon as it has started that many: the guard, the gateway, the workers."""
    with Instance.begun(tmp_path, [echo("a", replicas=2, grandchildren=1)]) as instance:
        poll("it starts", lambda: len(instance.survivors()) >= count, within_s=60)
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        poll("nothing survives", lambda: not instance.survivors(), within_s=2.0)


def escaped(instance: Instance) -> set[int]:
    """Grandchildren that no environment, group or session leads to; the supervisor adopts them."""
    found = procfs.find_descendants(instance.pid)
    return {p.pid for p in found if procfs.command_line(p.pid) == "/bin/sleep 1000"}


def segments(pid: int) -> set[Path]:
    return set(Path("/dev/shm").glob(f"servekit-echo-{pid}-*"))


def living(pids: set[int]) -> set[int]:
    found = {pid for pid in pids if procfs.command_line(pid) == "/bin/sleep 1000"}
    return {pid for pid in found if (process := procfs.read_process(pid)) and process.state != "Z"}


@pytest.mark.lane("long")
def test_a_worker_leaves_neither_shared_memory_nor_who_escaped_it(tmp_path: Path) -> None:
    options = {"escaped_grandchildren": 2, "shared_memory_bytes": 2**20}
    with Instance.up(tmp_path, [echo("a", **options)]) as instance:
        first = instance.until_settled().models[0].replicas[0].pid
        old = escaped(instance)
        assert len(old) == 2
        assert len(segments(first)) == 1
        os.kill(first, signal.SIGKILL)
        instance.until("it is replaced", lambda: instance.replica("a/0").restarts == 1)
        instance.until("its successor is ready", lambda: instance.replica("a/0").state == "ready")
        second = instance.replica("a/0").pid
        assert len(segments(second)) == 1
        assert not segments(first)
        assert not living(old)
        new = escaped(instance)
        instance.signal(signal.SIGTERM)
        assert instance.wait(within_s=60) == 0
    assert not segments(second)
    assert len(new) == 2
    assert not living(new)


def test_kill_9_leaves_neither_shared_memory_nor_who_escaped(tmp_path: Path) -> None:
    options = {"escaped_grandchildren": 1, "shared_memory_bytes": 2**20}
    with Instance.up(tmp_path, [echo("a", **options)]) as instance:
        worker = instance.until_settled().models[0].replicas[0].pid
        (new,) = escaped(instance)
        assert segments(worker)
        noted = (instance.run_dir / "shared_memory.json", instance.run_dir / "children.json")
        poll("it is noted", lambda: noted[0].exists() and str(new) in noted[1].read_text(), 20)
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        poll("all gone", lambda: not segments(worker) and not living({new}), within_s=2.0)


def test_kill_9_ends_a_stopped_worker_too(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", grandchildren=1)]) as instance:
        instance.until_settled()
        os.kill(instance.replica("a/0").pid, signal.SIGSTOP)
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        poll("nothing survives", lambda: not instance.survivors(), within_s=2.0)


def test_the_next_start_is_clean_after_kill_9(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        instance.until_settled()
        instance.signal(signal.SIGKILL)
        instance.process.wait()
    with Instance.up(tmp_path, [echo("a")]) as instance:
        assert complete(instance.until_settled().url, "a", "x").status_code == 200


# ---------------------------------------------------------------- children die


def test_a_killed_worker_is_replaced(mixed: Instance) -> None:
    before = mixed.replica("a/0")
    old = [p.pid for p in mixed.survivors() if "sleep" in procfs.command_line(p.pid)]
    assert len(old) == 1
    os.kill(before.pid, signal.SIGKILL)

    def replaced() -> bool:
        now = mixed.replica("a/0")
        return now.state == "ready" and now.pid != before.pid

    mixed.until("it is replaced", replaced)
    after = mixed.replica("a/0")
    assert (after.restarts, after.reason) == (1, "killed by SIGKILL")
    assert after.socket != before.socket
    assert not Path(before.socket).exists()
    assert old[0] not in [p.pid for p in mixed.survivors()], "its grandchild went with it"
    assert complete(mixed.url, "a", "x", max_tokens=1).status_code == 200


@pytest.mark.lane("long")
def test_what_a_worker_started_in_a_session_of_its_own_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    model = {**echo("a"), "env": {"PYTHONPATH": str(tmp_path)}}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled()

        def sleepers() -> set[int]:
            return {p.pid for p in instance.survivors() if "sleep" in procfs.command_line(p.pid)}

        old = sleepers()
        assert len(old) == 1
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        instance.until("it is replaced", lambda: instance.replica("a/0").restarts == 1)
        instance.until("it is ready again", lambda: instance.replica("a/0").state == "ready")
        assert not old & sleepers()
        assert len(sleepers()) == 1


def test_a_killed_gateway_is_replaced_while_the_port_stays_ours(mixed: Instance) -> None:
    url = mixed.url
    worker, pid = mixed.replica("good/0").pid, mixed.gateway().pid
    os.kill(pid, signal.SIGKILL)
    # No connection is refused: it waits in the listening socket until the new one takes it.
    assert httpx.get(f"{url}/livez", timeout=10).status_code == 200
    mixed.until("it routes", lambda: complete(url, "good", "x").status_code == 200)
    gateway = mixed.gateway()
    assert gateway.pid not in (0, pid)
    assert gateway.restarts == 1
    assert mixed.replica("good/0").pid == worker


def test_a_model_that_cannot_load_says_why_and_others_serve(mixed: Instance) -> None:
    bad = mixed.replica("bad/0")
    assert (bad.state, bad.reason, bad.pid, bad.restarts) == ("failed", "no such weights", 0, 0)
    assert complete(mixed.url, "good", "x").status_code == 200
    assert complete(mixed.url, "bad", "x").status_code == 503
    ready = httpx.get(f"{mixed.url}/readyz")
    assert ready.status_code == 503
    assert "no such weights" in ready.text
    assert "failed: no such weights" in mixed.log


# ---------------------------------------------------------------- what each process is


def test_pins_are_in_the_environment_from_the_first_instruction(tmp_path: Path) -> None:
    model = {**echo("a", load_s=600), "env": {"HELLO": "there"}}
    with Instance.up(tmp_path, [model], env={"CUDA_VISIBLE_DEVICES": "0"}) as instance:
        pid = instance.until("it is started", lambda: instance.replica("a/0").pid)
        # /proc/PID/environ is what execve was given: nothing done later in the process shows.
        worker = environ_of(pid)
        assert worker["CUDA_VISIBLE_DEVICES"] == ""
        assert worker["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert worker["HELLO"] == "there"
        assert int(worker["OMP_NUM_THREADS"]) >= 1
        gateway = environ_of(instance.gateway().pid)
        assert gateway["CUDA_VISIBLE_DEVICES"] == ""
        assert "HELLO" not in gateway
        supervisor = environ_of(instance.pid)
        assert supervisor["CUDA_VISIBLE_DEVICES"] == "0"
        assert MARK not in supervisor


def test_the_supervisor_stays_small_and_loads_nothing_heavy(several: Instance) -> None:
    for _ in range(20):
        several.status()
    assert 20 * 2**20 < procfs.rss_bytes(several.pid) < 60 * 2**20
    assert several.status().rss_bytes < 60 * 2**20
    mapped = Path(f"/proc/{several.pid}/maps").read_text()
    for library in ("libtorch", "libcudart", "libcuda.so", *FORBIDDEN):
        assert f"/{library}" not in mapped, library


def test_what_up_imports_has_nothing_heavy_in_it() -> None:
    code = (
        "import sys\n"
        "import servekit.supervisor.supervisor, servekit.config.load\n"
        "import servekit.cli.display.startup_display, servekit.cli.main\n"
        "import servekit.supervisor.process.orphan_guard\n"
        f"print(*sorted({set(FORBIDDEN)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_children_get_no_fd_but_their_own(several: Instance) -> None:
    def sockets(pid: int) -> set[str]:
        return {link for link in links(pid) if link.startswith(("socket:", "pipe:"))}

    status = several.status()
    pids = [r.pid for r in status.models[0].replicas]
    assert not sockets(pids[0]) & sockets(pids[1])
    assert not any("lock" in link for link in links(pids[0]))
    shared = sockets(status.gateways[0].pid) & sockets(status.gateways[1].pid)
    assert len(shared) == 1, "the listening socket and nothing else"


def test_what_a_child_writes_is_logged_and_kept(mixed: Instance) -> None:
    os.kill(mixed.replica("good/0").pid, signal.SIGSEGV)  # faulthandler writes plain lines
    mixed.until("its last words are in the log", lambda: "Segmentation fault" in mixed.log)
    assert "Segmentation fault" in (mixed.run_dir / "logs" / "good~0.log").read_text()
    mixed.until("its reason is kept", lambda: "SIGSEGV" in mixed.replica("good/0").reason)
    mixed.until("it is replaced", lambda: mixed.replica("good/0").state == "ready")


# ---------------------------------------------------------------- it does not start


@pytest.mark.lane("long")
def test_a_busy_port_is_refused_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        config = write_config(tmp_path, [echo("a")], {"port": port})
        up = partial(cli, "up", "-c", str(config), "--run-dir", str(tmp_path / "run"))
        done = up()
        assert within_a_second(up)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is already in use by pid {os.getpid()}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing was made in vain"


def test_a_run_directory_in_use_is_refused(tmp_path: Path, several: Instance) -> None:
    config = write_config(tmp_path, [echo("a")])
    done = cli("up", "-c", str(config), "--run-dir", str(several.run_dir))
    assert done.returncode == 1
    assert f"in use by pid {several.pid}" in done.stderr
    assert complete(several.url, "a", "x").status_code == 200


@pytest.mark.parametrize(
    ("command", "change", "words"),
    [
        ("up", {"replcas": 2}, "'replicas'"),
        ("check", {"device": "cuda", "gpus": [99]}, "GPU"),
        pytest.param("up", {"options": {"step": 1}}, "step", marks=pytest.mark.lane("long")),
    ],
)
def test_a_bad_file_is_exit_2_within_a_second_and_starts_nothing(
    tmp_path: Path, command: str, change: dict[str, object], words: str
) -> None:
    config = write_config(tmp_path, [{**echo("a"), **change}])
    args = ["up", "-c"] if command == "up" else ["check"]
    run = partial(cli, *args, str(config), env={"SERVEKIT_RUN_DIR": str(tmp_path / "run")})
    done = run()
    assert done.returncode == 2
    assert within_a_second(run)
    assert words in done.stderr
    assert re.match(rf"{config}:\d+", done.stderr)
    assert not (tmp_path / "run").exists()
    assert done.stdout == ""


def test_a_missing_file_is_exit_2(tmp_path: Path) -> None:
    done = cli("up", "-c", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "none.yaml" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- the other commands


def test_check_shows_what_would_run_where(tmp_path: Path) -> None:
    config = write_config(tmp_path, [echo("a", replicas=2), echo("b")])
    done = cli("check", str(config))
    assert done.returncode == 0
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:4]] == [
        ["a/0", "echo", "cpu"],
        ["a/1", "echo", "cpu"],
        ["b/0", "echo", "cpu"],
    ]


def test_ps_and_down(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a"), echo("bad", load_error="why not")]) as instance:
        instance.until_settled()
        run_dir = str(instance.run_dir)
        shown = cli("ps", "--run-dir", run_dir)
        assert shown.returncode == 0
        rows = {line.split()[0]: line for line in shown.stdout.splitlines()}
        assert re.match(r"a/0 +ready +\d+ +cpu +\d+ MiB", rows["a/0"])
        assert re.match(r"bad/0 +failed +- ", rows["bad/0"])
        assert "why not" in rows["bad/0"]
        assert "gateway/0" in rows
        assert "warm-up" in cli("ps", "--timings", env={"SERVEKIT_RUN_DIR": run_dir}).stdout
        told = json.loads(cli("ps", "--json", "--run-dir", run_dir).stdout)
        assert told["pid"] == instance.pid
        assert told["models"][0]["replicas"][0]["state"] == "ready"
        assert told["gateways"][0]["name"] == "gateway/0"
        done = cli("down", "--run-dir", run_dir)
        assert (done.returncode, instance.process.poll()) == (0, 0), "it returns when it is gone"
        assert str(instance.pid) in done.stdout


@pytest.mark.lane("long")
def test_down_now_does_not_wait(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.2)]) as instance,
    ):
        instance.until_settled()
        pool.submit(complete, instance.url, "slow", "x", max_tokens=5000)
        instance.until("it is in flight", lambda: instance.gateway().in_flight == 1)
        began = time.monotonic()
        assert cli("down", "--now", "--run-dir", str(instance.run_dir)).returncode == 0
        assert time.monotonic() - began < 25.0, "a drain takes 30 s"


@pytest.mark.lane("long")
def test_down_twice_does_not_cut_off_what_is_in_flight(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(2) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.02)]) as instance,
    ):
        begun, enough = threading.Event(), threading.Event()
        under_way = pool.submit(stream, instance.until_settled().url, begun, enough)
        assert begun.wait(60)
        down = pool.submit(cli, "down", "--run-dir", str(instance.run_dir))
        instance.until("it drains", lambda: instance.status().draining)
        asyncio.run(query_supervisor(instance.run_dir / "control.sock", Shutdown(now=False)))
        begun.clear()
        assert begun.wait(60), "there is more of it"
        assert not under_way.done()
        enough.set()
        assert under_way.result(60)
        assert down.result(60).returncode == 0
        assert instance.wait() == 0


@pytest.mark.lane("long")
@pytest.mark.parametrize("command", ["ps", "down", "top", "events", "logs", "why m"])
def test_without_an_instance_there_is_one_sentence(tmp_path: Path, command: str) -> None:
    done = cli(*command.split(), "--run-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"no servekit runs in {tmp_path / 'none'}; "
        "`servekit up` starts one, --run-dir names another\n"
    )


@pytest.mark.lane("long")
def test_after_kill_9_ps_and_down_say_that_nothing_runs(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        instance.signal(signal.SIGKILL)
        instance.process.wait()
        for command in ("ps", "down"):
            done = cli(command, "--run-dir", str(instance.run_dir))
            assert done.returncode == 1
            assert done.stderr.startswith("no servekit runs in")


def test_help_is_quick() -> None:
    def once() -> float:
        began_s = cpu_s()
        assert "Usage" in cli("--help").stdout
        return cpu_s() - began_s

    assert any(once() < 0.2 for _ in range(30))  # what runs on the same core makes it cost more


def test_version_and_schema_are_for_programs() -> None:
    assert re.fullmatch(r"servekit \d+\.\d+\.\d+\n", cli("--version").stdout)
    assert "models" in json.loads(cli("schema").stdout)["properties"]


@pytest.mark.lane("long")
def test_wrong_flags_are_exit_2() -> None:
    assert cli("up").returncode == 2
    assert cli("up", "-c", "x.yaml", "--port", "70000").returncode == 2
