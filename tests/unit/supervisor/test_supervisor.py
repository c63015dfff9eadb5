"""The supervisor itself, created but with none of its processes started.

Its life with gateways and workers is tested by `tests/integration`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from servekit.errors import StartError
from servekit.event_store import EventFilter, newest_events
from servekit.protocol.messages import Accepted, Link, Quarantined, Refused, Status, Topology
from servekit.supervisor import supervisor as module
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.event_log import journal
from servekit.supervisor.pace import Pace
from servekit.supervisor.startup_resources import StartupResources
from servekit.supervisor.supervisor import Supervisor, handle_loop_error, last_words, ticking
from tests.polling import poll, poll_async

FILE = """
server: {gateways: 2, drain_timeout_s: 1, %s}
keys: [{name: ann, environment: ANNS_KEY}]
profiles: {small: [a]}
models:
  - {name: a, engine: echo, load: on_demand}
  - {name: b, engine: echo, load: manual, env: {OWN: '1'}}
"""
ENVIRON = {"PATH": os.environ["PATH"], "ANNS_KEY": "sk-" + "a" * 32, "HOME": "/home/ann"}


class Stage:
    """A supervisor, and what it has shown."""

    def __init__(self, folder: Path, server: str = "ui: true", profile: str = "") -> None:
        path = folder / "servekit.yaml"
        path.write_text(FILE % server)
        self.resources = StartupResources.acquire(folder / "run", "127.0.0.1", 0)
        plan = Source(path, {}, environ=ENVIRON, profile=profile).plan(())
        self.shown: list[Status] = []
        self.lines: list[tuple[str, str]] = []
        self.broken_display = False
        self.guard = Guard()
        self.port_before = self.port
        self.supervisor = Supervisor(plan, self.resources, ENVIRON, self.shown.append, self.show)
        self.supervisor._deployments.apply_plan(plan)  # nothing of it is loaded by itself

    def show(self, name: str, text: str) -> None:
        if self.broken_display:
            raise BrokenPipeError
        self.lines.append((name, text))

    @property
    def run_dir(self) -> Path:
        return self.resources.run_dir.path

    @property
    def port(self) -> int:
        port: int = self.resources.listeners[0].getsockname()[1]
        return port

    def close(self) -> None:
        self.supervisor._deployments.stop_changes()
        self.resources.run_dir.unlock()
        for sock in self.resources.listeners:
            sock.close()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make_one(*how: str) -> Stage:
        made.append(Stage(tmp_path, *how))
        return made[-1]

    yield make_one
    for stage in made:
        stage.close()


@pytest.fixture
async def stage(make: Callable[..., Stage]) -> Stage:
    return make()


# ---------------------------------------------------------------- what it tells


async def test_the_status_before_anything_has_started(stage: Stage) -> None:
    status = stage.supervisor.status()
    assert status.pid == os.getpid()
    assert status.url == f"http://127.0.0.1:{stage.port}"
    assert status.config == str(stage.run_dir.parent / "servekit.yaml")
    assert status.rss_bytes > 2**20
    assert [one.name for one in status.models] == ["a", "b"]
    assert [one.name for one in status.gateways] == ["gateway/0", "gateway/1"]
    assert (status.draining, status.profile, status.profiles) == (False, "", {"small": ("a",)})
    occasions = [gateway.starting.occasion for gateway in stage.supervisor._gateways]
    assert [one.cause for one in occasions if one is not None] == ["up", "up"]
    assert (await stage.supervisor.status_now()).pid == os.getpid()


async def test_a_profile_serves_its_models_alone(make: Callable[..., Stage]) -> None:
    status = make("ui: true", "small").supervisor.status()
    assert status.profile == "small"
    assert [(one.name, one.left_out) for one in status.models] == [("a", ""), ("b", "small")]


async def test_changes_are_shown_once_after_all_of_them(stage: Stage) -> None:
    await asyncio.sleep(0)
    stage.shown.clear()  # the beginning
    for _ in range(3):
        stage.supervisor.publish_change()
    assert stage.shown == []
    await asyncio.sleep(0)
    assert len(stage.shown) == 1
    stage.supervisor.publish_change()
    await asyncio.sleep(0)
    assert len(stage.shown) == 2


async def test_gateways_hear_of_a_change_and_not_of_what_is_as_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Topology] = []
    first, second = stage.supervisor._gateways
    monkeypatch.setattr(first, "publish", told.append)
    monkeypatch.setattr(second, "publish", lambda topology: None)
    await asyncio.sleep(0)
    told.clear()  # the beginning
    stage.supervisor.publish_change()
    await asyncio.sleep(0)
    assert told == []
    stage.supervisor.quarantine(Quarantined("f" * 64, "a", time.time() + 60, 60.0))
    await asyncio.sleep(0)
    [topology] = told
    assert [one.name for one in topology.models] == ["a", "b"]
    assert [one.fingerprint for one in topology.quarantined] == ["f" * 64]
    assert not topology.draining


async def test_why_is_told_of_models_and_processes_that_there_are(stage: Stage) -> None:
    assert not isinstance(stage.supervisor.why("a"), Refused)
    assert not isinstance(stage.supervisor.why("gateway/1"), Refused)
    assert isinstance(stage.supervisor.why("nobody"), Refused)


async def test_a_display_that_breaks_stops_no_childs_output(stage: Stage) -> None:
    stage.supervisor.on_line("a/0", "one")
    stage.broken_display = True
    with capture_logs() as logs:
        stage.supervisor.on_line("a/0", "two")
    assert stage.lines == [("a/0", "one")]
    assert [(log["event"], log["child"]) for log in logs] == [("display_failed", "a/0")]


# ---------------------------------------------------------------- what children may know


async def test_children_get_the_environment_without_keys(stage: Stage) -> None:
    environ: Mapping[str, str] = stage.supervisor.environ
    assert environ["HOME"] == "/home/ann" and environ["PATH"]
    assert "ANNS_KEY" not in environ
    model = stage.supervisor._deployments.plan.config.models[1]
    assert stage.supervisor.keys_of(model) == {}


# ---------------------------------------------------------------- links for a browser


async def test_a_link_opens_the_pages_once(stage: Stage) -> None:
    link = stage.supervisor.create_link()
    assert isinstance(link, Link)
    page, _, token = link.url.partition("?token=")
    assert page == f"{stage.supervisor.url}/ui" and len(token) > 20
    assert isinstance(stage.supervisor.redeem_link(token), Accepted)
    for wrong in (token, "", "x" * len(token)):
        refused = stage.supervisor.redeem_link(wrong)
        assert isinstance(refused, Refused)
        assert refused.message == "this link was used, or has expired"


async def test_no_link_is_given_out_where_there_are_no_pages(make: Callable[..., Stage]) -> None:
    refused = make("ui: false").supervisor.create_link()
    assert isinstance(refused, Refused)
    assert refused.message.startswith("no link is given out: there are no pages to open")


# ---------------------------------------------------------------- the run directory


async def test_the_profile_is_recorded_and_a_full_disk_refuses_no_switch(stage: Stage) -> None:
    stage.supervisor._record_profile()
    shutil.rmtree(stage.run_dir)
    with capture_logs() as logs:
        stage.supervisor._record_profile()
        stage.supervisor.children_changed()
    assert [log["event"] for log in logs] == ["profile_not_recorded", "children_not_recorded"]
    assert all(log["reason"] == "No such file or directory" for log in logs)


async def test_a_run_directory_that_was_removed_is_restored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.supervisor._admin_api, "listen_again", lambda path: None)
    stage.supervisor.children_changed()
    before = sorted(path.name for path in stage.run_dir.iterdir())
    with capture_logs() as logs:
        stage.supervisor._restore_run_dir()
        assert logs == []
        shutil.rmtree(stage.run_dir)
        stage.supervisor._restore_run_dir()
    assert [log["event"] for log in logs] == ["run_dir_restored"]
    assert json.loads((stage.run_dir / "children.json").read_text()) == []
    assert set(before) <= {path.name for path in stage.run_dir.iterdir()}


async def test_why_it_cannot_be_restored_is_logged_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.supervisor._admin_api, "listen_again", lambda path: None)
    shutil.rmtree(stage.run_dir)
    stage.run_dir.write_text("a file of somebody else")
    with capture_logs() as logs:
        for _ in range(3):
            stage.supervisor._restore_run_dir()
        stage.run_dir.unlink()
        stage.supervisor._restore_run_dir()
    events = [log["event"] for log in logs]
    assert events == ["run_dir_not_restored", "run_dir_restored"]


# ---------------------------------------------------------------- how it ends


async def until_told(stage: Stage) -> None:
    await asyncio.wait_for(stage.supervisor._until_told(), 30)


@pytest.mark.parametrize("request_", ["signal", "drain"])
async def test_it_ends_when_it_is_told(stage: Stage, request_: Any) -> None:
    stage.supervisor._requests.put_nowait(request_)
    await until_told(stage)


async def test_an_operator_may_end_it_at_once_or_when_all_is_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    for gateway in stage.supervisor._gateways:
        monkeypatch.setattr(gateway, "end_now", partial(ended.append, gateway.name))
    stage.supervisor.shutdown(now=False)
    await until_told(stage)
    assert ended == []
    stage.supervisor.shutdown(now=True)
    with capture_logs() as logs:
        await until_told(stage)
    assert ended == ["gateway/0", "gateway/1"]
    assert [log["event"] for log in logs] == ["shutdown_forced"]


async def test_a_bug_of_a_process_ends_it_with_that_error(stage: Stage) -> None:
    stage.supervisor._requests.put_nowait(StartError("no gateway can serve"))
    with pytest.raises(StartError, match="no gateway can serve"):
        await until_told(stage)


@pytest.mark.parametrize(("had", "has", "ends"), [
    (False, False, False), (True, True, False), (True, False, True),
])  # fmt: skip
async def test_a_hangup_reloads_unless_its_terminal_is_gone(
    stage: Stage, had: bool, has: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads: list[str] = []

    async def reload() -> None:
        reloads.append("reload")

    monkeypatch.setattr(stage.supervisor, "reload", reload)
    monkeypatch.setattr(stage.supervisor, "_has_terminal", had)
    monkeypatch.setattr(module, "has_terminal", lambda: has)
    waiting = asyncio.create_task(stage.supervisor._until_told())
    stage.supervisor._requests.put_nowait("hangup")
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() == ends
    assert reloads == ([] if ends else ["reload"])
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting


async def test_how_it_has_ended_is_recorded_and_its_exit_code(tmp_path: Path) -> None:
    journal.open_log(tmp_path)
    try:
        assert last_words(set()) == 0
        with capture_logs() as logs:
            assert last_words({"b/0", "a/0"}) == 1
    finally:
        journal.close()
    assert [(log["event"], log["children"]) for log in logs] == [
        ("processes_stuck", ["a/0", "b/0"])
    ]
    found = poll("both are there", lambda: newest_events(tmp_path, EventFilter(kinds=("down",)), 9))
    assert [event.what for event in found] == ["stopped", "stuck in the kernel: ['a/0', 'b/0']"]


# ---------------------------------------------------------------- its ticks, and its loop


@pytest.mark.parametrize(
    ("error", "logged"),
    [(ValueError("a bug"), ["tick_failed"]), (OSError(errno.EMFILE, "no files left"), [])],
)
async def test_a_tick_that_fails_stops_no_other(error: Exception, logged: list[str]) -> None:
    pace, looks = Pace(), 0
    second = asyncio.Event()

    def look(slept: bool) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise error
        second.set()

    with capture_logs() as logs:
        task = asyncio.create_task(ticking(look, pace))
        async with asyncio.timeout(30):
            await second.wait()
        task.cancel()
    assert [log["event"] for log in logs] == logged


def test_a_loop_that_lacks_files_to_accept_with_tells_nobody() -> None:
    told: list[dict[str, Any]] = []

    class Loop:
        def default_exception_handler(self, context: dict[str, Any]) -> None:
            told.append(context)

    loop: Any = Loop()
    handle_loop_error(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "none left")})
    assert told == []
    others: list[dict[str, Any]] = [{"exception": ValueError()}, {"message": "a task was lost"}]
    for context in others:
        handle_loop_error(loop, context)
    assert told == others


# ---------------------------------------------------------------- processes, and a tick


class Life:
    """A managed process that ends as the test says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.name, self.error = "life", error
        self.goes_on = asyncio.Event()

    async def supervise(self) -> None:
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error


async def test_a_process_that_has_ended_is_forgotten_and_that_is_published(stage: Stage) -> None:
    life: Any = Life()
    stage.supervisor._run(life)
    assert [task.get_name() for task in stage.supervisor._tasks.values()] == ["life"]
    await asyncio.sleep(0)
    stage.shown.clear()
    life.goes_on.set()
    await poll_async("it is published", lambda: stage.shown)
    assert stage.supervisor._tasks == {} and stage.supervisor._requests.empty()


async def test_the_error_of_a_process_ends_the_supervisor(stage: Stage) -> None:
    life: Any = Life(RuntimeError("a bug"))
    stage.supervisor._run(life)
    life.goes_on.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await until_told(stage)


async def test_a_process_that_ends_while_all_are_draining_is_waited_for(stage: Stage) -> None:
    life: Any = Life()
    stage.supervisor._run(life)
    stage.supervisor._draining = True
    life.goes_on.set()
    await next(iter(stage.supervisor._tasks.values()))
    await asyncio.sleep(0)
    assert list(stage.supervisor._tasks) == [life], "its task tells how it has ended"


async def test_without_processes_it_drains_at_once(stage: Stage) -> None:
    with capture_logs() as logs:
        assert await asyncio.wait_for(stage.supervisor._drain(), 30) == 0
    assert [log["event"] for log in logs] == ["supervisor_draining", "supervisor_stopped"]
    assert logs[0]["at_most_s"] == 1
    await poll_async("it is shown", lambda: stage.shown[-1].draining)
    assert all(gateway.ending for gateway in stage.supervisor._gateways)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", stage.port_before)
    assert isinstance(await stage.supervisor.reload(), Refused), "nothing changes any more"


async def test_a_second_request_to_end_means_now(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    for gateway in stage.supervisor._gateways:
        monkeypatch.setattr(gateway, "end_now", partial(ended.append, gateway.name))
    hurrying = asyncio.create_task(stage.supervisor._hurry_if_told_again())
    stage.supervisor.shutdown(now=False)  # an operator asks again: it drains already
    await asyncio.sleep(0)
    assert not hurrying.done()
    stage.supervisor._requests.put_nowait("signal")
    await asyncio.wait_for(hurrying, 30)
    assert ended == ["gateway/0", "gateway/1"]


class Guard:
    """The orphan guard, which may have died."""

    died = False

    def restart_if_dead(self) -> bool:
        return self.died


def tick(stage: Stage, *, slept: bool = False) -> None:
    stage.supervisor._guard = stage.guard  # type: ignore[assignment]
    stage.supervisor._tick_once(slept)


async def test_a_tick_looks_after_each_process(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.supervisor._admin_api, "listen_again", lambda path: None)
    did: list[str] = []
    for gateway in stage.supervisor._gateways:
        monkeypatch.setattr(gateway, "check_health", partial(did.append, "health"))
        monkeypatch.setattr(gateway, "forgive_suspension", partial(did.append, "forgive"))
    tick(stage)
    assert did == ["health"] * 2
    did.clear()
    tick(stage, slept=True)
    assert did == ["forgive", "health"] * 2
    stage.guard.died = True
    with capture_logs() as logs:
        tick(stage)
    assert [log["event"] for log in logs] == ["orphan_guard_restarted"]


async def test_the_run_directory_and_budgets_are_looked_at_once_a_second(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(stage.supervisor, "_restore_run_dir", partial(looks.append, "folder"))
    budgets = partial(looks.append, "budgets")
    monkeypatch.setattr(stage.supervisor, "_publish_budgets", budgets)
    for _ in range(3):
        tick(stage)
    assert looks == ["folder", "budgets"]
    stage.supervisor._housekeeping_at_s = time.monotonic()
    tick(stage)
    assert looks == ["folder", "budgets"] * 2


async def test_figures_that_changed_are_published_with_the_next_tick(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.supervisor._admin_api, "listen_again", lambda path: None)
    await asyncio.sleep(0)
    stage.shown.clear()
    tick(stage)
    await asyncio.sleep(0)
    assert stage.shown == []
    stage.supervisor.publish_later()
    await asyncio.sleep(0)
    assert stage.shown == []
    tick(stage)
    await asyncio.sleep(0)
    assert len(stage.shown) == 1


async def test_what_it_leaves_for_others_names_itself(stage: Stage) -> None:
    try:
        stage.supervisor._leave_record()
    finally:
        journal.close()
        stage.supervisor._usage.close()
    record = json.loads((stage.run_dir / "supervisor.json").read_text())
    assert (record["pid"], record["url"]) == (os.getpid(), stage.supervisor.url)
    assert (record["mark"], record["config"]) == (
        stage.supervisor.mark,
        str(stage.run_dir.parent / "servekit.yaml"),
    )
    [up] = newest_events(stage.run_dir, EventFilter(kinds=("up",)), 9)
    assert stage.supervisor.url in up.what and up.detail["pid"] == os.getpid()
