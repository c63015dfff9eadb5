"""Workers that do what a test tells them, over the real wire; and a clock that can jump."""

from __future__ import annotations

import asyncio
from pathlib import Path

from servekit.errors import RequestError
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import (
    PROOF_TOKENS,
    PROTOCOL,
    Body,
    Borrow,
    Cancel,
    Delta,
    DeltaBatch,
    Failed,
    GatewayToWorker,
    Generate,
    Hello,
    IsolationEnded,
    IsolationStarted,
    ModelInfo,
    ReplicaStatus,
    WindowUpdate,
    WorkerState,
)
from servekit.protocol.transport.connection import Connection, listen_at


class WarpLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class CountedCall(InflightRequest):
    """A call that knows how often it has been ended, and objects to anything after that."""

    ends = 0

    def feed(self, delta: Delta) -> None:
        assert not self.done, "more of an answer that is over"
        self.ends += delta.finish is not None
        super().feed(delta)

    def fail(self, error: RequestError) -> None:
        assert not self.done, "it is over already"
        self.ends += 1
        super().fail(error)


def expected(request: Generate | InflightRequest) -> str:
    """The answer: the prompt over and over, a token for each character."""
    assert isinstance(request.prompt, str)
    assert request.params.max_tokens is not None
    size = len(request.prompt)
    return "".join(request.prompt[at % size] for at in range(request.params.max_tokens))


class ScriptedWorker:
    """Takes requests like any worker, and checks them; what comes back is the test's choice.

    Suspects are started alone, as `servekit.worker.isolation_queue` does it.
    """

    def __init__(self, path: Path, slots: int, *, resumes: bool = True) -> None:
        self.path = path
        self.state: WorkerState = "ready"
        self.draining = False
        self.alive = True
        self.jobs: dict[int, Generate] = {}
        self.line: list[Generate] = []  # not started, in the order in which they came
        self.alone = 0
        self.done: dict[int, int] = {}  # tokens by job
        self._info = ModelInfo(100, slots, True, "scripted", "none", "cpu", resumes=resumes)
        self.peers: list[Connection[GatewayToWorker]] = []

    async def start(self) -> None:
        self._server = await listen_at(self.path, self._connect)

    def _connect(self) -> Connection[GatewayToWorker]:
        peer: Connection[GatewayToWorker] = Connection(
            GatewayToWorker, lambda message: self._on_message(peer, message), lambda error: None
        )
        self.peers.append(peer)
        return peer

    def _on_message(self, peer: Connection[GatewayToWorker], message: GatewayToWorker) -> None:
        if isinstance(message, Hello):
            peer.send(Hello(PROTOCOL, "worker", self.path.stem, self._info))
        elif isinstance(message, Cancel):
            self.jobs.pop(message.id, None)
            self.line = [request for request in self.line if request.id != message.id]
            self._advance()
        elif isinstance(message, Borrow | Body | WindowUpdate):
            pass  # nobody has left anything to lend, and nothing is forwarded
        elif self.draining:
            peer.send(Failed(message.id, "worker_lost", "the worker is draining"))
        else:
            self._accept(message)

    def _accept(self, request: Generate) -> None:
        text = expected(request)
        assert "".join(map(chr, request.emitted)) == text[: len(request.emitted)]
        assert request.sent_chars == len(request.emitted) < len(text)
        assert request.id not in self.jobs
        self.line.append(request)
        assert len(self.jobs) + len(self.line) <= self._info.slots, "more than it has slots for"
        self._advance()

    def _advance(self) -> None:
        """Start what may be started."""
        while self._cleared(self.alone) and (self.line or self.alone):
            first = self.line[0] if self.line else None
            if first is not None and first.alone_until:
                if not all(map(self._proven, self.jobs)):
                    break
                self.alone = first.id
                self.peers[-1].send(IsolationStarted(first.id))
            elif self.alone:
                self.alone = 0
                self.peers[-1].send(IsolationEnded())
                continue
            request = self.line.pop(0)
            self.jobs[request.id] = request
            self.done[request.id] = len(request.emitted)

    def _proven(self, job: int) -> bool:
        return self.done[job] - len(self.jobs[job].emitted) >= PROOF_TOKENS

    def _cleared(self, job: int) -> bool:
        if (request := self.jobs.get(job)) is None:
            return True
        return request.alone_until == "proven" and self._proven(job)

    def generate(self, job: int, count: int) -> None:
        """Send the next tokens of a job, and its end with the last."""
        request, done = self.jobs[job], self.done[job]
        text = expected(request)
        new = text[done : done + count]
        self.done[job] = done = done + len(new)
        finish = "length" if done == len(text) else None
        if finish:
            del self.jobs[job]
        delta = Delta(job, new, list(map(ord, new)), finish, 7 if finish else 0, done)  # type: ignore[arg-type]
        self.peers[-1].send(DeltaBatch([delta]))
        self._advance()

    def refuse(self, job: int) -> None:
        del self.jobs[job]
        self.peers[-1].send(Failed(job, "engine_error", "it will not"))
        self._advance()

    def kill(self) -> None:
        """What SIGKILL looks like from a gateway; what it has sent before still arrives."""
        self.alive = False
        self._server.close()
        for peer in self.peers:
            peer.close()
        self.jobs.clear()
        self.line.clear()

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.path.stem, self.state, str(self.path), 1, "cpu")
