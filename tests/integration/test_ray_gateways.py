"""`ray.gateways: every_node` on a real cluster, whose nodes have addresses of their own.

They are all on this machine, at 127.0.0.2 and so on, and the head is at the machine's address.
Those tests come first that want the nodes to themselves: whichever are chosen, nobody else is there
yet. The others are one story: each goes on with what the one before has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.errors import ServekitError
from servekit.protocol.messages import GatewayStatus, GetWhy, Why
from servekit.supervisor.admin.control_socket import query_supervisor
from servekit.system import procfs
from servekit.system.orphan_cleanup import read_children
from tests.api_keys import new_key
from tests.integration.certificates import make
from tests.integration.instance import Instance, echo, write_config
from tests.integration.ray_cluster import raylet_of, running
from tests.integration.ray_nodes import PATIENCE_S, Nodes
from tests.polling import poll

pytestmark = [
    pytest.mark.lane("ray"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
FIRST, SECOND, LATE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
KEY, HASH = new_key("alice")
MODELS = echo("a", replicas=2, step_s=0.02), echo("b")
TLS = {"certificate": "server.pem", "key": "server.key"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with running() as made:
        for address in (FIRST, SECOND):
            made.add({"node_ip_address": address})
        yield made


class Service:
    """An instance, and those that come after it in the same place."""

    def __init__(
        self,
        folder: Path,
        nodes: Nodes,
        grace_s: float = 60,
        models: Sequence[dict[str, Any]] = MODELS,
        **more: Any,
    ) -> None:
        self.head = nodes.address.rpartition(":")[0]
        self._folder = folder
        self.certify()
        ray = {"address": nodes.address, "strategy": "SPREAD", "connect_s": PATIENCE_S}
        sections = {
            "launcher": "ray",
            "ray": {**ray, "gateways": "every_node", "grace_s": grace_s, **more},
            "keys": [{"name": "alice", "hash": HASH, "admin": True}],
        }
        self._config = write_config(folder, models, {"host": self.head, "tls": TLS}, sections)
        self.up = Instance(folder, self._config)
        self.port = 0

    def certify(self) -> None:
        """With a new certificate, which the machine's clients trust."""
        made = make(self._folder, "new", addresses=(self.head, FIRST, SECOND, LATE))
        for path in made:
            path.replace(path.with_name(path.name.replace("new", "server")))
        self.trust = ssl.create_default_context(cafile=str(self._folder / "server.pem"))

    def again(self) -> None:
        self.up = Instance(self._folder, self._config)

    def gateways(self) -> dict[str, GatewayStatus]:
        """By their nodes, "" is the supervisor's; of an instance that may be on its way up."""
        with contextlib.suppress(ServekitError):
            return {gateway.node: gateway for gateway in self.up.status().gateways}
        return {}

    def pids(self) -> list[int]:
        status = self.up.status()
        return [one.pid for model in status.models for one in model.replicas] + [
            one.pid for one in status.gateways if one.node
        ]

    def until_it_serves(self, *where: str) -> None:
        def all_are_ready() -> bool:
            found = self.gateways()
            with contextlib.suppress(ServekitError):
                models = self.up.status().models
                workers = [one for model in models for one in model.replicas]
                return (
                    {node: one.state for node, one in found.items()}
                    == dict.fromkeys(("", *where), "ready")
                    and len(workers) == 3
                    and all(worker.state == "ready" for worker in workers)
                )
            return False

        self.up.until(f"gateways serve at {where}", all_are_ready, PATIENCE_S)
        self.port = self.port or int(httpx.URL(self.up.url).port or 0)

    def is_loading(self, worker: str) -> bool:
        """And all gateways serve."""
        states = {node: one.state for node, one in self.gateways().items()}
        if states != dict.fromkeys(("", FIRST, SECOND), "ready"):
            return False
        self.port = int(httpx.URL(self.up.url).port or 0)
        return self.up.replica(worker).state == "loading"

    def ask(self, method: str, where: str, path: str, **what: Any) -> httpx.Response:
        url = f"https://{where or self.head}:{self.port}{path}"
        headers = {"authorization": f"Bearer {KEY}", **what.pop("headers", {})}
        return httpx.request(
            method, url, headers=headers, verify=self.trust, timeout=PATIENCE_S, **what
        )

    def reload(self) -> None:
        answer = self.ask("POST", SECOND, "/admin/reload")
        assert answer.status_code == 200, answer.text

    def is_trusted(self, where: str) -> bool:
        """By those who trust the newest certificate alone."""
        with contextlib.suppress(httpx.ConnectError):
            return self.ask("GET", where, "/livez").status_code == 200
        return False

    def why(self, where: str) -> str:
        """What is amiss with the gateway of a node; "" if nothing."""
        with contextlib.suppress(ServekitError):
            found = asyncio.run(
                query_supervisor(self.up.run_dir / "control.sock", GetWhy(f"gateway/{where}"))
            )
            return found.replicas[0].reason if isinstance(found, Why) else ""
        return ""

    def is_another(self, dead: int) -> bool:
        """In place of that worker of the model `b`, and it serves."""
        with contextlib.suppress(ServekitError):
            [worker] = self.up.model("b").replicas
            return worker.state == "ready" and worker.pid != dead
        return False

    def say(self, where: str, text: str, model: str = "a") -> str:
        body = {"model": model, "prompt": text, "max_tokens": len(text)}
        answer = self.ask("POST", where, "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        said: str = answer.json()["choices"][0]["text"]
        return said


# ---------------------------------------------------------------- a supervisor that stays away


def test_all_of_them_end_when_no_supervisor_comes(nodes: Nodes, tmp_path: Path) -> None:
    other = Service(tmp_path, nodes, grace_s=1)
    try:
        other.until_it_serves(FIRST, SECOND)
        pids = other.pids()
        other.up.process.kill()
        other.up.process.wait()
        poll("the gateways end", lambda: not any(map(procfs.read_process, pids)), PATIENCE_S)
        poll("nothing is left in the cluster", lambda: not nodes.left(), PATIENCE_S)
        poll("ours have ended, too", lambda: not other.up.survivors(), PATIENCE_S)
    finally:
        other.up.end()


def test_they_outlive_their_certificates(nodes: Nodes, tmp_path: Path) -> None:
    life_s = 15.0
    other = Service(tmp_path, nodes, grace_s=0, certificate_life_s=life_s)
    try:
        other.until_it_serves(FIRST, SECOND)
        before = other.pids()
        for _ in range(2):  # the second time those are over that were renewed
            over_at = time.time() + life_s
            poll("certificates are over", lambda at=over_at: time.time() > at, PATIENCE_S)  # type: ignore[misc]
            [dead] = [one.pid for one in other.up.model("b").replicas]
            os.kill(dead, signal.SIGKILL)  # they dial another one
            other.up.until("it is back", partial(other.is_another, dead), PATIENCE_S)
            assert [other.say(where, "of old", "b") for where in ("", FIRST)] == ["of old"] * 2
        assert len(set(before) & set(other.pids())) == len(before) - 1
        other.up.signal(signal.SIGTERM)
        assert other.up.wait(PATIENCE_S) == 0
    finally:
        other.up.end()
    assert not nodes.left()


def test_what_waits_at_another_node_is_answered_before_the_end(
    nodes: Nodes, tmp_path: Path
) -> None:
    asked = echo("asked", load_s=8) | {"load": "on_demand"}
    other = Service(tmp_path, nodes, models=[echo("loads", load_s=600), asked])
    try:
        other.up.until("all serve but one", partial(other.is_loading, "loads/0"), PATIENCE_S)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(other.say, FIRST, "at last", "asked")
            other.up.until("it is loaded", lambda: other.up.model("asked").replicas, PATIENCE_S)
            other.up.signal(signal.SIGTERM)
            ended = lambda: other.up.replica("loads/0").state == "stopped"  # noqa: E731
            other.up.until("what nobody waits for is ended", ended, PATIENCE_S)
            assert not waits.done(), "it is not waited for any more"
            assert waits.result(PATIENCE_S) == "at last"
        assert other.up.wait(PATIENCE_S) == 0
    finally:
        other.up.end()
    assert "worker_load_cancelled" in other.up.log
    assert not nodes.left()


# ---------------------------------------------------------------- bad input


def test_an_address_that_nobody_elsewhere_reaches_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    ray = {"address": nodes.address, "gateways": "every_node", "connect_s": PATIENCE_S}
    sections = {"launcher": "ray", "ray": ray}
    instance = Instance(tmp_path, write_config(tmp_path, [echo("a")], None, sections))
    assert instance.wait(PATIENCE_S) == 1, instance.log
    instance.end()
    assert "they do not reach 127.0.0.1: as `server.host` say 0.0.0.0" in instance.log
    assert "gateway_ready" not in instance.log
    assert not nodes.left()


# ---------------------------------------------------------------- the story of one instance


@pytest.fixture(scope="module")
def service(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("ray"), nodes)
    try:
        made.until_it_serves(FIRST, SECOND)
        yield made
    finally:
        made.up.signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            made.up.wait(PATIENCE_S)
        made.up.end()


def test_a_client_may_ask_any_node_for_all_there_is(service: Service) -> None:
    for where in ("", FIRST, SECOND):
        assert service.say(where, "hello") == "hello"
        assert service.say(where, "and hello", "b") == "and hello"
        listed = service.ask("GET", where, "/v1/models").json()["data"]
        assert {model["id"] for model in listed} == {"a", "b"}
        stranger = service.ask("GET", where, "/v1/models", headers={"authorization": "Bearer no"})
        assert stranger.status_code == 401
    found = service.gateways()
    assert {node: gateway.name for node, gateway in found.items()} == {
        "": "gateway/0",
        FIRST: f"gateway/{FIRST}",
        SECOND: f"gateway/{SECOND}",
    }
    assert raylet_of(found[FIRST].pid) != raylet_of(found[SECOND].pid)


def test_figures_are_of_the_whole_whichever_node_is_asked(service: Service) -> None:
    service.up.until(
        "each has told what it has answered",
        lambda: all(gateway.requests >= 2 for gateway in service.gateways().values()),
        PATIENCE_S,
    )
    service.up.until("what each takes is told", lambda: sizes_are_true(service), PATIENCE_S)
    pages = [service.ask("GET", where, "/metrics").text for where in ("", FIRST, SECOND)]
    for page in pages:
        for name in ("gateway/0", f"gateway/{FIRST}", f"gateway/{SECOND}"):
            assert f'servekit_gateway_up{{gateway="{name}"}} 1.0' in page
    status = service.ask("GET", SECOND, "/admin/status").json()
    assert sorted(gateway["node"] for gateway in status["gateways"]) == ["", FIRST, SECOND]
    why = service.ask("GET", FIRST, f"/admin/why/gateway/{SECOND}").json()
    assert why["replicas"][0]["state"] == "ready"


def sizes_are_true(service: Service) -> bool:
    """What is known of their memory is what they take; it falls after a start."""
    told = {gateway.pid: gateway.rss_bytes for gateway in service.gateways().values()}
    return told == pytest.approx({pid: procfs.rss_bytes(pid) for pid in told}, rel=0.1)


def test_a_gateway_that_is_killed_comes_back_and_nobody_is_refused(service: Service) -> None:
    before = service.gateways()[FIRST]
    place = raylet_of(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    assert service.say(FIRST, "at once") == "at once"  # its actor holds the socket
    service.until_it_serves(FIRST, SECOND)
    after = service.gateways()[FIRST]
    assert (after.restarts, after.pid != before.pid) == (before.restarts + 1, True)
    assert raylet_of(after.pid) == place


def test_a_new_certificate_reaches_all_nodes(service: Service) -> None:
    old = service.trust
    service.certify()
    service.trust, new = old, service.trust  # none has it yet
    service.reload()
    service.trust = new
    for where in ("", FIRST, SECOND):
        poll(f"{where} has the new one", partial(service.is_trusted, where), PATIENCE_S)


def test_a_supervisor_that_is_killed_is_followed_by_one_that_adopts(service: Service) -> None:
    before = {node: one.pid for node, one in service.gateways().items() if node}
    text = "one stream from before to after " * 8
    body = {"model": "a", "prompt": text, "max_tokens": len(text), "stream": True}
    with httpx.stream(
        "POST",
        f"https://{FIRST}:{service.port}/v1/completions",
        headers={"authorization": f"Bearer {KEY}"},
        json=body,
        verify=service.trust,
        timeout=PATIENCE_S,
    ) as stream:
        lines = stream.iter_lines()
        said = piece(next(lines))
        service.up.process.kill()
        service.up.process.wait()
        assert service.say(FIRST, "nobody is lost") == "nobody is lost"
        assert service.ask("GET", SECOND, "/metrics").status_code == 503
        service.again()
        over = threading.Event()
        refused: list[str] = []
        asking = threading.Thread(target=ask_on, args=(service, over, refused))
        asking.start()
        said += "".join(piece(line) for line in lines)
    assert said == text
    service.until_it_serves(FIRST, SECOND)
    over.set()
    asking.join(PATIENCE_S)
    assert not refused
    assert {node: one.pid for node, one in service.gateways().items() if node} == before
    assert all(not one.restarts for one in service.gateways().values())
    assert service.ask("GET", SECOND, "/metrics").status_code == 200


def ask_on(service: Service, over: threading.Event, refused: list[str]) -> None:
    """Until it is over; what is not answered as it should be is noted."""
    while not over.is_set():
        try:
            if (said := service.say(SECOND, "on", "b")) != "on":
                refused.append(said)
        except (httpx.HTTPError, AssertionError) as error:
            refused.append(repr(error))


def piece(line: str) -> str:
    """The text of one event of a stream."""
    data = line.removeprefix("data: ")
    if not line or data == "[DONE]":
        return ""
    text: str = json.loads(data)["choices"][0]["text"]
    return text


def test_the_process_that_speaks_to_ray_may_die(service: Service) -> None:
    before = service.pids()
    [ray] = [one for one in read_children(service.up.run_dir) if one.name == "ray"]
    os.kill(ray.pid, signal.SIGKILL)
    service.up.until("there is another", lambda: has_another(service), PATIENCE_S)
    service.until_it_serves(FIRST, SECOND)
    assert service.pids() == before  # and what comes next shows that it looks at nodes, too


def has_another(service: Service) -> bool:
    with contextlib.suppress(ServekitError):
        why = asyncio.run(query_supervisor(service.up.run_dir / "control.sock", GetWhy("ray")))
        assert isinstance(why, Why)
        [story] = why.replicas
        return story.state == "ready" and story.restarts == 1
    return False


def test_a_node_that_joins_gets_one_as_soon_as_its_port_is_free(
    service: Service, nodes: Nodes
) -> None:
    with socket.create_server((LATE, service.port)):
        nodes.add({"node_ip_address": LATE})
        told = service.up.until("it is told", lambda: service.why(LATE), PATIENCE_S)
        assert f"on the node {LATE}: {LATE}:{service.port} is already in use by pid" in told
        for where in ("", FIRST, SECOND):
            assert service.say(where, "goes on") == "goes on"
    service.until_it_serves(FIRST, SECOND, LATE)
    assert service.say(LATE, "new here") == "new here"


def test_a_node_that_is_lost_loses_its_own_and_no_more(service: Service, nodes: Nodes) -> None:
    before = {node: one.pid for node, one in service.gateways().items()}
    nodes.kill(nodes.nodes.pop())
    service.until_it_serves(FIRST, SECOND)
    after = {node: one.pid for node, one in service.gateways().items()}
    assert after == {node: pid for node, pid in before.items() if node != LATE}
    with pytest.raises(httpx.ConnectError):
        service.say(LATE, "nobody")


def test_nothing_is_left_of_an_instance_that_ends(service: Service, nodes: Nodes) -> None:
    pids = service.pids()
    assert len(pids) == 5
    service.up.signal(signal.SIGTERM)
    assert service.up.wait(PATIENCE_S) == 0
    assert not nodes.left()
    assert not [pid for pid in pids if procfs.read_process(pid)]
