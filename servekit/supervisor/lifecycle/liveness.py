"""Liveness checks of a worker: a pure function; the clock is an argument.

    state      condition                                          verdict
    starting,  its load has reported nothing for > `load_s`       stalled
    loading    a ping is unanswered for > `load_s`                silent
    ready,     its engine has work, no progress for > `stall_s`   stalled
    asleep,    a ping is unanswered for > `stall_s`               silent
    draining
    others     any                                                none: it is ending
    any        the supervisor was suspended a moment ago          none: its clock ran on, too

A loading worker may be silent as long as its load may take: an import may hold the GIL for long.
Adapters, sleep and wake take a thread, beside which pings are answered.
The age of the engine's progress comes from the engine loop, and is 0 when it has nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from servekit.protocol.messages import Pong, WorkerState

#: The time without verdicts after the supervisor was suspended (SIGSTOP, a frozen container).
FORGIVEN_S = 1.0
#: The change of a worker's KV cache usage (a share) that the gateways are told of: each change is
#: sent to all of them, with the whole topology.
KV_STEP = 0.1
#: The time without verdicts after an adapter load, until pongs cover the time since then.
PARDONED_S = 3.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of the model's section of the configuration, in seconds.

    While it loads an adapter, its engine may make no progress for `load_s`.
    """

    stall_s: float
    load_s: float
    loads_adapter: bool = False


class Liveness:
    """The ping state and the last pong of one worker."""

    def __init__(self, now: float) -> None:
        self.last = Pong(0, 0.0, 0, 0, 0.0)
        self.kv_used = 0.0  # as the gateways know it, within KV_STEP
        self._owed_since: float | None = None  # the oldest ping without an answer
        self._asked_at = now
        self._forgiven_until = now

    def asked(self, now: float) -> None:
        """Record that a ping was sent."""
        self._asked_at = now
        if self._owed_since is None:
            self._owed_since = now

    def answered(self, pong: Pong) -> bool:
        """Record an answer; return whether it tells of more than the passage of time."""
        before, self.last = self.last, pong
        if abs(pong.kv_used - self.kv_used) >= KV_STEP or not pong.kv_used:
            self.kv_used = round(pong.kv_used, 2)
        self._owed_since = None
        return pong != replace(before, seq=pong.seq, progress_age_s=pong.progress_age_s)

    def restart_timers(self, now: float) -> None:
        """Restart the timers after a suspension of the supervisor; give no verdict for a while."""
        self._forgiven_until = now + FORGIVEN_S
        if self._owed_since is not None:
            self._owed_since = now

    def reset_deadline(self, now: float) -> None:
        """Restart the timers after work that we had ordered, which may stop progress."""
        self.restart_timers(now)
        self._forgiven_until = now + PARDONED_S

    def due(self, now: float, every_s: float) -> bool:
        """Return whether it is time for the next ping."""
        return now - self._asked_at >= every_s

    def silent_s(self, now: float) -> float:
        return 0.0 if self._owed_since is None else now - self._owed_since

    def verdict(self, state: WorkerState, timeouts: Timeouts, now: float) -> str:
        """Return the reason to end the worker, as a sentence; "" if there is none."""
        loads = state in ("starting", "loading")
        if now < self._forgiven_until or not (loads or state in ("ready", "asleep", "draining")):
            return ""
        limit_s = timeouts.load_s if loads else timeouts.stall_s
        step_s = max(limit_s, timeouts.load_s) if timeouts.loads_adapter else limit_s
        if self.last.progress_age_s > step_s:
            running = _count_requests(self.last.running)
            what = "while loading" if loads else f"with {running} running"
            return f"stalled: no progress for {self.last.progress_age_s:.1f} s {what}"
        silent_s = self.silent_s(now)
        if silent_s > limit_s:
            return f"silent: no answer to a ping for {silent_s:.1f} s" + (
                " while loading" if loads else ""
            )
        return ""


def _count_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
