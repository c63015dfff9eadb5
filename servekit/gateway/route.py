"""One model at this gateway: its queue, its replicas, and the suspects among its calls.

A suspect is a call that was running in two deaths in a row (`gateway.fate`). Suspects are tried
one at a time on one replica, the ward, where no other call is started meanwhile:

- The ward is an empty replica. While a worker is being replaced its successor is waited for: that
  keeps a suspect away from the streams under way elsewhere. Only where none is coming it is the
  replica with the least to do, once all that runs there is proven.
- The next suspect follows as soon as the one before is proven or done, so that a suspect holds
  the others up for as long as its first tokens take, not for all of its answer. If the ward dies
  then, all but the newest have shown that it wasn't they.
- Of several gateways each has a ward of its own, as far as there are replicas.
- When no suspect is left the ward is a replica like the others.
"""

from __future__ import annotations

from collections import deque

from servekit.errors import ModelUnavailable
from servekit.gateway.call import Call
from servekit.gateway.pace import Pace
from servekit.gateway.pool import Replica
from servekit.gateway.queue import FairQueue
from servekit.wire.messages import ModelStatus, ReplicaStatus

#: States of a worker that will, in all likelihood, serve soon, itself or its successor.
COMING = ("starting", "loading", "backoff", "stalled")


class Route:
    """One model: its status, its queue and its replicas."""

    def __init__(self, status: ModelStatus, index: int = 0) -> None:
        self.status = status
        self.gateways = 1  # that serve this model
        self._index = index  # of this one among them
        self.queue: FairQueue[Call] = FairQueue(status.max_queue)
        self.suspects: deque[Call] = deque()
        self.ward: Replica | None = None
        self.replicas: dict[str, Replica] = {}  # by socket: a new incarnation is a new replica
        self.followers: set[Call] = set()  # whose clients want to know their places
        self.pace = Pace()
        self.in_flight = 0
        self.was_ready = False
        self.removed = False  # from the configuration

    def set_status(self, status: ModelStatus, gateways: int) -> None:
        self.status = status
        self.gateways = gateways
        self.queue.limit = status.max_queue

    # ---- how it stands

    @property
    def ready(self) -> bool:
        """A request sent now can complete."""
        return any(replica.routable for replica in self.replicas.values())

    @property
    def running(self) -> int:
        return sum(len(replica.calls) for replica in self.replicas.values())

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.suspects)

    @property
    def hopeless(self) -> bool:
        """No worker serves, and none will."""
        return not self._states & {*COMING, "ready"}

    @property
    def _states(self) -> set[str]:
        return {replica.state for replica in self.status.replicas}

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the model serves, or did and will soon again."""
        if self.ready:
            return
        states = self._states
        if "ready" in states or (self.was_ready and states & {*COMING}):
            return  # it is being connected to, or replaced: the request waits for that
        raise ModelUnavailable(self._why(), retry_after_s=5.0, param="model")

    def unavailable(self) -> ModelUnavailable:
        """What those are told who wait in vain."""
        return ModelUnavailable(self._why(), retry_after_s=30.0, param="model")

    def _why(self) -> str:
        name = self.status.name
        if not self.hopeless:
            progress = "; ".join(sorted({describe(replica) for replica in self.status.replicas}))
            return f"the model {name!r} is not ready yet: {progress}"
        reasons = [replica.reason for replica in self.status.replicas if replica.reason]
        return f"the model {name!r} cannot serve: {reasons[0] if reasons else 'it is stopped'}"

    # ---- who runs next

    def best(self) -> Replica | None:
        """The replica with the most room, or None if all are full. Ties go to the first."""
        best, room = None, 0
        for replica in self.replicas.values():
            if replica.credits > room:
                best, room = replica, replica.credits
        return best

    def dispatch(self, replica: Replica) -> None:
        """A replica has room: give it what waits, the suspects first."""
        if self.suspects or self.ward is not None:
            self.serve_suspects()
        self._fill(replica)

    def dispatch_all(self) -> None:
        """As `dispatch`, for all replicas evenly: the one with the most room gets the next."""
        if self.suspects or self.ward is not None:
            self.serve_suspects()
        while len(self.queue) and (replica := self.best()) is not None:
            replica.run(self.queue.pop())

    def _fill(self, replica: Replica) -> None:
        while len(self.queue) and replica.credits > 0:
            replica.run(self.queue.pop())

    def serve_suspects(self) -> None:
        """Try the next suspect, if the one before is proven; open the ward after the last."""
        ward = self._find_ward()
        if ward is None or not ward.proven:
            return
        if not self.suspects:
            self._close_ward()
            self._fill(ward)
        elif ward.has_room:
            ward.run(self.suspects.popleft())

    def _find_ward(self) -> Replica | None:
        if self.ward is not None and not self.ward.routable:
            self._close_ward()  # it died, or retires
        if self.ward is None and self.suspects and (ward := self._choose_ward()) is not None:
            self.ward = ward
            ward.hold(True)
        return self.ward

    def _close_ward(self) -> None:
        if self.ward is not None:
            self.ward.hold(False)
            self.ward = None

    def _choose_ward(self) -> Replica | None:
        if self.gateways > 1 and (place := self._own_place()) is not None:
            return next((r for r in self.replicas.values() if r.routable and r.name == place), None)
        routable = [replica for replica in self.replicas.values() if replica.routable]
        best = min(routable, key=lambda replica: len(replica.calls), default=None)
        return None if best is None or (best.calls and self._recovering) else best

    def _own_place(self) -> str | None:
        """The replica on which this gateway tries its suspects, where others try theirs, too.

        Two gateways that chose the same one would take each other's innocents for the guilty.
        """
        names = sorted(r.name for r in self.status.replicas if r.state in ("ready", *COMING))
        return names[self._index % len(names)] if names else None

    @property
    def _recovering(self) -> bool:
        """Another replica, an empty one, is on its way."""
        dialling = any(r.wanted and not r.routable for r in self.replicas.values())
        return dialling or bool(self._states & {*COMING})

    # ---- what waits

    def order(self) -> list[Call]:
        """All calls that wait, in the order they will run."""
        return [*self.suspects, *self.queue.order()]

    def withdraw(self, call: Call) -> None:
        """Take a call out of what waits."""
        if call in self.suspects:
            self.suspects.remove(call)
        else:
            self.queue.remove(call)

    def position(self, call: Call) -> int | None:
        """How many calls are before this one; None once it runs."""
        return next((at for at, other in enumerate(self.order()) if other is call), None)

    def announce(self) -> bool:
        """Tell the followers their places where they changed; whether any are left."""
        places = {call: place for place, call in enumerate(self.order())}
        self.followers = {call for call in self.followers if call in places}
        for call in self.followers:
            if call.place != places[call]:
                call.tell(places[call])
        return bool(self.followers)


def describe(replica: ReplicaStatus) -> str:
    """A replica's state in a few words, with its progress or its reason."""
    progress = replica.progress
    if replica.state == "loading" and progress is not None:
        if progress.total:
            return f"{progress.phase} {100 * progress.done // progress.total} %"
        return progress.phase
    return f"{replica.state}: {replica.reason}" if replica.reason else replica.state
