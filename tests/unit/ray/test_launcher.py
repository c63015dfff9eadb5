"""The launcher of workers in a Ray cluster: what it asks of the cluster, and what it refuses.

There is no Ray here: the test answers for the process that talks to it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from servekit.errors import StartError
from servekit.protocol.control.ray_messages import (
    ClusterJoined,
    InspectNodes,
    KeepPlaces,
    Node,
    NodesInspected,
    PlaceWorker,
    RequestFailed,
    WorkerPlaced,
)
from servekit.protocol.transport.certificate_authority import Authority
from servekit.ray import bootstrap
from servekit.ray.launcher import RayLauncher
from servekit.ray.node_inventory import own_versions
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.plan import Plan, Source
from servekit.supervisor.lifecycle.managed_process import ManagedProcess
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_process import WorkerProcess
from tests.polling import poll_async
from tests.unit.ray.process.test_actor import free_port
from tests.unit.ray.test_client import Child
from tests.unit.supervisor.test_gateway_process import Alone

OWN = own_versions()
HERE = Node("id-1", "10.0.0.1", 4, 0, OWN.python, OWN.ray, OWN.servekit)
THERE = Node("id-2", "10.0.0.2", 8, 2, OWN.python, OWN.ray, OWN.servekit)
FILE = """
launcher: ray
server: {host: %s}
ray: {address: "%s", connect_s: 1, cpus: 2, grace_s: 30, gateways: %s, namespace: mine}
keys: [{name: ann, environment: ANNS_KEY}]
models:
  - {name: a, engine: echo, device: cuda, replicas: 2}
  - {name: b, engine: echo, load: on_demand, env: {OWN: "1"}}
  - {name: c, engine: echo}
"""


class Stage:
    """A launcher, and the cluster that it talks to."""

    def __init__(
        self, folder: Path, head: str, *, host: str = "127.0.0.1", gateways: str = "here"
    ) -> None:
        path = folder / "servekit.yaml"
        path.write_text(FILE % (host, head, gateways))
        self.plan: Plan = Source(path, environ={**os.environ, "ANNS_KEY": "sk-" + "a" * 32}).plan(
            ()
        )
        self.host = Alone(folder / "run")
        self.child = Child()
        self.lives: list[ManagedProcess[Any]] = []
        self.make()

    def make(self) -> None:
        """Make the launcher, as the supervisor does at each of its starts."""
        self.launcher = RayLauncher(self.plan, cast(Any, self.host), self.run)

    def run(self, life: ManagedProcess[Any]) -> None:
        child: Any = self.child
        self.lives.append(life)
        life.child = child
        life.change_state("start")
        life.send_greeting()

    def sent(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.child.sent if isinstance(one, kind)]

    async def join(self, *nodes: Node) -> None:
        joining = asyncio.create_task(self.launcher.join_cluster(self.plan))
        await poll_async("it dials", lambda: self.lives or joining.done())
        self.launcher.cluster.receive(ClusterJoined(1, nodes, 1, HERE.node))
        await joining

    def worker(self, name: str) -> WorkerProcess:
        [model] = [one for one in self.plan.config.models if one.name == name]
        host: Any = self.host
        host.launcher = self.launcher
        place = Assignment(name, 0, (), 2, elsewhere=self.launcher.gpus_for(model))
        adapters = Adapters(name, (), cast(Deployment, host))
        return WorkerProcess(model, place, (), host, None, adapters)


@pytest.fixture
async def head() -> AsyncIterator[str]:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


Make = Callable[..., Stage]


@pytest.fixture
async def make(tmp_path: Path, head: str) -> AsyncIterator[Make]:
    made: list[Stage] = []

    def make_one(**how: str) -> Stage:
        made.append(Stage(tmp_path, head, **how))
        return made[-1]

    yield make_one
    for stage in made:
        stage.host.run_dir.unlock()


# ---------------------------------------------------------------- the cluster


async def test_a_cluster_that_can_serve_the_file_is_joined(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    assert stage.lives == [stage.launcher.cluster]
    assert stage.launcher.grace_s == 30
    [kept] = stage.sent(KeepPlaces)
    assert kept.names == ("a/0", "a/1", "c/0"), "what is loaded at the start"
    authority = bootstrap.load_authority(stage.host.run_dir.path)
    assert authority.certificate == stage.launcher.cluster_authority, "the next one finds it"
    gpus = [stage.launcher.gpus_for(model) for model in stage.plan.config.models]
    assert gpus == [1, 0, 0]


async def test_a_head_that_is_not_there_is_told_before_anything_starts(make: Make) -> None:
    stage = make()
    settings = stage.launcher._settings.model_copy(update={"address": f"127.0.0.1:{free_port()}"})
    stage.launcher._settings = settings
    with pytest.raises(StartError, match="no Ray cluster answers at"):
        await stage.launcher.join_cluster(stage.plan)
    assert stage.lives == []


async def test_a_cluster_that_does_not_take_us_is_told(make: Make, head: str) -> None:
    stage = make()
    joining = asyncio.create_task(stage.launcher.join_cluster(stage.plan))
    await poll_async("it dials", lambda: stage.lives)
    stage.launcher.cluster.receive(RequestFailed(1, "another instance has this namespace"))
    with pytest.raises(StartError) as caught:
        await joining
    assert str(caught.value) == (
        f"cannot join the Ray cluster at {head}: another instance has this namespace"
    )


async def test_a_cluster_that_never_answers_is_given_up(make: Make, head: str) -> None:
    stage = make()
    stage.launcher._settings = stage.launcher._settings.model_copy(update={"connect_s": 0.01})
    with pytest.raises(StartError) as caught:
        await stage.launcher.join_cluster(stage.plan)
    assert str(caught.value) == (
        f"the Ray cluster at {head} did not accept this machine within 0.01 s; look at it with `ray"
        " status`"
    )


async def test_nodes_that_cannot_serve_the_file_refuse_the_start(make: Make) -> None:
    stage = make()
    with pytest.raises(StartError, match="model 'a' needs 1 GPU on one node"):
        await stage.join(HERE)
    assert stage.sent(KeepPlaces) == [], "what runs there is left alone"
    assert not (stage.host.run_dir.path / "authority").exists()


# ---------------------------------------------------------------- gateways on other nodes


async def test_gateways_on_other_nodes_need_an_address_that_clients_reach(make: Make) -> None:
    with pytest.raises(StartError) as caught:
        await make(gateways="every_node").join(HERE, THERE)
    assert str(caught.value) == (
        "`ray.gateways: every_node` is for clients elsewhere, and they do not reach 127.0.0.1: as"
        " `server.host` say 0.0.0.0, or the address of this machine"
    )


async def test_a_cluster_on_this_machine_alone_may_have_gateways_on_loopback(make: Make) -> None:
    local = [replace(one, host=f"127.0.0.{n}") for n, one in enumerate((HERE, THERE), 1)]
    stage = make(gateways="every_node")
    await stage.join(*local)
    [kept] = stage.sent(KeepPlaces)
    assert kept.names == ("a/0", "a/1", "c/0", "gateway/127.0.0.2")


async def test_gateways_that_clients_reach_are_kept_on_the_other_nodes(make: Make) -> None:
    stage = make(gateways="every_node", host="0.0.0.0")
    await stage.join(HERE, THERE)
    [kept] = stage.sent(KeepPlaces)
    assert kept.names[-1] == "gateway/10.0.0.2"


async def test_a_gateways_certificate_is_renewed_by_its_own_node(make: Make) -> None:
    launcher = make().launcher
    credentials = launcher.gateway_credentials("gateway/0")
    assert (credentials.role, credentials.member) == ("gateway", "gateway/0")
    assert launcher.renewed("gateway/0") is None, "it is fresh"
    assert launcher.renewed("gateway/1") is not None, "it has none"
    place: Any = launcher.actors._places
    place["gateway/2"] = type("Place", (), {"host": "10.0.0.2"})()
    assert launcher.renewed("gateway/2") is None, "it is on another node"


# ---------------------------------------------------------------- reloads


async def test_the_models_of_a_reload_are_asked_for(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    asking = asyncio.create_task(stage.launcher.refusal(stage.plan.config.models))
    await poll_async("it is asked", lambda: stage.sent(InspectNodes))
    [asked] = stage.sent(InspectNodes)
    assert [want.model for want in asked.wants] == ["a", "b", "c"]
    stage.launcher.cluster.receive(NodesInspected(asked.id, (HERE,)))
    assert "model 'a' needs 1 GPU" in await asking
    assert await stage.launcher.fault(THERE) == ""


# ---------------------------------------------------------------- workers


async def test_a_worker_asks_for_a_place_with_what_it_claims(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    worker = stage.worker("a")
    entering = asyncio.create_task(stage.launcher.enter(worker))
    await poll_async("it is asked", lambda: stage.sent(PlaceWorker))
    [asked] = stage.sent(PlaceWorker)
    assert (asked.name, asked.model, asked.gpus, asked.cpus) == ("a/0", "a", 1, 2)
    assert (asked.strategy, asked.node) == ("PACK", "")
    assert asked.want == bootstrap.model_want(worker.model)
    stage.launcher.cluster.receive(WorkerPlaced(asked.id, THERE.host, ()))
    assert await entering == ""
    assert stage.launcher.describe_place("a/0") == "cpu on 10.0.0.2"


async def test_a_worker_that_is_started_otherwise_has_another_fingerprint(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    prints = [stage.launcher._fingerprint(stage.worker(name)) for name in "abc"]
    assert len({*prints}) == 3
    assert stage.launcher._fingerprint(stage.worker("a")) == prints[0]
    other_env = stage.worker("b")
    other_env.model = other_env.model.model_copy(update={"env": {"OWN": "2"}})
    other_options = stage.worker("b")
    other_options.model = other_options.model.model_copy(update={"options": {"slots": 3}})
    again = [stage.launcher._fingerprint(one) for one in (other_env, other_options)]
    assert len({prints[1], *again}) == 3


async def test_a_worker_is_taken_over_only_with_the_authority_that_it_knows(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    before = stage.launcher._fingerprint(stage.worker("a"))
    stage.make()  # the next supervisor, after this one was killed
    assert stage.launcher._fingerprint(stage.worker("a")) == before
    bootstrap.store_authority(stage.host.run_dir.path, Authority.new("servekit"))
    stage.make()
    assert stage.launcher._fingerprint(stage.worker("a")) != before


async def test_a_worker_gets_its_own_variables_and_none_of_this_machine(make: Make) -> None:
    stage = make()
    stage.host.environ = {**stage.host.environ, "OMP_NUM_THREADS": "3", "SECRET": "x"}
    env = stage.launcher._environment(stage.worker("b"))
    assert env["OWN"] == "1" and env["OMP_NUM_THREADS"] == "3"
    assert not {"PATH", "SECRET", "CUDA_VISIBLE_DEVICES"} & env.keys()


# ---------------------------------------------------------------- its end


async def test_it_leaves_nothing_for_the_next_when_all_workers_have_ended(make: Make) -> None:
    stage = make()
    await stage.join(HERE, THERE)
    assert (stage.host.run_dir.path / "authority").exists()
    assert await stage.launcher.close({}) == set()
    assert not (stage.host.run_dir.path / "authority").exists()
    assert stage.launcher.cluster.ending
