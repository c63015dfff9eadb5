"""Requests in a worker, from gateway to engine and back, with one message per engine step.

All of this runs on the worker's event loop; only `emit` may be called from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.engines.api.base import (
    Decoder,
    EmbedJob,
    Engine,
    Job,
    SpeechJob,
    StepOutput,
)
from servekit.engines.api.text_engine import TextEngine, TextJob, TextOutput
from servekit.errors import (
    EngineFailed,
    ModelChanged,
    ModelNotFound,
    RequestError,
    Unsupported,
    WireError,
    WorkerLost,
)
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import (
    Cancelled,
    Delta,
    GatewayToWorker,
    Generate,
    ModelInfo,
    Prompt,
)
from servekit.protocol.transport.connection import Connection
from servekit.worker.detokenizer import CountedText, TextStream
from servekit.worker.gateway_connection import GatewayConnection
from servekit.worker.isolation_queue import IsolationQueue, QueuedRequest
from servekit.worker.output_state import (
    OutputState,
    ScoredTask,
    SilentTask,
    SpeechTask,
    Stopwatch,
    TextTask,
    find_failure,
)
from servekit.worker.preparation.request_preparation import (
    Prepared,
    RequestPreparer,
    completion_limit,
    limit_of_continuation,
)
from servekit.worker.preparation.request_validation import check_request, check_text
from servekit.worker.slot_lending import Lending

log: Any = structlog.get_logger("servekit.worker")

#: How long a cancelled request may remain in the current step, where it can still kill the worker.
STEP_S = 0.1
#: How long gateways may take to read the output that preceded the engine's death.
LAST_WORDS_S = 1.0
#: The equivalent of STEP_S when the engine is idle: a step that began with the request may be long.
IDLE_S = 1.0
#: Last tokens of a prompt that are decoded before the tokens that follow it: enough for some text.
_TOKENS_BEFORE = 8
#: Number of adapter requests recorded before ended ones are pruned.
ADAPTED = 256


class Runner:
    """All requests of this worker. After a drain, `on_idle` is called once all output is sent."""

    def __init__(self, engine: Engine, info: ModelInfo, on_idle: Callable[[], None]) -> None:
        self.engine = engine
        self.info = info
        self._speaks = engine if isinstance(engine, TextEngine) else None
        self.loop = asyncio.get_running_loop()
        self.peers: set[GatewayConnection] = set()
        self.ward = IsolationQueue(self)
        self.lending = Lending(self)
        self.draining = False
        self.dead = False  # the engine has died
        self.asleep = False  # set before the engine sleeps
        self.engine_turn = asyncio.Lock()  # held while the engine is changed outside its jobs
        # Adapters that take requests, with the context tokens that their virtual tokens use.
        self.adapters = {adapter.name: adapter.virtual_tokens for adapter in info.adapters}
        self.closing_adapter = ""  # takes no new requests, but goes on with those that began
        self.portable = False  # makes generations comparable across machines
        self._adapter_files: dict[str, str] = {}  # adapter name → identity of its files
        self._adapted: dict[int, str] = {}  # job id → adapter; ended jobs remain until pruned
        self._prune_at = ADAPTED
        self._on_idle = on_idle
        # Called with each gateway's name.
        self.on_greeting: Callable[[str], None] = lambda gateway: None
        # Called with the number of tokens and of ended requests of each engine step.
        self.on_step: Callable[[int, int], None] = lambda tokens, ends: None
        self._leaving: asyncio.Task[None] | None = None
        self._tasks: dict[int, OutputState] = {}  # job id → task
        self._next_job = 0
        most = engine.spec.sampling.get("max_tokens")
        self._default_max_tokens = None if most is None else int(most)
        self._stopwatch = Stopwatch()
        self._intake = RequestPreparer(engine, info, self._context_tokens)
        self._encoding: set[asyncio.Task[None]] = set()
        self._going: dict[tuple[GatewayConnection, int], float] = {}  # time of cancellation
        self._watching: asyncio.Task[None] | None = None
        self._steps: deque[Sequence[StepOutput]] = deque()
        self._thread = threading.get_ident()
        self._stepped_at = 0.0  # by then no unproven cancelled request is in a step

    @property
    def busy(self) -> bool:
        return any(peer.jobs for peer in self.peers)

    def connect(self) -> Connection[GatewayToWorker]:
        """Return a new connection; used as factory by `protocol.transport.connection.listen_at`."""
        peer = GatewayConnection(self)
        self.peers.add(peer)
        return peer.connection

    # ---- from the gateway

    def accept(self, peer: GatewayConnection, request: Generate) -> None:
        if request.id in peer.jobs:
            raise WireError(f"request {request.id} is in flight already")
        stops = self.draining or self.asleep or self.engine.fatal is not None
        if stops and self._takes_no_more(request):
            peer.fail(request.id, WorkerLost("the worker is draining, asleep, or about to end"))
            return
        if request.adapter and (refusal := self._refuse_adapter(request)) is not None:
            peer.fail(request.id, refusal)
            return
        if request.continuation and (refusal := self._refuse_generation(request)) is not None:
            peer.fail(request.id, refusal)
            return
        self._next_job += 1
        peer.jobs[request.id] = self._next_job
        if self.lending.active:
            self.lending.change()
        if request.trace:
            self._stopwatch.accept(self._next_job)
        if request.adapter:
            self._note_adapter(self._next_job, request.adapter)
        if self.ward.closed or request.alone_until:
            self.ward.enqueue(QueuedRequest(peer, request, self._next_job))
        else:
            self.start(peer, request, self._next_job)

    def start(self, peer: GatewayConnection, request: Generate, job_id: int) -> None:
        """Begin to process a request, including the preparation of its prompt."""
        if self._speaks is None and self._intake.takes_long(request):
            task = self.loop.create_task(self._start_later(peer, request, job_id))
            self._encoding.add(task)  # the loop's reference is weak
            task.add_done_callback(self._encoding.discard)
            return
        try:
            if self._speaks is not None:
                self._ask_text_engine(self._speaks, peer, request, job_id)
            else:
                self._start_prepared(peer, request, job_id, self._intake.prepare(request))
        except Exception as error:
            self._refuse_request(peer, request, job_id, error)

    def _takes_no_more(self, request: Generate) -> bool:
        """Return whether a new request must be refused.

        A draining worker that still has work accepts continuations of requests that other workers
        began, because there may be no other worker for them.
        """
        begun = request.continuation is not None and self._leaving is None
        dead = self.engine.fatal is not None
        return dead or self.asleep or (self.draining and not begun)

    def _refuse_generation(self, request: Generate) -> RequestError | None:
        """Return the error for a continuation that a different model or adapter began."""
        began = request.continuation
        if began is None or began.generation == self.generation(request.adapter):
            return None
        return ModelChanged("this worker has loaded another model than the one that began")

    def generation(self, adapter: str) -> str:
        """Return the identity of the weights that serve an adapter, or the model for ""."""
        known = self.info.generation
        return f"{known}+{self._adapter_files.get(adapter, '')}" if adapter else known

    def identify_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Read and record the identity of the files that the adapters were loaded from."""
        for one in adapters:
            found = self.engine.identify_adapter(one, portable=self.portable)
            self._adapter_files[one.name] = found

    def _refuse_adapter(self, request: Generate) -> RequestError | None:
        """Return the error for a request that an adapter cannot serve.

        Tokenisation is the base model's for every adapter.
        """
        name = request.adapter
        if request.task in ("embed", "classify", "score", "transcribe"):
            return Unsupported(f"the adapter {name!r} only generates text", param="model")
        closed = name == self.closing_adapter and request.continuation is None
        if request.task == "generate" and (closed or name not in self.adapters):
            return ModelNotFound(f"the adapter {name!r} is not loaded any more", param="model")
        return None

    def uses(self, adapter: str) -> bool:
        """Return whether a request of the adapter is in flight."""
        self._prune_adapted()
        return adapter in self._adapted.values()

    def _note_adapter(self, job_id: int, adapter: str) -> None:
        """Record the adapter of a request.

        Jobs end in many ways, so ended ones are pruned from time to time: at most ADAPTED of them,
        or as many as run, are kept.
        """
        self._adapted[job_id] = adapter
        if len(self._adapted) > self._prune_at:
            self._prune_adapted()
            self._prune_at = max(ADAPTED, 2 * len(self._adapted))

    def _prune_adapted(self) -> None:
        alive = {job_id for peer in self.peers for job_id in peer.jobs.values()}
        self._adapted = {job: name for job, name in self._adapted.items() if job in alive}

    @property
    def is_settled(self) -> bool:
        """Return whether all running requests are proven harmless."""
        proven = not self._encoding and all(task.proven for task in self._tasks.values())
        return proven and self.loop.time() >= self._stepped_at

    def cleared(self, held: QueuedRequest) -> bool:
        """Return whether a suspect that was started need not run alone any more."""
        if held.peer.jobs.get(held.request.id) != held.job_id:
            # A cancelled request may still be in a step.
            return self.loop.time() >= self._stepped_at
        task = self._tasks.get(held.job_id)
        return task is not None and task.proven and held.request.alone_until == "proven"

    async def _start_later(self, peer: GatewayConnection, request: Generate, job_id: int) -> None:
        def wanted() -> bool:  # not cancelled meanwhile
            return peer.jobs.get(request.id) == job_id

        try:
            prepared = await self._intake.prepare_aside(request, wanted)
            if wanted():
                self._start_prepared(peer, request, job_id, prepared)
        except Exception as error:
            self._refuse_request(peer, request, job_id, error)

    def _refuse_request(
        self, peer: GatewayConnection, request: Generate, job_id: int, error: Exception
    ) -> None:
        """Fail a single request after an error.

        An error raised by an engine that has just died is replaced by WorkerLost, so that the
        request runs in another worker.
        """
        # A separate method: a frame that the traceback refers to would form a cycle with the error.
        if self.engine.fatal is not None and not _is_clients(error):
            error = WorkerLost("the engine died before it took this request")
        elif not isinstance(error, RequestError):
            log.exception("request_refused", request=request.request or request.id)
            error = EngineFailed("the engine failed to take this request")
        self._tasks.pop(job_id, None)
        self._stopwatch.drop_times(job_id)
        if peer.jobs.get(request.id) == job_id:
            peer.fail(request.id, error)
            self._check_idle()

    def _start_prepared(
        self, peer: GatewayConnection, request: Generate, job_id: int, prepared: Prepared
    ) -> None:
        match request.task:
            case "generate":
                self._submit_generation(peer, request, job_id, prepared)
            case "embed" | "classify" | "score":
                self._submit_inputs(peer, request, job_id, prepared)
            case "transcribe":
                self._submit_recording(peer, request, job_id, prepared)
            case _:
                self._answer_directly(peer, request, prepared)

    def _submit_generation(
        self, peer: GatewayConnection, request: Generate, job_id: int, prepared: Prepared
    ) -> None:
        ids, params, asked = prepared.ids, request.params, request.params.max_tokens
        limits = self._context_tokens(request), self._default_max_tokens
        if (began := request.continuation) is not None:
            limit = limit_of_continuation(len(ids), began, limits)
        else:
            limit = completion_limit(
                len(ids), asked, limits, params.clamp, self.engine.fills_context
            )
        if asked != limit:
            params = replace(params, max_tokens=limit)
        self._tasks[job_id] = task = self._begin_output(peer, request, ids)
        if params.echo or params.prompt_logprobs is not None:
            told = self._text_of(ids) if params.echo else ""
            task.prompt = Prompt(told)
        if len(request.emitted) >= limit or task.text.stopped:
            self._deliver_outputs([StepOutput(job_id, [], "length")], stepped=False)
            return
        if began is None:
            task.begins = ids, limit, request
        self._stopwatch.note_submit(job_id)
        job = Job(
            job_id, ids, params, request.emitted, prepared.constraint,
            request.adapter, prepared.banned, request.cache_salt, prepared.media,
        )  # fmt: skip
        self.engine.submit(job)

    def _ask_text_engine(
        self, engine: TextEngine, peer: GatewayConnection, request: Generate, job_id: int
    ) -> None:
        check_request(request, self.info, engine.spec)
        check_text(request, engine.spec)
        limit = request.params.max_tokens
        self._tasks[job_id] = task = TextTask(peer, request)
        if request.emitted and limit is not None and len(request.emitted) >= limit:
            count = len(request.emitted)
            last = TextOutput(job_id, [], "length", completion_tokens=count)
            self._deliver_outputs([last], stepped=False)
            return
        if request.continuation is None and engine.continues(request):
            task.begins = [], limit or 0, request
        self._stopwatch.note_submit(job_id)
        engine.ask(TextJob(job_id, request))

    def _begin_output(
        self, peer: GatewayConnection, request: Generate, prompt_ids: list[int]
    ) -> OutputState:
        params, decoder, count = request.params, self._make_decoder(request), len(prompt_ids)
        if request.messages is None or request.continues:
            # The text goes on in that of the prompt, so that a space at its beginning counts.
            decoder.push(prompt_ids[-_TOKENS_BEFORE:])
        if params.max_tokens == 0:
            return SilentTask(peer, request, count, TextStream(decoder, ()))
        if params.logprobs is None or not params.stop:
            text = TextStream(decoder, params.stop, request.sent_chars, params.include_stop)
            return OutputState(peer, request, count, text)
        counted = CountedText(decoder, params.stop, request.sent_chars, params.include_stop)
        return ScoredTask(peer, request, count, counted)

    def _text_of(self, ids: list[int]) -> str:
        decoder = self.engine.codec.decoder()
        return decoder.push(ids) + decoder.flush()

    def _submit_inputs(
        self, peer: GatewayConnection, request: Generate, job_id: int, prepared: Prepared
    ) -> None:
        count = sum(map(len, prepared.inputs))
        text = TextStream(self.engine.codec.decoder(), ())
        self._tasks[job_id] = OutputState(peer, request, count, text)
        self._stopwatch.note_submit(job_id)
        raw = request.pooling is not None and request.pooling.raw
        job = EmbedJob(job_id, prepared.inputs, prepared.types, raw)
        (self.engine.embed if request.task == "embed" else self.engine.classify)(job)

    def _submit_recording(
        self, peer: GatewayConnection, request: Generate, job_id: int, prepared: Prepared
    ) -> None:
        assert request.speech is not None
        self._tasks[job_id] = SpeechTask(peer, request)
        self._stopwatch.note_submit(job_id)
        job = SpeechJob(job_id, prepared.recording, request.params, request.speech)
        self.engine.transcribe(job)

    def _answer_directly(
        self, peer: GatewayConnection, request: Generate, prepared: Prepared
    ) -> None:
        """Answer a request that needs no engine."""
        ids = prepared.ids if request.task == "tokenize" else []
        peer.add_delta(Delta(request.id, prepared.text, ids, "stop", len(prepared.ids)))
        self._stopwatch.drop_times(peer.jobs.pop(request.id))
        self._check_idle()

    def _make_decoder(self, request: Generate) -> Decoder:
        """Return a request's decoder; in chats it keeps the markers that the gateway parses."""
        dialect = self.info.dialect
        if request.messages is None or not dialect.tokens:
            return self.engine.codec.decoder()
        reads = request.tools or dialect.think_end or dialect.tools == "harmony"
        return self.engine.codec.decoder([text for text, _ in dialect.tokens] if reads else ())

    def _context_tokens(self, request: Generate) -> int:
        """Return the number of tokens available to prompt and completion."""
        return self.info.max_context - self.adapters.get(request.adapter, 0)

    def cancel(self, peer: GatewayConnection, request_id: int, *, tells: bool = False) -> None:
        """Cancel a request; with `tells`, send Cancelled once it can do no harm in the engine."""
        if tells:
            self._going[peer, request_id] = self.loop.time()
            if self._watching is None:
                self._watching = self.loop.create_task(self._watch_going())
        job_id = peer.jobs.pop(request_id, None)
        if job_id is not None:
            self._stopwatch.drop_times(job_id)
            self._cancel_job(job_id, self._tasks.pop(job_id, None))
            self.ward.withdraw(job_id)
            self._check_idle()

    def _cancel_job(self, job_id: int, task: OutputState | None) -> None:
        self.engine.cancel(job_id)
        if task is not None and not task.proven:
            self._stepped_at = self.loop.time() + STEP_S

    async def _watch_going(self) -> None:
        """Tell gateways which of their cancelled requests have left the engine.

        The engine does not report this. The step that ran has ended once the engine has made
        progress since; an idle engine makes none, so a second is allowed.
        """
        while self._going:
            await asyncio.sleep(STEP_S)
            now_s, load = self.loop.time(), self.engine.load_now()
            idle = not load.running + load.waiting
            for (peer, request_id), since_s in list(self._going.items()):
                passed_s = now_s - since_s
                if passed_s < (IDLE_S if idle else max(STEP_S, load.progress_age_s)):
                    continue
                del self._going[peer, request_id]
                if peer in self.peers:
                    peer.connection.send(Cancelled(request_id))
        self._watching = None

    def extend_window(self, peer: GatewayConnection, request_id: int, size_bytes: int) -> None:
        """Allow a forwarded request to send more of its response."""
        job_id = peer.jobs.get(request_id)
        if job_id is not None and self._speaks is not None:
            self._speaks.extend_window(job_id, size_bytes)

    def cancel_peer(self, peer: GatewayConnection) -> None:
        """Cancel all requests of a gateway that has disconnected."""
        for request_id in list(peer.jobs):
            self.cancel(peer, request_id)
        self.peers.discard(peer)
        self.lending.remove_peer(peer)

    # ---- from the engine

    async def disconnect_all(self) -> None:
        """Send the dead engine's completed output, and disconnect all gateways.

        A gateway learns of a death from the end of its connection; requests that ran are then
        counted and continue in another worker. Requests that had not reached the engine are
        returned first, uncounted. Returns once the kernel has all data, or after LAST_WORDS_S.
        """
        self.dead = True
        self._drain_steps()
        peers = list(self.peers)
        for peer in peers:
            for request_id, job_id in list(peer.jobs.items()):
                if job_id not in self._tasks:
                    self.ward.withdraw(job_id)
                    peer.fail(request_id, WorkerLost("the engine died before this was its turn"))
            peer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.gather(*(peer.connection.closed for peer in peers))

    def emit(self, outputs: Sequence[StepOutput]) -> None:
        """Take the outputs of one engine step; callable from any thread."""
        if threading.get_ident() == self._thread:
            self._deliver_outputs(outputs)
            return
        self._steps.append(outputs)
        self.loop.call_soon_threadsafe(self._drain_steps)

    def _drain_steps(self) -> None:
        # Later outputs wait, so that pings and cancellations are served.
        for _ in range(len(self._steps)):
            self._deliver_outputs(self._steps.popleft())

    def _deliver_outputs(self, outputs: Sequence[StepOutput], *, stepped: bool = True) -> None:
        """Pass outputs on to their requests; `stepped` if an engine step produced them."""
        tasks, tokens, ends = self._tasks, 0, 0
        for output in outputs:
            tokens += len(output.token_ids)
            if output.finish is not None:
                ends += 1
            task = tasks.get(output.id)
            if task is None:
                continue  # cancelled while the step ran
            try:
                if not (task.plain and task.pass_on(output)):
                    self._send_output(task, output)
            except Exception:  # fails only this request
                log.exception("request_output_failed", request=task.id)
                self._fail_undecodable(output.id, task)
        if stepped:
            self.on_step(tokens, ends)
        if self.ward.closed:
            self.ward.wake()

    def _send_output(self, task: OutputState, output: StepOutput) -> None:
        if (error := find_failure(output)) is not None:
            self._end_request(output.id, task)
            task.peer.fail(task.id, error)
            return
        delta = task.delta(output)
        if task.prompt is not None:
            told = replace(task.prompt, tokens=output.prompt or [])
            delta, task.prompt = replace(delta, prompt=told), None
        if self._stopwatch.runs:
            delta = self._stopwatch.stamp(output.id, delta)
        if delta.finish is not None:
            self._end_request(output.id, task)
            if output.finish is None:
                self._cancel_job(output.id, task)  # ended by a stop string, not by the engine
        begun = delta.token_ids or delta.speech
        if delta.text or begun or delta.finish or delta.prompt or delta.http:
            if task.begins is not None and begun and delta.finish is None:
                delta = replace(delta, continuation=task.continuation(self.generation))
            task.peer.add_delta(delta)

    def _fail_undecodable(self, job_id: int, task: OutputState) -> None:
        """Fail a request whose tokens cannot be decoded."""
        if job_id in self._tasks:
            self._end_request(job_id, task)
            self._cancel_job(job_id, task)
            task.peer.fail(task.id, EngineFailed("the answer's tokens cannot be decoded"))

    def _end_request(self, job_id: int, task: OutputState) -> None:
        del self._tasks[job_id]
        self._stopwatch.drop_times(job_id)
        task.peer.jobs.pop(task.id, None)
        self._check_idle()

    def start_draining(self) -> None:
        """Take no more requests, and leave the gateways once none runs; see `on_idle`."""
        self.draining = True
        self._check_idle()

    def _check_idle(self) -> None:
        if self.lending.active:
            self.lending.change()
        if self.draining and not self.busy and self._leaving is None and not self.dead:
            self._leaving = self.loop.create_task(self._leave_gateways())

    async def _leave_gateways(self) -> None:
        """Close all connections, and report idleness once the last answers are sent."""
        peers = list(self.peers)
        for peer in peers:
            peer.close()
        await asyncio.gather(*(peer.connection.closed for peer in peers))
        self._on_idle()


def _is_clients(error: Exception) -> bool:
    """Return whether the request itself is invalid, for any worker."""
    return isinstance(error, RequestError) and error.status < 500
