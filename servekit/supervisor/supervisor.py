"""The supervisor process; `Supervisor.live` is its life cycle on one page.

It owns the public socket, the run directory and every process of the instance. Signals and
operators only post requests to its queue; one task acts on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Literal

import structlog
from msgspec.structs import replace

from servekit import __version__
from servekit.config.schema import ALL_MODELS, ModelConfig
from servekit.errors import StartError
from servekit.protocol.messages import (
    Accepted,
    Drain,
    Link,
    ModelStatus,
    Quarantined,
    Refused,
    Status,
    Stop,
    Topology,
    Why,
)
from servekit.ray.launcher import RayLauncher
from servekit.ray.remote_gateways import remote_gateways
from servekit.supervisor import access_rules
from servekit.supervisor.admin import status as snapshot
from servekit.supervisor.admin.adapter_service import AdapterService
from servekit.supervisor.admin.browser_links import LINK_LIFE_S, BrowserLinks
from servekit.supervisor.admin.control_socket import AdminApi
from servekit.supervisor.admin.metrics import MetricsAggregator
from servekit.supervisor.admin.resource_monitor import ResourceMonitor
from servekit.supervisor.admin.systemd import Notifier
from servekit.supervisor.autoscaling.autoscaler import Scaler
from servekit.supervisor.autoscaling.capacity import LocalCapacity, RayCapacity
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.event_log import journal
from servekit.supervisor.gateway_process import gateways_of, in_vain
from servekit.supervisor.lifecycle.managed_process import (
    ManagedProcess,
    Tasks,
    complete_before,
    wait_for_tasks,
)
from servekit.supervisor.model_swap.manager import SwapManager
from servekit.supervisor.pace import Pace
from servekit.supervisor.process.orphan_guard import OrphanGuard
from servekit.supervisor.process.run_dir import Record, boot_id
from servekit.supervisor.process.signals import Signals
from servekit.supervisor.quarantine import Quarantine, differ_in_time_only
from servekit.supervisor.startup_resources import StartupResources, has_terminal
from servekit.supervisor.usage_ledger import UsageLedger
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import procfs, sockets, subreaper
from servekit.system.gpu.nvml_client import driver
from servekit.system.orphan_cleanup import Started, end_leftovers, mark_by_limit
from servekit.system.rlimits import is_shortage

log: Any = structlog.get_logger("servekit.supervisor")

#: From the end of the grace time to giving up on a process that SIGKILL does not end: it is stuck
#: in the kernel, as with a broken GPU driver.
KILL_S = 15.0
#: From Stop to SIGTERM for a worker that has nothing in flight.
WORKER_GRACE_S = 5.0
#: The longest shutdown beyond `drain_timeout_s`; systemd waits as long.
END_S = WORKER_GRACE_S + 2 * KILL_S
#: The delay of a tick that means we were suspended.
SLEPT_S = 2.0
#: The silence of a process after a ping, from which the ticks are quick, to find its end in time.
OWED_S = 1.0
#: The longest wait for new figures before an operator gets those of the last measurement.
_FIGURES_S = 1.0
#: The interval of the looks at the run directory, orphans and the token budgets of keys.
HOUSEKEEPING_EVERY_S = 1.0

#: States of workers in which nothing is due.
_CALM = ("ready", "asleep", "failed")

#: A request to end. The second signal means "now", as a second Ctrl-C does elsewhere.
Request = Literal["signal", "drain", "now", "hangup"]


class Supervisor:
    """The supervisor of one instance. Must be created on a running event loop.

    `show_status` shows the whole state, at most once per event-loop tick, and `show_line` a line
    that a child wrote.
    """

    def __init__(
        self,
        plan: Plan,
        resources: StartupResources,
        environ: Mapping[str, str],
        show_status: Callable[[Status], None],
        show_line: Callable[[str, str], None],
    ) -> None:
        self.run_dir = resources.run_dir
        self._environ = environ
        self.mark = secrets.token_hex(16)
        server = plan.config.server
        self.url, *legacy = [sockets.url_of(s, tls=bool(server.tls)) for s in resources.listeners]
        for url in legacy:
            log.info("legacy_port_open", url=url)
        self._listeners = resources.listeners
        self._show_status, self._show_line = show_status, show_line
        self._started_at = time.time()
        self._draining = self._publishing = self._noticed = False
        self._guard: OrphanGuard
        self._unrestored = ""  # why the run directory could not be restored
        self._topology = Topology(())
        self._quarantine = Quarantine()
        self._requests: asyncio.Queue[Request | BaseException] = asyncio.Queue()
        self._tasks: dict[ManagedProcess[Any], asyncio.Task[None]] = {}
        self._reloads: set[asyncio.Task[Any]] = set()
        self._has_terminal = has_terminal()
        self._loop = asyncio.get_running_loop()
        self._signals = Signals(self._requests.put_nowait)
        fds = tuple(sock.fileno() for sock in resources.listeners)
        self._gateways = gateways_of(server, fds, self)
        self._notifier = Notifier(environ, self._last_sign_of_life)
        self.launcher: RayLauncher | None = None  # None: workers are children of the supervisor
        if plan.config.launcher == "ray":
            self.launcher = RayLauncher(plan, self, self._run, resources.takeover)
        self._deployments = DeploymentManager(plan, self, self._run)
        self._swap_manager = SwapManager(self._deployments, self._gateways)
        rooms = LocalCapacity(self._deployments) if self.launcher is None else RayCapacity()
        self._scaler = Scaler(self._deployments, self._gateways, self._swap_manager, rooms)
        self._usage = UsageLedger()
        self._housekeeping_at_s = 0.0
        self._pace, self._requests_seen = Pace(self._longest_rest_s), 0
        self._links = BrowserLinks(access_rules.SESSIONS)
        adapters = AdapterService(self._deployments, self._gateways)
        self._metrics = MetricsAggregator(
            self._gateways, self._deployments, self._quarantine, self.status, self._usage
        )
        self._admin_api = AdminApi(self, adapters, self._swap_manager, self._metrics)
        self._measures = ResourceMonitor(
            self._deployments, self._lives, self.run_dir, self.children_changed, self._pace
        )
        own = self._gateways, plan.config.server, resources.listeners
        self._everywhere = remote_gateways(*own, self.launcher, self, self._admin_api, self._run)

    # ---- life cycle

    async def run(self) -> int:
        """Run until told to stop; return the exit code. No process it started outlives it."""
        with contextlib.ExitStack() as last:
            last.callback(self._shut_down)
            last.callback(self._signals.ignore)
            self._signals.catch()
            self._loop.set_exception_handler(handle_loop_error)
            subreaper.become_subreaper()
            last.callback(driver.close)
            self._leave_record()
            last.callback(journal.close)
            last.callback(self._usage.close)
            mark_by_limit(self.mark)
            grace = 0.0 if self.launcher is None else self.launcher.grace_s
            self._guard = OrphanGuard(self.run_dir.path, self.mark, self.environ, grace)
            last.callback(self._guard.stop_guard)
            last.callback(self._end_all)
            for task in (
                ticking(self._tick_once, self._pace),
                self._measures.monitor_resources(),
            ):
                last.callback(self._loop.create_task(task).cancel)
            await self._admin_api.listen(self.run_dir.control)
            if self.launcher is None or await complete_before(
                self._until_told(), self.launcher.join_cluster(self._deployments.plan)
            ):
                for gateway in self._gateways:
                    self._run(gateway)
                self._everywhere.start_all()
                self._deployments.apply_plan(self._deployments.plan)
                await self._until_told()
            return await self._drain()

    def _run(self, life: ManagedProcess[Any]) -> None:
        task = self._loop.create_task(life.supervise(), name=life.name)
        self._tasks[life] = task
        task.add_done_callback(lambda done: self._on_end(life, done))

    def _on_end(self, life: ManagedProcess[Any], task: asyncio.Task[None]) -> None:
        """Handle the end of a managed process: by a reload, a shutdown or a bug of ours."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._requests.put_nowait(error)
        if not self._draining:
            del self._tasks[life]
            if isinstance(life, WorkerProcess | ForkServer):
                self._deployments.forget_process(life)
            self.publish_change()

    async def _until_told(self) -> None:
        """Return when a signal or an operator asks to end; raise what a process's task raised."""
        while True:
            match await self._requests.get():
                case BaseException() as error:
                    journal.record_event("down", f"failed: {error}")
                    raise error
                case "hangup" if not self._has_terminal or has_terminal():
                    self._spawn(self.reload())
                case "now":
                    self._force_shutdown()
                    return
                case _:
                    return

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _drain(self) -> int:
        """Drain the instance and return the exit code.

        Gateways end first: they need the workers for the requests in flight.
        """
        drain_s = self._deployments.pool.drain_timeout_s
        log.info("supervisor_draining", at_most_s=drain_s)
        self._draining = True
        self._notifier.stopping(drain_s + END_S)
        sockets.close_listeners(self._listeners)
        self._deployments.stop_changes()
        self._everywhere.stop_starting()
        self._swap_manager.stop_changes()
        self.publish_change()
        hurrying = self._loop.create_task(self._hurry_if_told_again())
        for gateway in self._gateways:
            gateway.end_child(Drain(), drain_s)
        stuck = await wait_for_tasks(self._tasks_of(self._gateways), drain_s + KILL_S)
        workers = self._deployments.replicas()
        for replica in workers:
            replica.end_child(Stop(), WORKER_GRACE_S)
        rest: list[ManagedProcess[Any]] = [*workers, *self._deployments.standbys()]
        stuck |= await wait_for_tasks(self._tasks_of(rest), WORKER_GRACE_S + KILL_S)
        if self.launcher is not None:
            stuck |= await self.launcher.close(self._tasks)
        hurrying.cancel()
        return last_words(stuck)

    def _tasks_of(self, lives: Sequence[ManagedProcess[Any]]) -> Tasks:
        return {self._tasks[life] for life in lives if life in self._tasks}

    async def _hurry_if_told_again(self) -> None:
        # An operator may ask twice; the drain is under way. A reload is refused now.
        while (request := await self._requests.get()) in ("drain", "hangup"):
            if request == "hangup":
                self._spawn(self.reload())  # is refused, and logs why
        self._force_shutdown()

    def _force_shutdown(self) -> None:
        log.warning("shutdown_forced")
        self._signals.ignore()  # all is ending, and handling a storm of signals takes time
        for life in self._lives():
            life.end_now()

    def _end_all(self) -> None:
        """End every process of ours, also if `live` raised."""
        for task in (*self._tasks.values(), *self._reloads):
            task.cancel()
        end_leftovers(self._started(), self.mark)
        subreaper.end_adopted()

    def _shut_down(self) -> None:
        self._admin_api.close()
        sockets.close_listeners(self._listeners)
        self.run_dir.unlock()

    # ---- requests from operators

    def shutdown(self, now: bool) -> None:
        self._requests.put_nowait("now" if now else "drain")

    def why(self, name: str) -> Why | Refused:
        others = [life for life in self._lives() if not isinstance(life, WorkerProcess)]
        return snapshot.explain_process(
            name, self._deployments.all_deployments(), others, self._swap_manager.residence
        )

    async def reload(self) -> Accepted | Refused:
        with self._notifier.reloading():
            return await self._deployments.reload_config()

    async def set_profile(self, name: str) -> Accepted | Refused:
        with self._notifier.reloading():
            answer = await self._deployments.reload_config("" if name == ALL_MODELS else name)
        if isinstance(answer, Accepted):
            self._record_profile()
        return answer

    def _record_profile(self) -> None:
        source = self._deployments.plan.source
        try:
            self.run_dir.record_profile(source.asked_profile, source.profile)
        except OSError as error:  # a full disk is no reason to refuse the switch
            log.warning("profile_not_recorded", reason=error.strerror)

    async def restart(self, name: str, wait: bool) -> Accepted | Refused:
        return await self._deployments.restart_model(name, wait=wait)

    def create_link(self) -> Link | Refused:
        if why := access_rules.refuse_link(self._deployments.plan.config):
            return Refused(f"no link is given out: {why}")
        return Link(f"{self.url}/ui?token={self._links.create()}", LINK_LIFE_S)

    def redeem_link(self, token: str) -> Accepted | Refused:
        valid = self._links.redeem(token)
        return Accepted() if valid else Refused("this link was used, or has expired")

    # ---- the context of its managed processes

    @property
    def environ(self) -> Mapping[str, str]:
        """The part of our environment that every child may have."""
        return access_rules.public(self._environ, self._deployments.plan.config)

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        return access_rules.handed(self._environ, model)

    def publish_change(self) -> None:
        self._pace.note_activity()
        self._publish_soon()

    def _publish_soon(self) -> None:
        if not self._publishing:
            self._publishing = True
            self._loop.call_soon(self._publish)

    def publish_later(self) -> None:
        self._noticed = True  # next tick; at each pong it would be n² messages a second
        self._pace.rouse()

    def children_changed(self) -> None:
        try:
            self.run_dir.record_children(self._started())
        except OSError as error:  # a full disk is no reason to stop serving
            log.warning("children_not_recorded", reason=error.strerror)

    def on_line(self, name: str, text: str) -> None:
        try:
            self._show_line(name, text)
        except Exception:  # a display that fails must not stop the child's output
            log.exception("display_failed", child=name)

    def quarantine(self, request: Quarantined) -> None:
        self._quarantine.add_request(request)
        self._deployments.reset_breaker(request.model)
        self.publish_change()

    def is_unused(self, adapter: str) -> bool:
        return all(gateway.is_done_with(adapter) for gateway in self._gateways)

    def _publish(self) -> None:
        self._publishing = self._noticed = False
        self._swap_manager.update()
        served = {one.model.name: one.info for one in self._deployments.served}
        self._quarantine.lift({name: info.generation for name, info in served.items() if info})
        topology = Topology(
            self._models(self._deployments.served, False),
            self._draining,
            sum(gateway.shares for gateway in self._gateways),
            self._quarantine.holding(),
            self._deployments.plan.access,
        )
        before = self._topology
        held = differ_in_time_only(topology.quarantined, before.quarantined)
        if not held or replace(topology, quarantined=before.quarantined) != before:
            self._topology = topology
            for gateway in self._gateways:
                gateway.publish(topology)
        if why := self._deployments.in_vain() or in_vain(self._gateways):
            self._requests.put_nowait(StartError(why))
        else:
            self._show_status(status := self.status())
            self._notifier.on_change(status)

    def _longest_rest_s(self) -> float:
        """Return the longest time between two ticks by which no timeout is missed."""
        stalls_s = (one.model.stall_timeout_s for one in self._deployments.replicas())
        return min(min(stalls_s, default=math.inf) / 4, self._notifier.feed_every_s or math.inf)

    def _note_activity(self) -> None:
        """Note requests, workers that are on their way, and processes that do not answer."""
        seen = sum(gateway.traffic.requests for gateway in self._gateways)
        running = any(gateway.traffic.in_flight for gateway in self._gateways)
        calm = all(one.state in _CALM for one in self._deployments.replicas())
        owed = any(life.silent_s > OWED_S for life in self._lives())
        if seen != self._requests_seen or running or owed or not calm:
            self._requests_seen = seen
            self._pace.note_activity()

    def _tick_once(self, slept: bool) -> None:
        self._note_activity()
        if (now_s := time.monotonic()) >= self._housekeeping_at_s:
            self._housekeeping_at_s = now_s + HOUSEKEEPING_EVERY_S
            self._restore_run_dir()
            subreaper.reap_orphans()
            self._publish_budgets()
        for life in self._lives():
            if slept:
                life.forgive_suspension()
            life.check_health()
        if self._guard.restart_if_dead():
            log.warning("orphan_guard_restarted")
        self._deployments.start_missing_fork_servers()
        self._scaler.scale_deployments()
        self._swap_manager.update()
        self._metrics.count_events()
        self._notifier.feed_watchdog()
        if self._quarantine.expire() or self._noticed:
            self._publish_soon()

    def _publish_budgets(self) -> None:
        """Tell the gateways which keys have used up their tokens."""
        spent = self._usage.find_spent(self._deployments.plan.config.keys)
        for gateway in self._gateways:
            gateway.publish_budgets(spent)

    def _restore_run_dir(self) -> None:
        """Restore the run directory if logind (at a logout) or a cleaner of /tmp has removed it."""
        try:
            if self.run_dir.restore():
                log.warning("run_dir_restored")
                self.children_changed()
                self._measures.note_segments_anew()
            self._unrestored = ""
        except (OSError, StartError) as error:
            if str(error) != self._unrestored:
                log.error("run_dir_not_restored", reason=str(error))
            self._unrestored = str(error)
        self._admin_api.listen_again(self.run_dir.control)

    # ---- status

    async def status_now(self) -> Status:
        """Return the status for an operator, who may ask before the first tick."""
        # no files left to read /proc with, or it takes too long
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FIGURES_S):
                await self._measures.refresh()
        return self.status()

    def _last_sign_of_life(self) -> float:
        return max((gateway.answered_at for gateway in self._gateways), default=0.0)

    def status(self) -> Status:
        return Status(
            version=__version__,
            pid=os.getpid(),
            url=self.url,
            config=self._deployments.plan.config_path,
            started_at=self._started_at,
            rss_bytes=procfs.rss_bytes(os.getpid()),
            models=self._models(self._deployments.all_deployments(), True),
            gateways=tuple(gateway.status() for gateway in self._gateways),
            draining=self._draining,
            starts=tuple(life.starting.all(life.name) for life in self._lives()),
            gpus=snapshot.gpus(self._measures.in_use, self._deployments.replicas()),
            traffic=snapshot.traffic(self._deployments.served, self._gateways),
            profile=self._deployments.plan.source.profile,
            profiles=self._deployments.plan.config.profiles,
        )

    def _models(
        self, deployments: Sequence[Deployment], for_operators: bool
    ) -> tuple[ModelStatus, ...]:
        told, at = self._swap_manager.residence, int(self._started_at)
        return tuple(snapshot.of_model(one, at, told(one, for_operators)) for one in deployments)

    def _started(self) -> list[Started]:
        children = (life.child for life in self._lives())
        started = [Started(c.name, c.pid, c.started) for c in children if c is not None and c.here]
        return [*started, *self._measures.descendants]

    def _lives(self) -> list[ManagedProcess[Any]]:
        own: list[ManagedProcess[Any]] = (
            [self.launcher.cluster] if self.launcher is not None else []
        )
        return [*self._gateways, *self._deployments.replicas(), *self._deployments.standbys(), *own]

    def _leave_record(self) -> None:
        config = self._deployments.plan.config_path
        boot, pid = boot_id(), os.getpid()
        self.run_dir.record(Record(pid, self._started_at, self.url, config, self.mark, boot))
        self._record_profile()
        if reason := self.run_dir.instead_of:
            log.warning("run_dir_replaced", path=str(self.run_dir.path), reason=reason)
        journal.open_log(self.run_dir.path)
        self._usage.open_store(self.run_dir.path)
        journal.record_event(
            "up", f"servekit {__version__} at {self.url}", pid=os.getpid(), config=config
        )


async def ticking(look: Callable[[bool], None], pace: Pace) -> None:
    """Call `look(suspended)` at each tick, until cancelled."""
    due_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        try:
            look(now_s - due_s > SLEPT_S)
        except Exception as error:  # one failure must not stop the ticks
            if not is_shortage(error):  # the monitor warns of that
                log.exception("tick_failed")
        due_s = now_s + pace.interval_s
        await pace.wait_for_tick()


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Pass over failures to accept connections for lack of files: asyncio tries again by itself.

    It reports a hundred of them a second, and the monitor has warned.
    """
    if not is_shortage(context.get("exception")):
        loop.default_exception_handler(context)


def last_words(stuck: Collection[str]) -> int:
    """Log how the instance has ended, with the names of stuck processes. Returns the exit code."""
    names = sorted(stuck)
    journal.record_event("down", f"stuck in the kernel: {names}" if stuck else "stopped")
    if stuck:
        log.error("processes_stuck", children=names)
        return 1
    log.info("supervisor_stopped")
    return 0
