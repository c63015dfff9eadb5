"""Launcher for `launcher: ray`: workers in Ray actors, reached over TCP with mutual TLS.

Ray chooses nodes, and starts and ends processes; requests do not pass through it. A worker and its
place are separate: the worker is restarted in the same place while its node lives, and placed again
when the node is lost. Actors outlive the supervisor for `ray.grace_s`, and the next supervisor
finds them by name: workers that match the configuration are taken over, the others end.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from servekit import __version__
from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.errors import StartError
from servekit.protocol.control.ray_messages import Node, PlaceWorker
from servekit.protocol.messages import Stop
from servekit.protocol.transport.credentials import Credentials
from servekit.ray import bootstrap, node_requirements
from servekit.ray.actors import VACATE_S, RayActors, StartOrder
from servekit.ray.certificates import Certificates
from servekit.ray.client import Cluster, Unable
from servekit.ray.node_inventory import NodeInventory
from servekit.ray.takeover import Takeover
from servekit.supervisor import access_rules
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.lifecycle.managed_process import (
    ManagedProcess,
    wait_for_tasks,
)
from servekit.supervisor.lifecycle.remote_process import RemoteChild
from servekit.supervisor.process import environment
from servekit.supervisor.scheduling.memory_requests import least
from servekit.supervisor.workers.worker_spec import make_worker_spec

if TYPE_CHECKING:
    from servekit.supervisor.supervisor import Supervisor
    from servekit.supervisor.workers.worker_process import WorkerProcess


class RayLauncher:
    """Launcher of workers in a Ray cluster. Create it on the event loop; first `join_cluster`."""

    def __init__(
        self,
        plan: Plan,
        host: Supervisor,
        run: Callable[[ManagedProcess[Any]], None],
        takeover: Takeover | None = None,
    ) -> None:
        self._takeover = takeover
        self._settling: asyncio.Task[None] | None = None
        self._settings = plan.config.ray or RayConfig()
        self._host = host
        self.grace_s = self._settings.grace_s
        self._run = run
        self._survey = NodeInventory(self._settings)
        authority = bootstrap.load_authority(host.run_dir.path)
        self.cluster_authority = authority.certificate  # PEM
        self._certificates = Certificates(authority, self._settings.certificate_life_s)
        self.gateways_everywhere = self._settings.gateways == "every_node"
        self.actors = RayActors(self._certificates)
        self.cluster = self.actors.cluster = Cluster(
            host,
            self._settings,
            bootstrap.ray_namespace(self._settings, host.run_dir.path),
            bootstrap.model_wants(plan.config.models),
            self.actors,
            watch=self.gateways_everywhere,
        )

    # ---- the cluster

    async def join_cluster(self, plan: Plan) -> None:
        """Join the cluster and check its nodes. Raises StartError if it cannot serve the plan."""
        address, within_s = self._settings.address, self._settings.connect_s
        await bootstrap.reach_head(address)
        self._run(self.cluster)
        try:
            async with asyncio.timeout(within_s):
                self._survey.nodes = await asyncio.shield(self.cluster.joined)
        except TimeoutError:
            raise StartError(
                f"the Ray cluster at {address} did not accept this machine within {within_s:g} s;"
                " look at it"
                " with `ray status`"
            ) from None
        except Unable as error:
            raise StartError(f"cannot join the Ray cluster at {address}: {error.message}") from None
        refusal = self._survey.refusal(plan.config.models)
        if refusal := refusal or self._unreachable(plan.config.server.host):
            raise StartError(refusal)
        bootstrap.store_authority(self._host.run_dir.path, self._certificates.authority)
        self.end_unneeded(plan.config.models)
        if self._takeover is not None:
            drain_s = plan.config.server.drain_timeout_s
            settling = self._takeover.drain_previous(self._host.status, drain_s)
            self._settling = asyncio.get_running_loop().create_task(settling)

    async def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Return why these models of a reload cannot be served there; "" if they can."""
        return await self._survey.query_nodes(self.cluster, models)

    async def fault(self, node: Node) -> str:
        """Return why no process of ours can run on a node, regardless of room; "" if one can."""
        return await self._survey.fault(self.cluster, node)

    def _unreachable(self, host: str) -> str:
        """Return why gateways on other nodes would be unreachable; "" if they are not, or none."""
        there = self.cluster.nodes
        own = next((node.host for node in there if node.node == self.cluster.own), "")
        if (
            not self.gateways_everywhere
            or not access_rules.is_loopback(host)
            or access_rules.is_loopback(own)
        ):
            return ""
        return (
            f"`ray.gateways: every_node` is for clients elsewhere, and they do not reach {host}: as"
            " `server.host` say 0.0.0.0, or the address of this machine"
        )

    def end_unneeded(self, models: Sequence[ModelConfig]) -> None:
        """End the found processes that the configuration does not need."""
        names = [f"{m.name}/{i}" for m in models if m.load == "on_start" for i in range(least(m))]
        if self.gateways_everywhere:
            sites = node_requirements.sites_of(self.cluster.nodes, self.cluster.own, {})
            names += [f"gateway/{host}" for host in sites]
        self.cluster.keep_places(tuple(names))

    async def close(self, tasks: Mapping[ManagedProcess[Any], asyncio.Task[None]]) -> set[str]:
        """Leave the cluster after all workers have ended; return the processes that remain."""
        if self._takeover is not None and self._settling is not None:
            self._settling.cancel()
            self._takeover.kill_previous()
        self.cluster.end_child(Stop(), VACATE_S)
        bootstrap.forget_authority(self._host.run_dir.path)
        return await wait_for_tasks(
            {tasks[self.cluster]} if self.cluster in tasks else set(), VACATE_S
        )

    def gateway_credentials(self, name: str) -> Credentials:
        """Return the credentials with which a gateway of our own node reaches workers."""
        return self._certificates.issue("gateway", name)

    def renewed(self, gateway: str) -> Credentials | None:
        """Return a gateway's renewed credentials if they are due, else None.

        They count as delivered once returned. None also for a gateway on another node, whose node
        renews them.
        """
        if self.actors.host(gateway):
            return None
        return self._certificates.due("gateway", gateway)

    # ---- for workers

    def gpus_for(self, model: ModelConfig) -> int:
        """Return the number of GPUs that each worker of `model` gets; 0 if it runs on the CPU."""
        return self._survey.gpus_for(model)

    async def enter(self, worker: WorkerProcess) -> str:
        """Wait for the worker's place; return why it gets none, or ""."""
        mark = self._fingerprint(worker)
        claim = (worker.place.elsewhere, self._settings.cpus, self._settings.strategy)
        want = bootstrap.model_want(worker.model)
        return await self.actors.enter(
            worker.name,
            lambda what: worker.show_wait(what),
            lambda id: PlaceWorker(id, worker.name, worker.model.name, *claim, mark, want=want),
            lambda told: worker.measure_gpus(told),
        )

    async def start_worker(
        self,
        worker: WorkerProcess,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        """Start the worker, or adopt one that already serves. Raises OSError."""
        host = self.actors.host(worker.name)
        order = StartOrder(
            args=(
                *("--name", worker.name),
                *("--listen", f"tcp://{bootstrap.any_address(host)}:0", "--advertise", host),
                *("--grace-s", f"{self._settings.grace_s:g}"),
            ),
            env=self._environment(worker),
            fingerprint=self._fingerprint(worker),
            log_path=self._host.run_dir.log_path(worker.name),
            pin=KINDS[worker.model.engine].pin,
        )
        return await self.actors.start_process(worker.name, order, incoming, on_message, on_line)

    async def strays(self, name: str) -> str:
        """Return a sentence on GPU memory it holds on other GPUs; "" if none, or if unknown."""
        return await self.actors.strays(name)

    async def release_place(self, name: str) -> None:
        """Release the place of a worker whose life is over."""
        await self.actors.release_place(name)

    def describe_place(self, name: str) -> str:
        """Return a worker's node and device in words; "" if it has no place."""
        return self.actors.describe_place(name)

    # ---- identity of a worker

    def _environment(self, worker: WorkerProcess) -> dict[str, str]:
        """Return the variables that override the node's own; the node sets the GPU pin."""
        extra = {**self._host.keys_of(worker.model), **worker.model.env}
        kind = KINDS[worker.model.engine]
        return environment.for_remote_worker(self._host.environ, worker.place, extra, kind)

    def _fingerprint(self, worker: WorkerProcess) -> str:
        """Return a hash of everything that a worker is started with, for the takeover."""
        spec = make_worker_spec(worker.model, worker.place, "")
        env = sorted(self._environment(worker).items())
        parts = msgspec.msgpack.encode((spec, env, __version__, self.cluster_authority))
        return hashlib.sha256(parts).hexdigest()
