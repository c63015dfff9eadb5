"""`launcher: ray`: workers in the actors of a Ray cluster, reached over TCP with mutual TLS.

Ray says where, and starts and ends processes; nothing of a request passes through it. A worker and
its place are two things: it is started again where it was as long as its node lives, and placed
anew when that is lost. Actors outlive the supervisor for `ray.grace_s`, and the next one finds
them by their names: what runs as the file wants it is taken over, and the rest is ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog

from servekit import __version__
from servekit.config.cluster import RayConfig
from servekit.config.engines import KINDS
from servekit.config.schema import ModelConfig
from servekit.errors import StartError
from servekit.supervisor import elsewhere, environment, joining
from servekit.supervisor.certificates import Certificates
from servekit.supervisor.child import Exit
from servekit.supervisor.claims import least
from servekit.supervisor.cluster import Cluster, Unable
from servekit.supervisor.gpus import Slot
from servekit.supervisor.heritage import Heritage
from servekit.supervisor.launcher import Guest
from servekit.supervisor.life import Host, Life
from servekit.supervisor.output import Output, RotatingFile
from servekit.supervisor.placement import device
from servekit.supervisor.planning import Plan
from servekit.supervisor.remote import Hands, RemoteChild
from servekit.supervisor.specs import worker_spec
from servekit.supervisor.survey import Survey
from servekit.supervisor.tasks import ended
from servekit.wire.cluster import (
    Berth,
    Berthed,
    Exited,
    Held,
    Measured,
    Running,
    Signal,
    Start,
    Started,
    Strays,
    Vacate,
)
from servekit.wire.credentials import Credentials, Renew
from servekit.wire.messages import Status, Stop

log: Any = structlog.get_logger("servekit.supervisor")

#: How long a worker may take to write its stacks, and they to come here.
_DUMP_S = 3.0
#: How long giving a place back may take.
_VACATE_S = 15.0


@dataclass(slots=True)
class _Place:
    """What is known of one worker's place."""

    guest: Guest
    host: str = ""
    gpus: Slot = ()
    running: Running | None = None
    output: Output | None = None
    pid: int = 0
    child: RemoteChild[Any] | None = None
    ended: dict[int, asyncio.Future[Exited]] = field(default_factory=dict)  # by PID


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
        self._survey = Survey(self._settings)
        self._places: dict[str, _Place] = {}
        authority = joining.authority(host.run_dir.path)
        self._certificates = Certificates(authority, self._settings.certificate_life_s)
        self.cluster = Cluster(
            host,
            self._settings,
            joining.namespace(self._settings, host.run_dir.path),
            joining.wants(plan.config.models),
            self,
        )

    # ---- the cluster

    async def open(self, plan: Plan) -> None:
        """Join the cluster and look at its nodes. Raises StartError where it cannot serve that."""
        address, within_s = self._settings.address, self._settings.connect_s
        await joining.reach(address)
        self._run(self.cluster)
        try:
            async with asyncio.timeout(within_s):
                self._survey.nodes = await asyncio.shield(self.cluster.joined)
        except TimeoutError:
            raise StartError(
                f"the Ray cluster at {address} has not let us in within {within_s:g} s; look at it"
                " with `ray status`"
            ) from None
        except Unable as error:
            raise StartError(f"cannot join the Ray cluster at {address}: {error.message}") from None
        if refusal := self._survey.refusal(plan.config.models):
            raise StartError(refusal)
        joining.leave(self._host.run_dir.path, self._certificates.authority)
        self.keep(plan.config.models)
        if self._heritage is not None:
            drain_s = plan.config.server.drain_timeout_s
            settling = self._heritage.settle(self._host.status, drain_s)
            self._settling = asyncio.get_running_loop().create_task(settling)

    async def refusal(self, models: Sequence[ModelConfig]) -> str:
        return await self._survey.again(self.cluster, models)

    def keep(self, models: Sequence[ModelConfig]) -> None:
        """Of what was found, end all that nobody will ask for."""
        names = [f"{m.name}/{i}" for m in models if m.load == "on_start" for i in range(least(m))]
        self.cluster.keep(tuple(names))

    async def close(self, tasks: Mapping[Life[Any], asyncio.Task[None]]) -> set[str]:
        """All workers have ended, and given their places back. Who does not end."""
        if self._heritage is not None and self._settling is not None:
            self._settling.cancel()
            self._heritage.end()
        self.cluster.end(Stop(), _VACATE_S)
        joining.forget(self._host.run_dir.path)
        return await ended({tasks[self.cluster]} if self.cluster in tasks else set(), _VACATE_S)

    def gateway_credentials(self, name: str) -> Credentials:
        return self._certificates.issue("gateway", name)

    def renewed(self, gateway: str) -> Credentials | None:
        return self._certificates.due("gateway", gateway)

    # ---- for workers

    def gpus_for(self, model: ModelConfig) -> int:
        return self._survey.gpus_for(model)

    async def enter(self, guest: Guest) -> str:
        known = self._places.get(guest.name)
        place = self._places[guest.name] = known or _Place(guest)
        place.guest, place.host, place.gpus = guest, "", ()
        guest.measure_gpus(elsewhere.Elsewhere())
        mark = self._fingerprint(guest)
        claim = (guest.place.elsewhere, self._settings.cpus, self._settings.strategy)
        try:
            found: Berthed = await self.cluster.ask(
                lambda id: Berth(id, guest.name, guest.model.name, *claim, mark)
            )
        except Unable as error:
            return error.message
        finally:
            guest.told_to_wait("")
        place.gpus = elsewhere.given(found.gpus, found.host)
        place.host, place.running = found.host, found.running
        guest.measure_gpus(elsewhere.Elsewhere(place.gpus, place.gpus))
        return ""

    async def spawn(
        self,
        guest: Guest,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        place = self._places[guest.name]
        path = self._host.run_dir.log_path(guest.name)
        place.output = output = Output(RotatingFile(path), on_line)
        if place.running is not None:
            self._certificates.forget("worker", guest.name)  # which it has is not known
        running = place.running or await self._start(guest, place)
        place.running, place.pid = None, running.pid
        ended = self._end_of(place, running.pid)
        child: RemoteChild[Any] = await RemoteChild.attach(
            guest.name,
            running.address,
            self._certificates.own,
            incoming,
            on_message,
            Hands(
                kill=lambda cause: self._kill(guest.name),
                exited=lambda: _exit(ended, output),
                dump=lambda: self._dump(guest.name, output),
            ),
        )
        place.child = child
        return child

    async def _start(self, guest: Guest, place: _Place) -> Running:
        assert place.output is not None
        credentials = self._certificates.issue("worker", guest.name).to_bytes()
        mark = self._fingerprint(guest)
        args = (
            *("--name", guest.name),
            *("--listen", f"tcp://{joining.every(place.host)}:0", "--advertise", place.host),
            *("--grace-s", f"{self._settings.grace_s:g}"),
        )
        env, kind = self._environment(guest), KINDS[guest.model.engine]
        try:
            started: Started = await self.cluster.ask(
                lambda id: Start(id, guest.name, args, env, credentials, mark, kind.pin)
            )
        except Unable as error:
            tail = [line for line in place.output.tail if not line.startswith("{")]
            last = f": {tail[-1].strip()}" if tail else ""
            raise Unable(f"{error.message}{last}") from None
        return Running(started.pid, started.address, mark)

    async def strays(self, name: str) -> str:
        try:
            async with asyncio.timeout(_VACATE_S):
                found: Held = await self.cluster.ask(lambda id: Strays(id, name))
        except (Unable, TimeoutError):
            return ""
        return found.stray

    async def release(self, name: str) -> None:
        if self._places.pop(name, None) is None:
            return
        try:
            async with asyncio.timeout(_VACATE_S):
                await self.cluster.ask(lambda id: Vacate(id, name))
        except (Unable, TimeoutError) as error:
            log.warning("a place was not given back", worker=name, reason=str(error))

    def where(self, name: str) -> str:
        place = self._places.get(name)
        if place is None or not place.host:
            return ""
        return device(place.gpus) if place.gpus else f"cpu on {place.host}"

    def look(self) -> None:
        """Called often: renew certificates that are due."""
        self._certificates.look()
        for name, place in self._places.items():
            child = place.child
            if child is None or child.exited.done():
                continue
            if (due := self._certificates.due("worker", name)) is not None:
                child.send(Renew(due))

    # ---- what the cluster tells

    def waits(self, name: str, what: str) -> None:
        if (place := self._places.get(name)) is not None:
            place.guest.told_to_wait(what)

    def lines(self, name: str, lines: tuple[str, ...]) -> None:
        place = self._places.get(name)
        if place is not None and place.output is not None:
            place.output.data_received("".join(f"{line}\n" for line in lines).encode())

    def measured(self, message: Measured) -> None:
        place = self._places.get(message.name)
        if place is not None and place.host:
            place.guest.measure_gpus(elsewhere.measured(place.gpus, place.host, message))

    def exited(self, message: Exited) -> None:
        """Of a worker; PID 0 is whichever runs there."""
        place = self._places.get(message.name)
        if place is None:
            return
        pids = [message.pid] if message.pid else list(place.ended)
        for pid in pids:
            ended = self._end_of(place, pid)
            if not ended.done():
                ended.set_result(message)

    def _end_of(self, place: _Place, pid: int) -> asyncio.Future[Exited]:
        if pid not in place.ended:
            place.ended = {pid: asyncio.get_running_loop().create_future()}
        return place.ended[pid]

    # ---- what is done to a worker

    async def _kill(self, name: str) -> None:
        self.cluster.tell(Signal(name, signal.SIGKILL, group=True))

    async def _dump(self, name: str, output: Output) -> Sequence[str]:
        self.cluster.tell(Signal(name, signal.SIGUSR2))
        await output.dumped(_DUMP_S)
        return tuple(output.stacks)

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
        parts = msgspec.msgpack.encode(
            (spec, env, __version__, self._certificates.authority.certificate)
        )
        return hashlib.sha256(parts).hexdigest()


async def _exit(ended: asyncio.Future[Exited], output: Output) -> Exit:
    told = await asyncio.shield(ended)
    return Exit(
        code=told.code,
        signal=told.signal,
        tail=tuple(output.tail),
        out_of_memory=told.out_of_memory,
        cause=told.cause,
        stacks=tuple(output.stacks),
    )
