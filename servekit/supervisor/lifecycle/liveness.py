"""Whether a worker has stopped making progress: a pure function; the clock is an argument.

    state      fact                                               verdict
    starting,  its load has reported nothing for > `load_s`       stalled
    loading    it owes an answer to a ping since > `load_s`       silent
    ready      its engine has work, no progress for > `stall_s`   stalled
               it owes an answer to a ping since > `stall_s`      silent
    asleep     it owes an answer to a ping since > `load_s`       silent: to copy gigabytes of
                                                                  weights may hold it up
    others     any                                                none: it is on its way out
    any        we slept ourselves, a moment ago                   none: its clock ran on, too

A worker that loads is allowed to be as silent as its load may take: an import may hold the GIL for
long. The age of the engine's progress is the engine loop's own, 0 when it has nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from servekit.protocol.messages import Pong, WorkerState

#: After a pause of our own (SIGSTOP, a frozen container), how long nobody is blamed.
FORGIVEN_S = 1.0
#: What a worker's KV cache has to fill or empty by, a share of it, for the gateways to be told:
#: each change of what they are told is sent to all of them, with all there is.
KV_STEP = 0.1
#: After it has loaded an adapter, until its pongs tell of the time since then.
PARDONED_S = 3.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds, by the model's section of the file."""

    stall_s: float
    load_s: float


class Liveness:
    """What is known of one worker's liveliness."""

    def __init__(self, now: float) -> None:
        self.last = Pong(0, 0.0, 0, 0, 0.0)
        self.kv_used = 0.0  # as told, within KV_STEP
        self._owed_since: float | None = None  # the oldest ping without an answer
        self._asked_at = now
        self._forgiven_until = now

    def asked(self, now: float) -> None:
        """A ping was sent."""
        self._asked_at = now
        if self._owed_since is None:
            self._owed_since = now

    def answered(self, pong: Pong) -> None:
        self.last = pong
        if abs(pong.kv_used - self.kv_used) >= KV_STEP or not pong.kv_used:
            self.kv_used = round(pong.kv_used, 2)
        self._owed_since = None

    def slept(self, now: float) -> None:
        """We have not run for a while ourselves: what is owed is owed from now on."""
        self._forgiven_until = now + FORGIVEN_S
        if self._owed_since is not None:
            self._owed_since = now

    def pardon(self, now: float) -> None:
        """It was busy with what we had told it to do: that it made no progress is no fault."""
        self.slept(now)
        self._forgiven_until = now + PARDONED_S

    def due(self, now: float, every_s: float) -> bool:
        """Whether it is time for the next ping."""
        return now - self._asked_at >= every_s

    def silent_s(self, now: float) -> float:
        return 0.0 if self._owed_since is None else now - self._owed_since

    def verdict(self, state: WorkerState, timeouts: Timeouts, now: float) -> str:
        """The reason to end it, as a sentence; "" while there is none."""
        if now < self._forgiven_until or state not in ("starting", "loading", "ready", "asleep"):
            return ""
        ready = state == "ready"
        limit_s = timeouts.stall_s if ready else timeouts.load_s
        if self.last.progress_age_s > limit_s and state != "asleep":
            what = f"with {_requests(self.last.running)} running" if ready else "while loading"
            return f"stalled: no progress for {self.last.progress_age_s:.1f} s {what}"
        silent_s = self.silent_s(now)
        if silent_s > limit_s:
            return f"silent: no answer to a ping for {silent_s:.1f} s" + (
                " while loading" if state in ("starting", "loading") else ""
            )
        return ""


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
