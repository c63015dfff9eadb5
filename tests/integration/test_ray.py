"""`launcher: ray` on a real cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit import __version__
from servekit.errors import ConfigError, ServekitError
from servekit.protocol.adapters import AdapterSpec, AddAdapter
from servekit.protocol.messages import GetWhy, Reload, ReplicaStatus, Why
from servekit.protocol.residency import SetResidency
from servekit.supervisor.admin.control_socket import query_supervisor
from servekit.system import procfs
from tests.integration import ray_growing
from tests.integration.instance import Instance, echo, write_config
from tests.integration.ray_cluster import raylet_of, running
from tests.integration.ray_nodes import PATIENCE_S, Nodes
from tests.integration.test_adapters import folder
from tests.polling import poll

pytestmark = [
    pytest.mark.lane("ray"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ROOT = Path(__file__).parents[2]
#: How long an instance without its supervisor serves on, where that is waited for.
GRACE_S = 12.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running() as made:
        for _ in range(2):
            made.add()
        yield made


def section(nodes: Nodes, **more: Any) -> dict[str, Any]:
    """A worker takes all CPUs of a node: two are never on one."""
    own = {"address": nodes.address, "strategy": "SPREAD", "cpus": 2, "grace_s": 60}
    return {"launcher": "ray", "ray": {**own, "connect_s": PATIENCE_S, **more}}


class Service:
    """An instance, and those that come after it in the same place."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._folder = folder
        self._config = write_config(
            folder, [echo("a", replicas=2, step_s=0.02)], None, section(nodes)
        )
        self.up = Instance(folder, self._config)

    def again(self) -> None:
        self.up = Instance(self._folder, self._config)

    def workers(self) -> tuple[ReplicaStatus, ...]:
        """Of an instance that may be on its way up, or down."""
        with contextlib.suppress(ServekitError):
            return tuple(one for model in self.up.status().models for one in model.replicas)
        return ()

    def until_both_serve(self) -> None:
        self.up.until(
            "both workers serve",
            lambda: [one.state for one in self.workers()] == ["ready", "ready"],
            PATIENCE_S,
        )


@pytest.fixture(scope="module")
def service(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("ray"), nodes)
    try:
        made.until_both_serve()
        yield made
    finally:
        made.up.signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            made.up.wait(PATIENCE_S)
        made.up.end()


def say(url: str, text: str, model: str = "a") -> str:
    body = {"model": model, "prompt": text, "max_tokens": len(text)}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def test_workers_on_two_nodes_answer_through_one_gateway(service: Service) -> None:
    workers = service.workers()
    assert all(worker.socket.startswith("tcp://") for worker in workers)
    assert all(worker.device.startswith("cpu on ") for worker in workers)
    assert len({raylet_of(worker.pid) for worker in workers}) == 2
    assert say(service.up.url, "hello") == "hello"
    service.up.until("what each takes is told", lambda: sizes_are_true(service), PATIENCE_S)


def sizes_are_true(service: Service) -> bool:
    """What their nodes have told of their memory is what they take."""
    told = {worker.pid: worker.rss_bytes for worker in service.workers()}
    return told == pytest.approx({pid: procfs.rss_bytes(pid) for pid in told}, rel=0.1)


def test_a_worker_that_is_killed_comes_back_where_it_was(service: Service) -> None:
    before = service.up.replica("a/0")
    place = raylet_of(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    service.up.until("it has died", lambda: service.up.replica("a/0").restarts, PATIENCE_S)
    service.until_both_serve()
    after = service.up.replica("a/0")
    assert after.pid != before.pid
    assert "SIGKILL" in after.reason
    assert raylet_of(after.pid) == place
    assert say(service.up.url, "again") == "again"


def test_a_driver_that_is_killed_repeats_no_line_of_a_log(service: Service) -> None:
    logs = [service.up.run_dir / "logs" / f"a~{number}.log" for number in range(2)]
    before = [log.read_text() for log in logs]
    assert all(before)
    os.kill(driver_of(service), signal.SIGKILL)
    service.up.until("another joins", lambda: service.up.log.count("ray_joined") == 2, PATIENCE_S)
    os.kill(service.up.replica("a/0").pid, signal.SIGKILL)  # so that a line comes after them
    service.up.until("it has died", lambda: service.up.replica("a/0").restarts >= 1, PATIENCE_S)
    service.until_both_serve()
    after = [log.read_text() for log in logs]
    assert len(after[0]) > len(before[0])
    assert [text.count(old.splitlines()[0]) for text, old in zip(after, before, strict=True)] == [
        1,
        1,
    ]


def test_a_driver_that_hangs_is_replaced_and_then_a_worker(service: Service) -> None:
    joined = service.up.log.count("ray_joined")
    os.kill(driver_of(service), signal.SIGSTOP)
    before = service.up.replica("a/0")
    os.kill(before.pid, signal.SIGKILL)
    service.up.until(
        "another joins", lambda: service.up.log.count("ray_joined") > joined, PATIENCE_S
    )
    service.up.until(
        "the worker is replaced",
        lambda: service.up.replica("a/0").pid not in (0, before.pid),
        PATIENCE_S,
    )
    service.until_both_serve()
    assert say(service.up.url, "again") == "again"


def driver_of(service: Service) -> int:
    [driver] = [
        process.pid
        for process in procfs.find_descendants(service.up.pid)
        if "servekit.ray.process" in procfs.command_line(process.pid)
    ]
    return driver


def test_a_supervisor_that_is_killed_is_followed_by_one_that_adopts(
    service: Service, tmp_path: Path
) -> None:
    url, before = service.up.url, [worker.pid for worker in service.workers()]
    wish = AddAdapter("a", AdapterSpec("loud", folder(tmp_path, "loud")))
    asyncio.run(query_supervisor(service.up.run_dir / "control.sock", wish, PATIENCE_S))
    text = "one stream from before to after " * 8
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json={"model": "a", "prompt": text, "max_tokens": len(text), "stream": True},
        timeout=PATIENCE_S,
    ) as stream:
        lines = stream.iter_lines()
        said = piece(next(lines))
        service.up.process.kill()
        service.up.process.wait()
        assert say(url, "nobody is lost") == "nobody is lost"
        service.again()
        said += "".join(piece(line) for line in lines)
    assert said == text
    service.until_both_serve()
    assert service.up.url == url
    assert [worker.pid for worker in service.workers()] == before
    assert [worker.restarts for worker in service.workers()] == [0, 0]
    assert say(url, "adopted") == "adopted"
    assert say(url, "as before", "loud") == "AS BEFORE"
    kept = {one.name: (one.state, one.from_file) for one in service.up.model("a").adapters}
    assert kept == {"loud": ("serving", False)}
    assert "adapter_kept" in service.up.log
    assert "adapter_unloaded" not in service.up.log


def piece(line: str) -> str:
    """The text of one event of a stream."""
    data = line.removeprefix("data: ")
    if not line or data == "[DONE]":
        return ""
    text: str = json.loads(data)["choices"][0]["text"]
    return text


def test_what_runs_on_a_lost_node_goes_on_elsewhere_and_is_placed_again(
    service: Service, nodes: Nodes
) -> None:
    lost = nodes.nodes.pop()
    text = "more than a node " * 12
    answers: list[str] = []
    asking = [
        threading.Thread(target=lambda: answers.append(say(service.up.url, text))) for _ in "ab"
    ]
    for thread in asking:
        thread.start()
    service.up.until("both run one", lambda: all(w.running for w in service.workers()), PATIENCE_S)
    nodes.kill(lost)
    for thread in asking:
        thread.join(PATIENCE_S)
    assert answers == [text, text]
    service.up.until("it says what it waits for", lambda: waits(service), PATIENCE_S)
    nodes.add()
    service.until_both_serve()
    assert len({raylet_of(worker.pid) for worker in service.workers()}) == 2


def waits(service: Service) -> bool:
    said = [worker.progress.phase for worker in service.workers() if worker.progress]
    return said == ["waits for 2 CPUs in the Ray cluster"]


def test_nothing_is_left_of_an_instance_that_ends(service: Service, nodes: Nodes) -> None:
    pids = [worker.pid for worker in service.workers()]
    service.up.signal(signal.SIGTERM)
    assert service.up.wait(PATIENCE_S) == 0
    assert not nodes.left()
    assert not [pid for pid in pids if procfs.read_process(pid)]


# ---------------------------------------------------------------- a supervisor that stays away


def test_load_brings_a_worker_more_and_all_end_when_no_supervisor_comes(
    nodes: Nodes, tmp_path: Path
) -> None:
    sections = section(nodes, grace_s=1)
    scaled = {"replicas": {"min": 1, "max": 2}, "scale": {"wait_s": 0.1, "down_s": 600.0}}
    model = {**echo("a", slots=1, step_s=0.02), **scaled}
    instance = Instance(tmp_path, write_config(tmp_path, [model], None, sections))
    instance.until(
        "it serves",
        lambda: instance.running() and settled_and_ready(instance),
        PATIENCE_S,
    )
    texts = [f"one of many, number {number}" for number in range(24)]
    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(lambda text: say(instance.url, text), texts)) == texts
    instance.until("another serves", lambda: settled_and_ready(instance, 2), PATIENCE_S)
    pids = [one.pid for one in instance.model("a").replicas]
    assert len({raylet_of(pid) for pid in pids}) == 2
    instance.process.kill()
    instance.process.wait()
    poll("the gateway ends", lambda: not instance.survivors(), PATIENCE_S)
    poll("the workers end", lambda: not any(map(procfs.read_process, pids)), PATIENCE_S)
    poll("nothing is left in the cluster", lambda: not nodes.left(), PATIENCE_S)


def settled_and_ready(instance: Instance, count: int = 1) -> bool:
    workers = [one for model in instance.status().models for one in model.replicas]
    return len(workers) == count and all(worker.state == "ready" for worker in workers)


def test_a_worker_that_is_told_to_end_while_it_is_placed_leaves_nothing(
    nodes: Nodes, tmp_path: Path
) -> None:
    def reside(want: str) -> None:
        wish = SetResidency("a", want, wait=want == "unload")  # type: ignore[arg-type]
        asyncio.run(query_supervisor(up.run_dir / "control.sock", wish, PATIENCE_S))

    model = {**echo("a", replicas=8), "load": "on_demand"}
    with Instance.up(tmp_path, [model], sections=section(nodes, cpus=0.25)) as up:
        up.until("its gateway serves", lambda: up.gateway().state == "ready", PATIENCE_S)
        for after_s in (0.1, 0.2, 0.4, 0.8):
            reside("load")
            at = time.monotonic() + after_s
            up.until("it is being placed", lambda at=at: time.monotonic() >= at, PATIENCE_S)  # type: ignore[misc]
            reside("unload")
        assert not nodes.left()
        reside("load")
        up.until("it serves", lambda: settled_and_ready(up, 8), PATIENCE_S)
        up.signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 0
    assert not nodes.left()


def test_an_instance_outlives_its_certificates(nodes: Nodes, tmp_path: Path) -> None:
    sections = section(nodes, grace_s=1, certificate_life_s=15)
    with Instance.up(tmp_path, [echo("a", step_s=0.01)], sections=sections) as up:
        up.until("it serves", lambda: settled_and_ready(up), PATIENCE_S)
        old_age(up, 15.0)
        os.kill(up.replica("a/0").pid, signal.SIGKILL)  # the gateway dials another one
        up.until("it is back", lambda: restarted(up) and settled_and_ready(up), PATIENCE_S)
        assert say(up.url, "by a gateway of old") == "by a gateway of old"
        old_age(up, 15.0)
        os.kill(up.status().gateways[0].pid, signal.SIGKILL)  # another one dials the worker
        poll("another gateway serves", lambda: up.status().gateways[0].restarts, PATIENCE_S)
        assert say(up.url, "of a worker of old") == "of a worker of old"
        assert up.replica("a/0").restarts == 1
        up.signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 0
    assert not nodes.left()


def old_age(up: Instance, life_s: float) -> None:
    """Return when whatever certificate there was when this began has expired."""
    over_at = time.time() + life_s
    up.until("certificates are over", lambda: time.time() > over_at, PATIENCE_S)


def restarted(up: Instance) -> bool:
    return bool(up.replica("a/0").restarts)


def test_a_namespace_is_one_instance_s_as_long_as_that_lives(nodes: Nodes, tmp_path: Path) -> None:
    sections = section(nodes, namespace="shared", grace_s=1, cpus=1)
    homes = tmp_path / "first", tmp_path / "second"
    for home in homes:
        home.mkdir()
    with Instance.up(homes[0], [echo("a")], sections=sections) as first:
        first.until("it serves", lambda: settled_and_ready(first), PATIENCE_S)
        worker = first.replica("a/0").pid
        said, _ = refused(homes[1], sections)
        assert "its namespace 'shared' is held by another instance of servekit" in said
        assert f"on {socket.gethostname()}, pid {first.process.pid}, run directory" in said
        assert (first.replica("a/0").pid, first.replica("a/0").restarts) == (worker, 0)
        assert say(first.url, "not disturbed") == "not disturbed"
        first.process.kill()
        first.process.wait()
        os.kill(above(worker)[-1], signal.SIGKILL)  # its place is nobody's now
        with Instance.up(homes[1], [echo("a")], sections=sections) as second:
            second.until("the next serves", lambda: settled_and_ready(second), PATIENCE_S)
            assert say(second.url, "mine now") == "mine now"
            ray_said = (second.run_dir / "logs" / "~ray.log").read_text()
            assert "placement_released" in ray_said
            poll("it has the only place", lambda: len(nodes.left()) == 2, PATIENCE_S)
            second.signal(signal.SIGTERM)
            assert second.wait(PATIENCE_S) == 0
        poll("the gateway of the first ends", lambda: not first.survivors(), PATIENCE_S)
    assert not nodes.left()


# ---------------------------------------------------------------- other clusters


def test_a_cluster_that_grows_is_waited_for(tmp_path: Path) -> None:
    with running(grows=True) as growing:
        sections = section(growing, cpus=ray_growing.CPUS, autoscaled=True)
        with Instance.up(tmp_path, [echo("a")], sections=sections) as up:
            up.until("it says what it waits for", lambda: waits_for_a_node(up), PATIENCE_S)
            up.until("it serves", lambda: settled_and_ready(up), PATIENCE_S)
            assert say(up.url, "grown") == "grown"
            sections["ray"]["autoscaled"] = False
            (tmp_path / "other").mkdir()
            said, _ = refused(
                tmp_path / "other", {**sections, "ray": {**sections["ray"], "cpus": 4}}
            )
            assert "needs 4 CPUs on one node of the Ray cluster" in said and "has 3" in said
            up.signal(signal.SIGTERM)
            assert up.wait(PATIENCE_S) == 0
        assert not growing.left()


TOO_SMALL = "waits for a node with 3 CPUs: the Ray cluster has none that large now"


def waits_for_a_node(up: Instance) -> bool:
    """So say both `servekit ps` and `servekit why`."""
    workers = [one for model in up.status().models for one in model.replicas]
    if [worker.progress.phase for worker in workers if worker.progress] != [TOO_SMALL]:
        return False
    why = asyncio.run(query_supervisor(up.run_dir / "control.sock", GetWhy("a")))
    assert isinstance(why, Why)
    return [one.reason for one in why.replicas] == [TOO_SMALL]


def test_when_the_head_is_lost_workers_serve_for_the_grace_time_and_end(tmp_path: Path) -> None:
    with running() as beheaded:
        beheaded.add()
        sections = section(beheaded, cpus=1, grace_s=GRACE_S)
        with Instance.up(tmp_path, [echo("a", step_s=0.02)], sections=sections) as up:
            up.until("it serves", lambda: settled_and_ready(up), PATIENCE_S)
            url, at_work = up.url, above(up.replica("a/0").pid)
            up.process.kill()
            up.process.wait()
            beheaded.behead()
            assert say(url, "without a head") == "without a head"
            assert all(map(procfs.read_process, at_work))
            poll("all of it ends", lambda: not any(map(procfs.read_process, at_work)), GRACE_S + 40)
            assert not up.survivors()


def above(worker: int) -> list[int]:
    """The processes on its node that are there for a worker: itself, its warden, its actor."""
    found = [worker]
    while "raylet/raylet" not in procfs.command_line(found[-1], 2**20):
        above = procfs.read_process(found[-1])
        assert above is not None and above.parent > 0, "no node of Ray above it"
        found.append(above.parent)
    return found[:-1]


# ---------------------------------------------------------------- bad input


def refused(folder: Path, sections: dict[str, Any], *models: dict[str, Any]) -> tuple[str, float]:
    """What `servekit up` says as it ends by itself, and after how long."""
    began = time.monotonic()
    config = write_config(folder, models or [echo("a")], None, sections)
    instance = Instance(folder, config)
    assert instance.wait(PATIENCE_S) in (1, 2), instance.log
    instance.end()
    return instance.log, time.monotonic() - began


def test_a_cluster_that_is_not_there_is_told_before_anything_serves(
    nodes: Nodes, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        said, _ = refused(tmp_path, section(nodes, address=address))
    assert f"no Ray cluster answers at {address} (Connection refused)" in said
    assert "serving" not in said
    assert not (tmp_path / "run" / "authority").exists()


def test_what_can_never_fit_is_told_and_leaves_nothing(nodes: Nodes, tmp_path: Path) -> None:
    said, _ = refused(tmp_path, section(nodes, cpus=3))
    assert "needs 3 CPUs on one node of the Ray cluster" in said and "has 2" in said
    assert not nodes.left()


def older(folder: Path) -> dict[str, str]:
    """The environment of a node with servekit 0.0.1."""
    package = folder / "other" / "servekit"
    shutil.copytree(ROOT / "servekit", package, ignore=shutil.ignore_patterns("__pycache__"))
    own = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(own.replace(__version__, "0.0.1"))
    return {"PYTHONPATH": str(package.parent)}


@contextlib.contextmanager
def one_more(nodes: Nodes, **env: str) -> Iterator[None]:
    """Another node, which Ray knows to be gone when this is over."""
    before, node = nodes.count(), nodes.add(None, **env)
    try:
        yield
    finally:
        nodes.kill(node)
        poll("Ray sees it", lambda: nodes.count() == before, PATIENCE_S)


def test_a_node_with_another_servekit_is_named(nodes: Nodes, tmp_path: Path) -> None:
    with one_more(nodes, **older(tmp_path)):
        said, _ = refused(tmp_path, section(nodes))
    assert f"has servekit 0.0.1, and this one has {__version__}" in said
    assert not nodes.left()


def test_a_node_that_comes_later_is_asked_before_anything_is_placed_there(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Three workers, each of which takes a node, where there are two, and then a bad third one."""
    sections, old = section(nodes), older(tmp_path)
    with Instance.up(tmp_path, [echo("a", replicas=3)], sections=sections) as up:
        up.until("one waits", lambda: last_one(up) == NO_ROOM, PATIENCE_S)
        with one_more(nodes, **old):
            said = up.until("it is told why", lambda: why_not(up), PATIENCE_S)
            assert said.startswith(f"{NO_ROOM}; the Ray node ")
            assert f"has servekit 0.0.1, and this one has {__version__}: install the same" in said
            assert [one.restarts for one in up.model("a").replicas] == [0, 0, 0]
            assert say(up.url, "goes on") == "goes on"
            assert "node_unsuitable" in (up.run_dir / "logs" / "~ray.log").read_text()
            shutil.copy(ROOT / "servekit" / "__init__.py", f"{old['PYTHONPATH']}/servekit")
            up.until("it is set right", lambda: settled_and_ready(up, 3), PATIENCE_S)
            assert len({raylet_of(one.pid) for one in up.model("a").replicas}) == 3
            up.signal(signal.SIGTERM)
            assert up.wait(PATIENCE_S) == 0
    assert not nodes.left()


NO_ROOM = "waits for 2 CPUs in the Ray cluster"


def last_one(up: Instance) -> str:
    """What the only one waits for that does not serve yet; "" while there are others."""
    workers = [one for model in up.status().models for one in model.replicas]
    phases = [one.progress.phase if one.progress else "" for one in workers if one.state != "ready"]
    return phases[0] if len(phases) == 1 else ""


def why_not(up: Instance) -> str:
    """The same, once that is more than room."""
    return said if (said := last_one(up)) != NO_ROOM else ""


def test_a_model_that_a_reload_brings_is_checked_on_the_nodes_that_there_are_then(
    nodes: Nodes, tmp_path: Path
) -> None:
    def reload() -> str:
        try:
            asyncio.run(query_supervisor(up.run_dir / "control.sock", Reload(), PATIENCE_S))
        except ConfigError as error:
            return error.message
        return ""

    sections = section(nodes, cpus=1)
    with Instance.up(tmp_path, [echo("a")], sections=sections) as up:
        up.until("it serves", lambda: settled_and_ready(up), PATIENCE_S)
        worker = up.replica("a/0").pid
        with one_more(nodes, **older(tmp_path)):
            write_config(tmp_path, [echo("a"), echo("b")], None, sections)
            assert f"has servekit 0.0.1, and this one has {__version__}" in reload()
            assert [model.name for model in up.status().models] == ["a"]
            write_config(tmp_path, [{**echo("a"), "max_queue": 7}], None, sections)
            assert reload() == "", "what no worker sees is no matter of the nodes'"
        write_config(tmp_path, [echo("a"), echo("b")], None, sections)
        assert reload() == ""
        up.until("both serve", lambda: settled_and_ready(up, 2), PATIENCE_S)
        assert up.replica("a/0").pid == worker
        up.signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 0
    assert not nodes.left()
