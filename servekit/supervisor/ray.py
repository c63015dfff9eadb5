"""`launcher: ray`: workers in the actors of a Ray cluster, reached over TCP with mutual TLS.

Ray says where, and starts and ends processes; nothing of a request passes through it. A worker and
its place are two things: it is started again where it was as long as its node lives, and placed
anew when that is lost. Actors outlive the supervisor for `ray.grace_s`, and the next one finds
them by their names: what runs as the file wants it is taken over, and the rest is ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from servekit import __version__
from servekit.config.cluster import RayConfig
from servekit.config.engines import KINDS
from servekit.config.schema import ModelConfig
from servekit.errors import StartError
from servekit.supervisor import access, environment, joining, nodes
from servekit.supervisor.berths import VACATE_S, Berths, Order
from servekit.supervisor.claims import least
from servekit.supervisor.cluster import Cluster, Unable
from servekit.supervisor.heritage import Heritage
from servekit.supervisor.launcher import Guest
from servekit.supervisor.life import Host, Life
from servekit.supervisor.planning import Plan
from servekit.supervisor.remote import RemoteChild
from servekit.supervisor.specs import worker_spec
from servekit.supervisor.tasks import ended, undisturbed
from servekit.wire.cluster import Berth, Look, Looked, Node
from servekit.wire.credentials import Credentials
from servekit.wire.messages import Status, Stop


class Instance(Host, Protocol):
    """The supervisor."""

    def status(self) -> Status: ...


class RayLauncher:
    """Made on the event loop; of no use before `open`."""

    def __init__(
        self,
        plan: Plan,
        host: Instance,
        run: Callable[[Life[Any]], None],
        heritage: Heritage | None = None,
    ) -> None:
        self._heritage = heritage
        self._settling: asyncio.Task[None] | None = None
        self._settings = plan.config.ray or RayConfig()
        self._host = host
        self.grace_s = self._settings.grace_s
        self._run = run
        self._nodes: tuple[Node, ...] = ()
        self._authority = joining.authority(host.run_dir.path)
        own = self._authority.issue("supervisor", "supervisor")
        self.cluster_authority = own.authority  # PEM
        self.gateways_everywhere = self._settings.gateways == "every_node"
        self.berths = Berths(own)
        self.cluster = self.berths.cluster = Cluster(
            host,
            self._settings,
            joining.namespace(self._settings, host.run_dir.path),
            joining.wants(plan.config.models),
            self.berths,
            watch=self.gateways_everywhere,
        )

    # ---- the cluster

    async def open(self, plan: Plan) -> None:
        """Join the cluster and look at its nodes. Raises StartError where it cannot serve that."""
        address, within_s = self._settings.address, self._settings.connect_s
        await joining.reach(address)
        self._run(self.cluster)
        try:
            async with asyncio.timeout(within_s):
                self._nodes = await asyncio.shield(self.cluster.joined)
        except TimeoutError:
            raise StartError(
                f"the Ray cluster at {address} has not let us in within {within_s:g} s; look at it"
                " with `ray status`"
            ) from None
        except Unable as error:
            raise StartError(f"cannot join the Ray cluster at {address}: {error.message}") from None
        refusal = self.refusal(plan.config.models) or self._unreachable(plan.config.server.host)
        if refusal:
            raise StartError(refusal)
        joining.leave(self._host.run_dir.path, self._authority)
        self.keep(plan.config.models)
        if self._heritage is not None:
            drain_s = plan.config.server.drain_timeout_s
            settling = self._heritage.settle(self._host.status, drain_s)
            self._settling = asyncio.get_running_loop().create_task(settling)

    def refusal(self, models: Sequence[ModelConfig]) -> str:
        """Why the cluster cannot serve these, as it was when we joined; "" if it can."""
        cpus = self._settings.cpus
        needs = [nodes.Need(model.name, self.gpus_for(model), cpus) for model in models]
        return nodes.refusal(self._nodes, _own_versions(), needs)

    async def fault(self, node: Node) -> str:
        """Why nothing of ours can run on a node, whatever room it has; "" if it can."""
        own = _own_versions()
        if said := nodes.fault(node, own):
            try:  # which was true when it came, and it may have been busy, or been set right
                looked: Looked = await self.cluster.ask(lambda id: Look(id, node.node))
            except Unable as error:
                return error.message
            said = nodes.fault(looked.node, own)
        return said

    def _unreachable(self, host: str) -> str:
        """Why gateways on other nodes would be of no use; "" if they are, or there are none."""
        own = next((node.host for node in self._nodes if node.node == self.cluster.own), "")
        if not self.gateways_everywhere or not access.is_loopback(host) or access.is_loopback(own):
            return ""
        return (
            f"`ray.gateways: every_node` is for clients elsewhere, and they do not reach {host}: as"
            " `server.host` say 0.0.0.0, or the address of this machine"
        )

    def keep(self, models: Sequence[ModelConfig]) -> None:
        """Of what was found, end all that nobody will ask for."""
        names = [f"{m.name}/{i}" for m in models if m.load == "on_start" for i in range(least(m))]
        if self.gateways_everywhere:
            sites = nodes.sites_of(self.cluster.nodes, self.cluster.own, {})
            names += [f"gateway/{host}" for host in sites]
        self.cluster.keep(tuple(names))

    async def close(self, tasks: Mapping[Life[Any], asyncio.Task[None]]) -> set[str]:
        """All workers have ended, and given their places back. Who does not end."""
        if self._heritage is not None and self._settling is not None:
            self._settling.cancel()
            self._heritage.end()
        self.cluster.end(Stop(), VACATE_S)
        joining.forget(self._host.run_dir.path)
        return await ended({tasks[self.cluster]} if self.cluster in tasks else set(), VACATE_S)

    def gateway_credentials(self, name: str, *, is_dialled: bool = False) -> Credentials:
        return self._authority.issue("gateway", name, is_dialled=is_dialled)

    # ---- for workers

    def gpus_for(self, model: ModelConfig) -> int:
        return nodes.gpus_for(model, any_there=any(node.gpus for node in self._nodes))

    async def enter(self, guest: Guest) -> str:
        mark = self._fingerprint(guest)
        claim = (guest.place.elsewhere, self._settings.cpus, self._settings.strategy)
        return await self.berths.enter(
            guest.name,
            lambda what: guest.told_to_wait(what),
            lambda id: Berth(id, guest.name, guest.model.name, *claim, mark),
            lambda told: guest.measure_gpus(told),
        )

    async def spawn(
        self,
        guest: Guest,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        host = self.berths.host(guest.name)
        order = Order(
            args=(
                *("--name", guest.name),
                *("--listen", f"tcp://{joining.every(host)}:0", "--advertise", host),
                *("--grace-s", f"{self._settings.grace_s:g}"),
            ),
            env=self._environment(guest),
            credentials=self._authority.issue("worker", guest.name),
            fingerprint=self._fingerprint(guest),
            log_path=self._host.run_dir.log_path(guest.name),
            pin=KINDS[guest.model.engine].pin,
        )
        return await self.berths.spawn(guest.name, order, incoming, on_message, on_line)

    async def strays(self, name: str) -> str:
        return await self.berths.strays(name)

    async def release(self, name: str) -> None:
        await self.berths.release(name)

    def where(self, name: str) -> str:
        return self.berths.where(name)

    # ---- what a worker is

    def _environment(self, guest: Guest) -> dict[str, str]:
        """Over that of its node; whose pin is set there."""
        extra = {**self._host.keys_of(guest.model), **guest.model.env}
        kind = KINDS[guest.model.engine]
        return environment.for_remote_worker(self._host.environ, guest.place, extra, kind)

    def _fingerprint(self, guest: Guest) -> str:
        """Of all that a worker is started with: one that has another is not taken over."""
        spec = worker_spec(guest.model, guest.place, "")
        env = sorted(self._environment(guest).items())
        parts = msgspec.msgpack.encode((spec, env, __version__, self.cluster_authority))
        return hashlib.sha256(parts).hexdigest()


def _own_versions() -> nodes.Versions:
    ray = importlib.metadata.version("ray")
    return nodes.Versions(__version__, platform.python_version(), ray)


def launcher_of(
    plan: Plan, host: Instance, run: Callable[[Life[Any]], None], heritage: Heritage | None
) -> RayLauncher | None:
    """What the file says; None where workers are children of the supervisor."""
    return RayLauncher(plan, host, run, heritage) if plan.config.launcher == "ray" else None


def grace_s(launcher: RayLauncher | None) -> float:
    """How long what serves may outlive the supervisor."""
    return 0.0 if launcher is None else launcher.grace_s


async def opened(
    launcher: RayLauncher | None, plan: Plan, until_told: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Whether what launches workers is at hand; False where it is told to end before it is."""
    return launcher is None or await undisturbed(until_told(), launcher.open(plan))
