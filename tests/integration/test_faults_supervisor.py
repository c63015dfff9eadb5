"""Stalls, `why`, reload: what the supervisor promises while things go wrong, on real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.messages import ReplicaStatus
from tests.integration.instance import PROGRAM, Instance, echo, stream_completion, write_config


def cli(instance: Instance, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *args, "--run-dir", str(instance.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def complete(url: str, model: str, prompt: str = "abc", **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": prompt, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def rewrite(instance: Instance, models: list[dict[str, Any]], **server: object) -> None:
    write_config(instance.run_dir.parent, models, server)


def replicas(instance: Instance, model: str) -> tuple[ReplicaStatus, ...]:
    return instance.model(model).replicas


def pids(instance: Instance, model: str) -> list[int]:
    return [replica.pid for replica in replicas(instance, model)]


def names(instance: Instance, model: str) -> list[tuple[str, str]]:
    return [(replica.name, replica.state) for replica in replicas(instance, model)]


@contextlib.contextmanager
def traffic(url: str, model: str) -> Iterator[list[str]]:
    """Requests from four clients all the time; what failed of them is in the list."""
    failed: list[str] = []
    done = [0]
    over = threading.Event()

    def client() -> None:
        while not over.wait(0.05):  # without a pause they would take a core
            try:
                answer = complete(url, model, "hello", max_tokens=20)
                done[0] += 1
                if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 20:
                    failed.append(answer.text)
            except httpx.HTTPError as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert done[0] > 0


# ---------------------------------------------------------------- stalls and why


@pytest.fixture(scope="module")
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [
        {**echo(name, hang_on="poison", hang_holding_gil=name == "gil"), "stall_timeout_s": 1.0}
        for name in ("hung", "gil", "stopped")
    ]
    models.append({**echo("slow", step_s=0.02), "stall_timeout_s": 1.0})
    with Instance.up(tmp_path_factory.mktemp("stalling"), models) as instance:
        instance.until_settled()
        yield instance


@pytest.mark.lane("long")
@pytest.mark.parametrize("how", ["hung", "gil", "stopped"])
def test_a_worker_that_stalls_is_replaced_and_told_of(stalling: Instance, how: str) -> None:
    url, name = stalling.url, f"{how}/0"
    pid = stalling.replica(name).pid
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{url}/v1/completions",
                json={"model": how, "prompt": "poison", "max_tokens": 40},
                timeout=0.2,
            )
    if how == "hung":  # the client has gone and its request with it: another one needs it
        threading.Thread(target=complete, args=(url, how), kwargs={"max_tokens": 40}).start()
    stalling.until("it is ended", lambda: stalling.replica(name).pid != pid)
    stalling.until("it is replaced", lambda: stalling.replica(name).state == "ready", 60)
    reason = stalling.replica(name).reason
    assert reason.startswith("stalled: no progress" if how == "hung" else "silent: no answer")
    told = json.loads(cli(stalling, "why", how, "--json").stdout)
    (death,) = told["replicas"][0]["exits"]
    assert death["what"] == reason
    assert any("echo/engine.py" in line for line in death["stacks"]) == (how != "stopped")
    assert complete(url, how).status_code == 200


@pytest.mark.parametrize("command", ["restart", "sleep"])
def test_a_worker_that_stalls_over_its_last_requests_loses_none(
    stalling: Instance, command: str
) -> None:
    worker = replicas(stalling, "slow")[0]
    stream = stream_completion(stalling.url, model="slow", prompt="abc", max_tokens=150)
    text = next(stream)
    assert cli(stalling, command, "slow", "--no-wait").returncode == 0
    left = "draining" if command == "restart" else "asleep"
    stalling.until(f"it is {left}", lambda: (worker.name, left) in names(stalling, "slow"))
    os.kill(worker.pid, signal.SIGSTOP)
    assert text + "".join(stream) == "abc" * 50
    assert worker.pid not in pids(stalling, "slow")


@pytest.mark.lane("long")
def test_why_tells_of_a_crash_loop_and_of_names_it_does_not_know(tmp_path: Path) -> None:
    bad = {**echo("bad", exit_on_load=7), "aliases": ["worse"]}
    with Instance.up(tmp_path, [bad, echo("good")]) as instance:
        instance.until_settled()
        given_up = instance.replica("bad/0")
        assert (given_up.state, given_up.restarts) == ("failed", 4)
        assert "(the last: exit code 7 before it was ready)" in given_up.reason
        assert complete(instance.url, "good").status_code == 200
        of_all = "bad: 0 of 1 ready; last death"
        for name, begins in (
            ("bad", of_all),
            ("worse", of_all),
            ("bad/0", "bad/0: failed; last death"),
        ):
            # while the next attempt is under way there is none to come
            said = instance.until("it waits", lambda: lamenting(instance, name), 60)  # noqa: B023
            assert said.startswith(begins)
            assert re.search(r"crash loop: [5-9] processes in a row", said)
            assert said.count("exit code 7 before it was ready") >= 5
        good = cli(instance, "why", "good").stdout
        assert "1 of 1 ready; no process of it has died" in good
        unknown = cli(instance, "why", "nope")
        assert unknown.returncode == 2
        assert "there are: bad, good, bad/0, good/0, gateway/0" in unknown.stderr


def lamenting(instance: Instance, name: str) -> str:
    """What `why` says of one that is to be tried again; "" while it is being tried."""
    done = cli(instance, "why", name)
    assert done.returncode == 0, done.stderr
    return done.stdout if "next attempt in" in done.stdout else ""


@pytest.mark.lane("long")
def test_escapes_of_a_child_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.stderr.write('evil \\x1b[2J\\x1b]0;title\\x07 words\\n')\n"
        "if 'servekit.worker' in ' '.join(sys.orig_argv): sys.exit('gone \\x1b[31m')\n"
    )
    model = {**echo("a"), "env": {"PYTHONPATH": str(tmp_path)}}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until("it has died", lambda: instance.replica("a/0").restarts, 60)
        shown = cli(instance, "why", "a").stdout
        assert "evil" in shown
        assert "\x1b" not in shown
        assert "\x07" not in shown


@pytest.mark.lane("waits")
def test_a_worker_that_is_of_use_is_back_at_once_however_often_it_is_killed(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        url = instance.until_settled().url
        for death in range(1, 8):
            assert complete(url, "a").status_code == 200
            served = lambda: instance.replica("a/0").state == "ready"  # noqa: E731
            instance.until("it serves", served, 60)
            # The supervisor hears of what it has served by the next Pong.
            began = time.monotonic()
            instance.until("a Pong", lambda: time.monotonic() - began > 1.3)  # noqa: B023
            os.kill(instance.replica("a/0").pid, signal.SIGKILL)
            instance.until("it is back", lambda: instance.replica("a/0").restarts == death, 30)  # noqa: B023
            instance.until("it is ready", served, 60)
        waits = [line for line in instance.log.splitlines() if "process_exited" in line]
        assert len(waits) == 7
        assert all("again_in_s=0.1" in line or "again_in_s=0.0" in line for line in waits)


# ---------------------------------------------------------------- reload


def test_a_reload_touches_only_what_changed_and_fails_no_request(tmp_path: Path) -> None:
    models = [echo("a", replicas=2, step_s=0.02), echo("b"), echo("c")]
    with Instance.up(tmp_path, models) as instance:
        url = instance.until_settled().url
        old, untouched = pids(instance, "a"), pids(instance, "c")
        with traffic(url, "a") as failed:
            rewrite(instance, [echo("a", replicas=2, step_s=0.01), echo("c"), echo("d")])
            done = cli(instance, "reload")
            assert done.returncode == 0, done.stderr
            expected = "2 replicas of a replaced, c unchanged, d added with 1 replica, b removed\n"
            assert done.stdout == expected
            whole = [("a/2", "ready"), ("a/3", "ready")]
            instance.until("it is replaced", lambda: names(instance, "a") == whole, 60)
        assert failed == []
        assert not set(old) & set(pids(instance, "a"))
        assert pids(instance, "c") == untouched
        assert complete(url, "d").status_code == 200
        assert complete(url, "b").status_code == 404
        assert [model.name for model in instance.status().models] == ["a", "c", "d"]


@pytest.mark.lane("long")
def test_what_no_worker_sees_changes_in_place_and_replicas_by_the_difference(
    tmp_path: Path,
) -> None:
    with Instance.up(tmp_path, [echo("a"), echo("b", replicas=2)]) as instance:
        url = instance.until_settled().url
        (a,), (b0, b1) = pids(instance, "a"), pids(instance, "b")
        rewrite(instance, [{**echo("a", replicas=2), "aliases": ["z"]}, echo("b")])
        assert cli(instance, "reload").stdout == "a scaled from 1 to 2, b scaled from 2 to 1\n"
        instance.until(
            "a has two", lambda: [s for _, s in names(instance, "a")] == ["ready"] * 2, 30
        )
        instance.until("b has one", lambda: len(pids(instance, "b")) == 1, 60)
        assert pids(instance, "a")[0] == a
        assert pids(instance, "b") == [b0]
        assert b1 not in pids(instance, "b")
        assert complete(url, "z").status_code == 200
        rewrite(instance, [{**echo("a", replicas=2), "aliases": ["y"]}, echo("b")])
        instance.signal(signal.SIGHUP)
        instance.until("the alias is there", lambda: complete(url, "y").status_code == 200)
        assert pids(instance, "a")[0] == a


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("unchanged"), [echo("a")]) as instance:
        instance.until_settled()
        yield instance


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [", "servekit.yaml:"),
        ("models: []", "models"),
        (json.dumps({"models": [{**echo("a"), "replcas": 2}]}), "'replicas'"),
        (json.dumps({"models": [echo("a")], "server": {"port": 1, "ui": True}}), "server.port"),
        (None, "servekit.yaml"),
    ],
)
def test_a_bad_file_changes_nothing_and_says_why(
    unchanged: Instance, text: str | None, words: str
) -> None:
    before, refused = pids(unchanged, "a"), unchanged.log.count("reload_refused")
    path = unchanged.run_dir.parent / "servekit.yaml"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    done = cli(unchanged, "reload")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    unchanged.signal(signal.SIGHUP)
    unchanged.until("that, too", lambda: unchanged.log.count("reload_refused") == refused + 2)
    assert pids(unchanged, "a") == before
    assert complete(unchanged.url, "a").status_code == 200


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """The first half of it is a valid file with fewer models."""
    with Instance.up(tmp_path, [echo("a"), echo("b")]) as instance:
        instance.until_settled()
        before = pids(instance, "b")
        path = tmp_path / "servekit.yaml"
        head = "server: {port: 0, ui: false}\nmodels:\n- {name: a, engine: echo, path: a}\n"
        rest = "- {name: b, engine: echo, path: b}\n- {name: c, engine: echo, path: c}\n"
        path.write_text(head)
        asking = subprocess.Popen(
            [*PROGRAM, "reload", "--run-dir", str(instance.run_dir)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with path.open("a") as file:
            for character in rest:
                file.write(character)
                file.flush()
                time.sleep(0.02)  # the very thing that is tested: a slow writer
        said, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0
        assert "removed" not in said
        assert "c added with 1 replica" in said
        assert pids(instance, "b") == before


@pytest.mark.lane("long")
def test_a_version_that_does_not_come_up_leaves_the_old_one_serving(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", replicas=2)]) as instance:
        url = instance.until_settled().url
        before = pids(instance, "a")
        with traffic(url, "a") as failed:
            rewrite(instance, [echo("a", replicas=2, load_error="no such weights")])
            assert cli(instance, "reload").returncode == 0
            taken_back = lambda: "model_reload_failed" in instance.log  # noqa: E731
            instance.until("it is taken back", taken_back, 60)
            instance.until("only the old are left", lambda: pids(instance, "a") == before, 60)
        assert failed == []
        assert "no such weights" in cli(instance, "ps").stdout
        assert "no such weights" in cli(instance, "why", "a").stdout
        rewrite(instance, [echo("a", replicas=2, step_s=0.001)])
        assert "2 replicas of a replaced" in cli(instance, "reload").stdout
        instance.until(
            "now it is",
            lambda: len(pids(instance, "a")) == 2 and not set(pids(instance, "a")) & set(before),
            60,
        )


@pytest.mark.lane("long")
def test_the_latest_of_two_reloads_wins(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        url = instance.until_settled().url
        with traffic(url, "a") as failed:
            rewrite(instance, [echo("a", load_s=600)])
            assert "replaced" in cli(instance, "reload").stdout
            rewrite(instance, [echo("a", step_s=0.001, replicas=2)])
            assert "replaced" in cli(instance, "reload").stdout

            def done() -> bool:
                return [state for _, state in names(instance, "a")] == ["ready"] * 2

            instance.until("the last one serves", done, 60)
        assert failed == []
        assert "a/0" not in dict(names(instance, "a"))


@pytest.mark.lane("long")
def test_hangups_and_a_sigterm_in_a_storm_end_it_cleanly(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        instance.until_settled()
        for _ in range(50):
            instance.signal(signal.SIGHUP)
        instance.signal(signal.SIGTERM)
        for _ in range(50):
            instance.signal(signal.SIGHUP)
        assert instance.wait() == 0
        assert instance.survivors() == []


def test_a_reload_without_an_instance_is_one_sentence(tmp_path: Path) -> None:
    command = [*PROGRAM, "reload", "--run-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"no servekit runs in {tmp_path / 'none'}; "
        "`servekit up` starts one, --run-dir names another\n"
    )


@pytest.mark.lane("long")
def test_a_pid_file_with_a_strangers_pid_harms_nobody(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        run_dir = tmp_path / "run"
        run_dir.mkdir(mode=0o700)
        (run_dir / "lock").write_text(f"{stranger.pid}\n")
        record = {"pid": stranger.pid, "started_at": 0.0, "url": "u", "config": "c", "mark": "m"}
        (run_dir / "supervisor.json").write_text(json.dumps(record))
        (run_dir / "children.json").write_text(
            json.dumps([{"name": "a/0", "pid": stranger.pid, "started": 1}])
        )
        with Instance.up(tmp_path, [echo("a")]) as instance:
            assert complete(instance.until_settled().url, "a").status_code == 200
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
