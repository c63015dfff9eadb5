"""State of one model that may be loaded and unloaded, beside its deployment."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

import structlog
from msgspec.structs import replace

from servekit.config.engines.options import KINDS
from servekit.protocol.residency import LoadMode, Residency, ResidencyStatus, Want, tier_text
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.model_swap import policy
from servekit.supervisor.model_swap.types import UNKNOWN_S, PolicyInput
from servekit.supervisor.scheduling.gpu_admission import NOTHING
from servekit.supervisor.workers.worker_process import WorkerProcess

log: Any = structlog.get_logger("servekit.supervisor")

#: A model that was never woken is assumed to wake in this fraction of its load time.
_WAKES_IN = 0.25
#: How long a model that could not be put to sleep is left awake.
_SLEEPLESS_S = 60.0
#: Time from a change to its publication, at most.
_TOLD_S = 0.2
_COMING = {"starting", "loading", "backoff", "stalled"}


class ModelState:
    """State of one model, updated by `observe`; times are seconds on the monotonic clock."""

    def __init__(self, deployment: Deployment, now: float) -> None:
        self.deployment = deployment
        self.tier: Residency = "stopped"
        self.since = now
        self.reason = ""
        self.waiting = 0
        self.waiting_since: float | None = None
        self.requested: Literal["", "load", "unload", "sleep", "wake"] = ""  # an operator's request
        self.goal: Residency | None = None  # of the last request; None: a profile overrules it
        self.sleepers: Sequence[WorkerProcess] = ()  # its workers, if we put them to sleep
        self.kept: Mapping[str, int] = {}  # bytes on its GPUs when it last slept
        self.restless = ""  # why it could not be put to sleep
        self.task: asyncio.Task[None] | None = None
        self._doing: Literal["sleep", "wake"] = "sleep"
        self._touched = False  # an operator has changed it
        self._held = False  # stopped by an operator: requests do not load it
        self._left_out_at: float | None = None  # since when the profile has been without it
        self._asked_at: float | None = None  # load requested otherwise
        self._busy = False
        self._used_at = self._now = now
        self._load_s = UNKNOWN_S
        self._wake_s: float | None = None
        self._began: tuple[str, float] | None = None  # previous tier, start of loading
        self._stay_s: float | None = None
        self._told_at = -math.inf
        self._sleepless_until = -math.inf

    # ---- events

    def observe(self, uses: Iterable[tuple[int, int, float]], now: float) -> None:
        """Update the state. `uses`: waiting and running requests, last use, per gateway."""
        self._now = now
        self._set_tier(self._tier(), now)
        waiting = running = 0
        for waits, runs, used_at in uses:
            waiting, running = waiting + waits, running + runs
            self._used_at = max(self._used_at, used_at)
        self._busy, self.waiting = bool(waiting or running), waiting
        if self._busy:
            self._used_at = now
        if waiting and self.waiting_since is None:
            self.waiting_since = now
        if not waiting:
            self.waiting_since = None
        self.forget_met_request()

    def _tier(self) -> Residency:
        deployment = self.deployment
        if not deployment.wanted:
            return "leaving" if deployment.replicas else "stopped"
        if self.task is not None:
            return "leaving" if self._doing == "sleep" else "coming"
        states = {replica.state for replica in deployment.living}
        if "ready" in states:
            return "resident"
        if "asleep" in states and not states & _COMING:
            return "asleep"
        return "coming" if states & _COMING or not states else "failed"

    def _set_tier(self, tier: Residency, now: float) -> None:
        if tier == self.tier:
            return
        if tier == "resident":
            self._measure(now)
            self.reason, self._asked_at, self._used_at = "", None, now
        elif tier == "failed":
            self._began = self._asked_at = None
        elif tier == "stopped":
            if self.reason.startswith("asleep"):
                at = time.strftime("%H:%M:%S")
                self.reason = f"stopped at {at}: a reload or a restart came while it was asleep"
            if self._told_at <= self.since:  # else it is for the next load
                self._stay_s = None
        self.tier, self.since = tier, now

    def _measure(self, now: float) -> None:
        """Record how long the load or the wake took."""
        before, began_at = self._began or ("stopped", self.since)
        self._began = None
        if before == "asleep":
            self._wake_s = now - began_at
        elif self.tier == "coming":
            self._load_s = now - began_at

    def mark_started(self, now: float) -> None:
        """Mark the beginning of a load or a wake."""
        self._began, self.reason = (self.tier, now), ""

    def apply_action(
        self, doing: Literal["sleep", "wake"], work: Coroutine[Any, Any, None]
    ) -> None:
        """Run a task that puts its workers to sleep or wakes them, one at a time."""
        self._doing = doing
        self.task = asyncio.get_running_loop().create_task(work, name=self.deployment.model.name)
        self.task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.task = None
        if not task.cancelled() and task.exception() is not None:
            log.error("model_change_failed", model=task.get_name(), exc_info=task.exception())
        self.deployment.changed()

    def cancel_change(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def sleepless(self, now: float, why: str) -> None:
        """Record that it could not be put to sleep, so that it is not tried again for a while."""
        self._sleepless_until, self.restless = now + _SLEEPLESS_S, why

    def is_left_out(self, now: float) -> bool:
        """Return whether it is loaded, and the profile has been without it for a moment.

        By then the gateways have been told to refuse new requests; the requests that wait there
        are to be answered first.
        """
        if not self.deployment.left_out:
            self._left_out_at = None
            return False
        if self._left_out_at is None:
            self.drop_request()
            self._left_out_at, self.goal, self._held = now, None, False
        idle = self.task is None and not self.waiting
        return self.deployment.wanted and idle and now - self._left_out_at >= _TOLD_S

    def keep_loaded(self, stay_s: float | None, now: float, *, loads: bool) -> None:
        """Take a client's keep_alive, and its request to load the model if `loads`."""
        self._stay_s, self._told_at = stay_s, now
        if loads and self.tier in ("stopped", "asleep"):
            self._asked_at = now

    # ---- operators

    def accept_request(self, want: Want, now: float) -> str:
        """Take an operator's request; return why it is refused, or ""."""
        if (profile := self.deployment.left_out) and want in ("load", "wake"):
            return (
                f"{self.deployment.model.name} is not in the profile {profile!r}, which is in force"
            )
        if want == "sleep" and (why := self.sleepless_for_good()):
            return why
        if want == "wake" and self.tier not in ("asleep", "resident", "leaving"):
            tier = tier_text(self.tier)
            return f"{self.deployment.model.name} is {tier}, not asleep; `servekit load` loads it"
        self._touched, self.requested, self.restless = True, want, ""
        self.goal = HAS[want]
        self._held = want == "unload" and self.deployment.model.load == "on_start"
        self._sleepless_until = -math.inf
        self._asked_at = now if want in ("load", "wake") else None
        if want in ("load", "wake"):
            self.deployment.try_again()
        elif want == "unload" and self.tier in ("coming", "failed") and self.task is None:
            self.reason = "stopped by an operator"
            self.deployment.unload()
        self.forget_met_request()
        return ""

    def sleepless_for_good(self) -> str:
        """Return why it cannot be put to sleep, however long one waits; "" if it can."""
        model = self.deployment.model
        if not KINDS[model.engine].sleeps:
            return f"{model.name}: the engine {model.engine} cannot sleep; `servekit unload` stops"
        info = self.deployment.info
        if info is not None and not info.sleeps:
            return f"{model.name} was not loaded so that it can sleep; give it `idle_sleep_s`"
        if self.tier not in ("resident", "asleep", "leaving"):
            tier = tier_text(self.tier)
            return f"{model.name} is {tier}; only a model that is loaded can be put to sleep"
        return ""

    def drop_request(self) -> None:
        """Drop an operator's request that cannot be met."""
        self.requested, self._asked_at = "", None

    def forget_met_request(self) -> None:
        """Forget an operator's request that has been met."""
        if HAS.get(self.requested) == self.tier:
            self.requested = ""
        if self.tier == "resident":
            self._asked_at = None  # also if it was loaded before the request

    # ---- queries

    def load_reason(self, now: float) -> StartReason:
        """Return who wants it loaded, and since when."""
        if self.waiting_since is not None and not self.requested:
            return StartReason("request", self.waiting_since)
        asked_at = now if self._asked_at is None else self._asked_at
        return StartReason("operator" if self.requested else "request", asked_at)

    @property
    def is_away(self) -> bool:
        return self.tier in ("stopped", "asleep")

    @property
    def comes_and_goes(self) -> bool:
        model = self.deployment.model
        idles = model.idle_sleep_s is not None or model.idle_unload_s is not None
        return model.load != "on_start" or idles or self._touched

    @property
    def _mode(self) -> LoadMode:
        return "manual" if self._held else self.deployment.model.load

    def facts(
        self,
        claim: Mapping[str, int],
        asleep: Mapping[str, int],
        lacks: Mapping[str, int] = NOTHING,
    ) -> PolicyInput:
        """Return the facts for the policy."""
        model, info = self.deployment.model, self.deployment.info
        waiting_since = self.waiting_since
        if self.tier == "stopped" and self._mode == "manual":
            waiting_since = None
        asked_at = None if self.deployment.left_out else self._asked_at
        since = [at for at in (waiting_since, asked_at) if at is not None]
        sleeps = model.idle_sleep_s is not None or self.requested == "sleep"
        able = info is not None and info.sleeps and sleeps
        return PolicyInput(
            name=model.name,
            load=model.load,
            tier=self.tier,
            claim=claim,
            asleep=asleep,
            can_sleep=able and self._now >= self._sleepless_until,
            falls_asleep=self.task is not None and self._doing == "sleep",
            since=self.since,
            lacks=lacks,
            waiting_since=min(since, default=None),
            busy=self._busy,
            used_at=self._used_at,
            load_s=self._load_s,
            wake_s=self._load_s * _WAKES_IN if self._wake_s is None else self._wake_s,
            stay_s=self._stay_s,
            told_at=self._told_at,
            idle_sleep_s=model.idle_sleep_s,
            idle_unload_s=model.idle_unload_s,
            requested=self.requested if self.requested in ("unload", "sleep") else "",
        )

    def residence(
        self, waits: str, *, halted: bool, for_operators: bool = False
    ) -> ResidencyStatus:
        """Return the residency for gateways. At shutdown no request waits for a load.

        Operators get the configured load mode, and at shutdown whether the model has stopped.
        """
        model = self.deployment.model
        mode = model.load if for_operators else self._mode
        limits = [limit for limit in (model.idle_sleep_s, model.idle_unload_s) if limit is not None]
        stays_s = min(limits, default=None) if self._stay_s is None else self._stay_s
        if halted and not self._will_serve():
            ended = {replica.state for replica in self.deployment.replicas} <= {"stopped", "failed"}
            tier: Residency = "stopped" if ended else "leaving"
            return ResidencyStatus(
                mode, tier if for_operators else "failed", "servekit is shutting down", stays_s
            )
        return ResidencyStatus(mode, self.tier, waits or self.reason, stays_s)

    def _will_serve(self) -> bool:
        """Return whether it will be ready without a new start or an eviction."""
        return self.deployment.wanted and any(
            replica.state == "ready" or (replica.state in _COMING and not replica.gpu.lacking)
            for replica in self.deployment.living
        )

    def detailed(self, shown: ResidencyStatus, facts: PolicyInput, now: float) -> ResidencyStatus:
        """Return the residency with more details for operators."""
        return replace(
            shown,
            idle_s=round(facts.quiet_s(now), 1),
            leaves_in_s=policy.leaves_in_s(facts, now),
            waiting=self.waiting,
        )


#: The tier that fulfils each request of an operator.
HAS: Mapping[str, Residency] = {
    "load": "resident",
    "wake": "resident",
    "unload": "stopped",
    "sleep": "asleep",
}
