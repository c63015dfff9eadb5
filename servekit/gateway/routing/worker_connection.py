"""The gateway's connections to workers: one per replica that the supervisor reports as ready.

The connection is the lease: a worker that has sent its greeting is routable, EOF is its death, and
its calls in flight go back to the router at that moment.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from servekit.errors import (
    REQUEST_ERRORS,
    ContextLengthExceeded,
    ModelChanged,
    RequestError,
    WireError,
    WorkerLost,
)
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.step_delivery import feed_step
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import (
    PROTOCOL,
    Body,
    Borrow,
    Cancel,
    Cancelled,
    Continuation,
    DeltaBatch,
    Failed,
    Hello,
    IsolationEnded,
    IsolationStarted,
    Lent,
    ModelInfo,
    ReplicaStatus,
    TokenBatch,
    WindowUpdate,
    WorkerToGateway,
)
from servekit.protocol.transport.address import is_tcp
from servekit.protocol.transport.connection import LOST_S, Connection, dial_address
from servekit.protocol.transport.tls import HUNG_UP, NotTrusted

if TYPE_CHECKING:
    from servekit.gateway.routing.balancing.load_balancer import Account
    from servekit.gateway.routing.router import Router
    from servekit.protocol.transport.certificate_holder import CertificateHolder

log: Any = structlog.get_logger("servekit.gateway")

#: Interval between attempts to connect to a worker.
REDIAL_S = 0.05
#: Longest interval for a worker on another machine, where each attempt may cost a TLS handshake.
_REDIAL_AT_MOST_S = 1.0
#: Cancelled calls that are kept until their worker has confirmed the cancellation.
_MOST_CANCELLED = 256
#: Limit of the requests of a dead worker that the log names.
_NAMED = 16


class Reach(NamedTuple):
    """A gateway's settings to reach workers on other machines."""

    identity: CertificateHolder | None = None
    lost_s: float = LOST_S  # silence after which a worker counts as lost


#: Settings of a gateway whose workers are all on its own machine.
NEARBY = Reach()


def base_generation(began: Continuation) -> str:
    """Return the model's generation without the adapter's part."""
    return began.generation.partition("+")[0]


class WorkerConnection:
    """The connection to one worker. `credits` is the number of calls that may be sent now.

    This gateway has its share of the worker's slots. While calls wait, the worker also lends it
    slots that other gateways do not use.
    """

    def __init__(self, owner: Router, model: str, status: ReplicaStatus, share: int) -> None:
        self.owner = owner
        self.model = model
        self.name = status.name
        self.socket = status.socket
        self.info: ModelInfo | None = None
        self.calls: dict[int, InflightRequest] = {}
        self._cancelled: dict[
            int, InflightRequest
        ] = {}  # unconfirmed; may still be in the engine, and kill it
        self.wanted = True  # False: no new calls, but those in flight may finish
        self.alone: int | None = None  # isolated suspect: our wire id, or 0 for another gateway's
        self._asked = 0  # wire id of a sent suspect that waits for isolation
        self.resumes = True  # its engine can continue the answers of other workers
        self.refuses = False  # draining: it has refused a call, and will refuse continuations
        self.share = share  # number of gateways that share the worker's slots
        self.borrows = False  # we have asked for more than our share
        self._lent = 0  # slots beyond our share
        self._contested = False  # other gateways borrow, too
        self.last_id = 0  # wire id of the last call that was sent
        self.account: Account | None = None  # its load; only for models with several replicas
        self._open_slots = 0  # for ordinary calls
        self._connection: Connection[WorkerToGateway] | None = None
        self._redial_s = REDIAL_S
        self._unreached = ""  # the last logged error of an attempt to connect
        self._bodies: set[asyncio.Task[None]] = set()  # being sent
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    # ---- routing

    @property
    def credits(self) -> int:
        """Return how many calls may be sent now; 0 or less while not routable, or held."""
        return self._open_slots - len(self.calls)

    @property
    def routable(self) -> bool:
        return self.info is not None and self.wanted

    @property
    def has_room(self) -> bool:
        """Return whether a slot is free, even while the worker is held."""
        return len(self.calls) < self._slots()

    @property
    def held(self) -> bool:
        """Return whether the worker starts no calls, because a suspect is or will be isolated."""
        return self.alone is not None or self._asked > 0

    def can_run(self, call: InflightRequest) -> bool:
        """Return whether the worker is connected and, for a started answer, of its generation."""
        if self.info is None or self.refuses:
            return False
        began = call.continuation
        return began is None or self.info.generation == base_generation(began)

    def has_slot_for(self, call: InflightRequest) -> bool:
        """Return whether a call that the worker `can_run` may be sent now.

        A draining worker still accepts continuations, because no other worker of its generation may
        be left.
        """
        if self.wanted:
            return self.credits > 0
        begun = call.continuation is not None and not call.alone_until
        return begun and self.info is not None and len(self.calls) < self.info.slots

    def was_running(self, call: InflightRequest) -> bool:
        """Return whether an unproven call was running and not held; see `retry_policy`."""
        return self.alone == call.wire_id if call.alone_until else self.alone is None

    def set_share(self, share: int) -> None:
        """Set the number of gateways that share the worker's slots."""
        if share != self.share:
            self.share = share
            self._return_lent_slots()
        self._renew()

    def _slots(self) -> int:
        if self.info is None or not self.wanted:
            return 0
        return self._own_slots(self.info) + self._lent

    def _own_slots(self, info: ModelInfo) -> int:
        return max(1, info.slots // self.share)

    def borrow(self) -> None:
        """Ask for slots that other gateways do not use, because calls wait without room."""
        if self.share > 1 and not self.borrows and self.info is not None:
            self.borrows = True
            self._tell_share(self._own_slots(self.info))

    def return_lent_slots(self) -> None:
        """Return lent slots once a slot of our share is free, or others borrow; called when no call
        waits.

        A gateway that borrows does not lend, and others may wait for what it does not use.
        """
        if self.info is None or self._contested or len(self.calls) < self._own_slots(self.info):
            self._return_lent_slots()

    def _return_lent_slots(self) -> None:
        """Return all lent slots."""
        if self.borrows:
            self.borrows, self._lent = False, 0
            self._renew()
            self._tell_share(0)

    def _tell_share(self, slots: int) -> None:
        if self._connection is not None:
            self._connection.send(Borrow(slots))

    def _on_lent(self, message: Lent) -> None:
        if self.borrows:  # else the answer is to an earlier request
            self._lent, self._contested = message.slots, message.contested
            self._renew()
            self.owner.on_free(self)

    def _renew(self) -> None:
        self._open_slots = 0 if self.held or self._crowded else self._slots()

    @property
    def _crowded(self) -> bool:
        """Return whether a long message is still unsent; new calls go elsewhere meanwhile."""
        return self._connection is not None and self._connection.crowded

    def _on_writable(self) -> None:
        self._renew()
        self.owner.on_free(self)

    def send_call(self, call: InflightRequest) -> None:
        """Send a call to this worker; the caller has checked `credits`."""
        assert self._connection is not None
        self.last_id += 1
        self.calls[self.last_id] = call
        call.replica = self
        if call.alone_until:
            self._asked = self.last_id
            self._renew()
        try:
            self._connection.send(call.request(self.last_id))
            if len(call.body) > PIECE_BYTES:
                self._start_body(call)
        except (OverflowError, RecursionError, ValueError, WireError) as error:
            said = f"the request holds a value that cannot be passed on: {error}"
            failed = Failed(self.last_id, RequestError.code, said)
            asyncio.get_running_loop().call_soon(self._on_failed, failed)
        if self._connection.crowded:
            self._renew()

    def _start_body(self, call: InflightRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._send_body(call, self.last_id))
        self._bodies.add(task)
        task.add_done_callback(self._bodies.discard)

    async def _send_body(self, call: InflightRequest, wire_id: int) -> None:
        """Send the rest of a body in pieces, each once the worker has read the one before."""
        body, connection = memoryview(call.body), self._connection
        for at in range(PIECE_BYTES, len(body), PIECE_BYTES):
            if connection is None or not await connection.drained():
                return
            if self.calls.get(wire_id) is not call:
                return
            connection.send(Body(wire_id, bytes(body[at : at + PIECE_BYTES])))

    def extend_window(self, call: InflightRequest, size_bytes: int) -> None:
        """Allow the worker to send more of a forwarded response, whose client has read so much."""
        if self._connection is not None:
            self._connection.send(WindowUpdate(call.wire_id, size_bytes))

    def cancel_call(self, call: InflightRequest) -> None:
        """Cancel a call that runs here; its slot is free at once."""
        if self._forget(call.wire_id) is not None and self._connection is not None:
            harmless = call.proven
            self._connection.send(Cancel(call.wire_id, not harmless))
            if not harmless:
                self._cancelled[call.wire_id] = call
                if len(self._cancelled) > _MOST_CANCELLED:
                    del self._cancelled[next(iter(self._cancelled))]
        self._waits_no_more(call.wire_id)
        call.replica = None
        self._close_if_idle()

    def take_cancelled(self) -> list[InflightRequest]:
        """Remove and return the cancelled calls that may have been running when the worker died."""
        calls = list(self._cancelled.values())
        self._cancelled.clear()
        return calls

    def _forget(self, wire_id: int) -> InflightRequest | None:
        """Remove a call, for whatever reason, and return it; None if it is not here."""
        call = self.calls.pop(wire_id, None)
        if call is not None and self.account is not None:
            self.account.remove_call(wire_id, call)
        return call

    def _waits_no_more(self, wire_id: int) -> None:
        if self._asked == wire_id:
            self._asked = 0
            self._renew()

    def retire(self) -> None:
        """Stop sending new calls; the connection closes once those in flight are done."""
        self.wanted = False
        self._renew()
        self._dialling.cancel()
        self._close_if_idle()

    def undo_retire(self) -> bool:
        """Undo `retire`; return False if the connection is closed, or about to be."""
        if self.calls:
            self.wanted, self.refuses = True, False
            self._renew()
        return self.wanted

    def _close_if_idle(self) -> None:
        idle = not self.calls and not self._cancelled  # a death by a cancelled call must be seen
        if idle and not self.wanted and self._connection is not None:
            self._connection.close()

    # ---- the connection

    async def _dial(self, after_s: float = 0.0) -> None:
        reach = self.owner.reach
        while self.wanted:
            if after_s:
                await asyncio.sleep(after_s)
            try:
                self._connection = await dial_address(
                    self.socket, self._factory, reach.identity, lost_s=reach.lost_s
                )
            except OSError as error:
                after_s = self._after_failure(error)  # if it died, the supervisor will report it
                continue
            self._connection.on_writable = self._on_writable
            self._connection.send(Hello(PROTOCOL, "gateway", self.owner.name))
            return

    def _after_failure(self, error: Exception) -> float:
        """Return the delay before the next attempt to connect."""
        if not is_tcp(self.socket):
            return REDIAL_S
        if self._unreached != str(error):
            self._unreached = str(error)
            log.warning("worker_unreachable", worker=self.name, error=self._unreached)
        after_s, self._redial_s = self._redial_s, min(2 * self._redial_s, _REDIAL_AT_MOST_S)
        return after_s

    def _factory(self) -> Connection[WorkerToGateway]:
        return Connection(WorkerToGateway, self._on_message, self._on_close)

    def _on_message(self, message: WorkerToGateway) -> None:
        if isinstance(message, TokenBatch):
            feed_step(self.calls, message)
        elif isinstance(message, DeltaBatch):
            self._on_tokens(message)
        elif isinstance(message, Failed):
            self._on_failed(message)
        elif isinstance(message, IsolationStarted):
            self._on_alone(message.id)
        elif isinstance(message, IsolationEnded):
            self._on_alone(None)
        elif isinstance(message, Lent):
            self._on_lent(message)
        elif isinstance(message, Cancelled):
            self._cancelled.pop(message.id, None)
            self._close_if_idle()
        else:
            if is_tcp(self.socket) and self._connection is not None:
                self._connection.allow()
                self._redial_s, self._unreached = REDIAL_S, ""
            self.alone, self._asked = None, 0
            self.info = message.info
            self.resumes = message.info is None or message.info.resumes
            self._renew()
            log.info("worker_connected", worker=self.name)
            self.owner.on_free(self)

    def _on_alone(self, wire_id: int | None) -> None:
        self.alone = wire_id
        if self._asked == wire_id:
            self._asked = 0
        self._renew()
        self.owner.on_free(self)  # dispatch the next suspect, or all waiting calls

    def _on_tokens(self, message: DeltaBatch) -> None:
        freed = False
        for delta in message.deltas:
            call = self.calls.get(delta.id)
            if call is None:
                continue  # cancelled meanwhile
            call.feed(delta)
            if delta.finish is not None:
                self._forget(delta.id)
                call.replica = None
                self.owner.on_ended(call)
                freed = True
        if freed:
            self._after_free()

    def _on_failed(self, message: Failed) -> None:
        call = self._forget(message.id)
        if call is None:
            return
        call.replica = None
        self._waits_no_more(message.id)
        kind = REQUEST_ERRORS.get(message.code, RequestError)
        if kind is WorkerLost:  # the worker is draining; the call is fine
            self.wanted, self.refuses = False, True
            self._renew()
            self.owner.on_returned(self, call)
        elif kind is ModelChanged:
            self.owner.on_changed(self, call)
        elif kind is ContextLengthExceeded and self.owner.has_larger(self, call):
            self.owner.on_returned(self, call)
        else:
            self.owner.on_ended(call)
            after_s = message.retry_after_s
            call.fail(kind(message.message, param=message.param, retry_after_s=after_s))
        self._after_free()

    def _after_free(self) -> None:
        self.owner.on_free(self)
        self._close_if_idle()

    def _on_close(self, error: Exception | None) -> None:
        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()  # uvloop's clock has a resolution of 1 ms
        was, self.info, self._connection = self.info, None, None
        self.borrows, self._lent = False, 0
        calls = list(self.calls.values())
        for wire_id in list(self.calls):
            self._forget(wire_id)
        self._renew()
        for call in calls:
            call.replica = None
        if self.wanted:
            failed = was is None  # before its greeting
            after_s = self._after_failure(error or NotTrusted(HUNG_UP)) if failed else 0.0
            self._dialling = loop.create_task(self._dial(after_s))
        self.owner.on_lost(self, calls)
        if was is not None and (self.wanted or calls):
            sent = sum(call.replica is not None for call in calls)
            took_ms = round(1000 * (time.perf_counter() - began_s), 2)
            log.warning(
                "worker_lost", worker=self.name, error=str(error or "EOF"),
                in_flight=len(calls), sent_elsewhere=sent, took_ms=took_ms,
                requests=[call.origin.name for call in calls[:_NAMED] if call.origin is not None],
            )  # fmt: skip
