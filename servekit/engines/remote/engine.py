"""The engine for a remote endpoint with OpenAI's API: it has no weights and passes requests on.

    load    GET /models, for the model's properties, and a greeting: loaded once it was answered
    loop    an event loop in a thread of its own; a task for each request

All requests to the endpoint are streamed, even if the client does not stream, so that a
cancellation ends them there too. See `servekit.engines.remote` for the parts.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import structlog
import uvloop

from servekit.engines.api.base import Emit, Load, Report
from servekit.engines.api.text_engine import TextEngine, TextJob, TextOutput
from servekit.engines.remote.client import Address, Endpoint, Reply
from servekit.engines.remote.errors import Refused, response_refusal
from servekit.engines.remote.forwarding import (
    UsageReader,
    Window,
    build_forward_call,
    read_parts,
)
from servekit.engines.remote.handshake import EndpointFacts, greet_endpoint, make_greeting
from servekit.engines.remote.health import LOOK_EVERY_S, HealthWatcher
from servekit.engines.remote.rate_limiter import RateLimiter
from servekit.engines.remote.reader import drain_reply, read_reply
from servekit.engines.remote.request_builder import EndpointCall, EndpointTraits, build_call
from servekit.engines.remote.response_parser import ResponseParser
from servekit.engines.remote.schemas import parse_vectors
from servekit.errors import EndpointFailed, LoadError, RequestError
from servekit.protocol.messages import (
    Capability,
    Dialect,
    Generate,
    ModelInfo,
    Progress,
    WorkerSpec,
)
from servekit.protocol.tool_formats import FRAMED, THOUGHTS
from servekit.protocol.types import MODALITIES

log: Any = structlog.get_logger("servekit.engines.remote.engine")

#: Default context: prompt and completion together.
MAX_CONTEXT = 131_072
#: Longest plausible answer, in characters per token of the context. Longer ones are errors, and
#: would fill the memory while a slow client reads.
CHARS_PER_TOKEN = 64
_BEAT_S = 0.5
#: Bytes that are read of a list of models, or of an error, if only the status matters.
_LOOK_BYTES = 2**14
_CLOSE_S = 5.0
#: Capabilities of a generating endpoint; it refuses unsupported parameters itself.
_EMBEDS: tuple[Capability, ...] = ("embed",)
_GENERATES: tuple[Capability, ...] = (
    *("generate", "logprobs", "logit_bias", "penalties", "min_p", "grammar", "tools"),
)


class OpenAIEngine(TextEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        options: dict[str, Any] = spec.options
        self._options = options
        self._task = options.get("task", "generate")
        self._embeds = self._task == "embed"
        self._takes = tuple(one for one in MODALITIES if options.get(one, True))
        self._traits = EndpointTraits(
            *(spec.path or spec.model, spec.sampling),
            template_arguments=options.get("chat_template_kwargs", False),
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._windows: dict[int, Window] = {}  # of the forwarded requests among them
        self._outputs: list[TextOutput] = []
        self._thread: threading.Thread | None = None
        self._beat_s = time.monotonic()
        # httpx logs each request, and its logger may be set to log headers

    def load(self, report: Report) -> ModelInfo:
        report(Progress("greet"))
        self._address = _read_address(self._options)
        greeted = asyncio.run(
            greet_endpoint(self._address, self._traits, self._name, embeds=self._embeds)
        )
        self._traits = greeted.traits
        self._watch = HealthWatcher(lists=greeted.lists)
        context = self.spec.max_context or greeted.max_context or MAX_CONTEXT
        self._most_chars = context * CHARS_PER_TOKEN
        return self._describe_model(context, greeted)

    @property
    def _name(self) -> str:
        """Name of the environment variable with the key, for error messages."""
        return self._options.get("key_environment") or ""

    def _describe_model(self, context: int, greeted: EndpointFacts) -> ModelInfo:
        begin, end = THOUGHTS["think"]
        return ModelInfo(
            max_context=context,
            slots=self._options.get("slots", 32),
            chat=self._task == "generate",
            architecture="remote",
            dtype="none",
            device="remote",
            detail=f"passes requests on to {self._address.url}, for {self.spec.path}",
            resumes=False,
            serves=self._list_capabilities(),
            dialect=Dialect(tools=FRAMED, think_begin=begin, think_end=end),
            embedding_size=greeted.embedding_size,
        )

    def _list_capabilities(self) -> tuple[Capability, ...]:
        serves = {"generate": _GENERATES, "embed": _EMBEDS}.get(self._task, ())
        if self._task == "generate":
            serves = (*serves, *self._takes)
        return (*serves, "forward") if self._options.get("endpoints") else serves

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._loop = uvloop.new_event_loop()
        self._closing = asyncio.Event()
        options = self._options
        self._pace = RateLimiter(
            options.get("requests_per_minute"), options.get("tokens_per_minute")
        )
        self._endpoint = self._make_endpoint(self._pace)
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()

    def _make_endpoint(self, pace: RateLimiter) -> Endpoint:
        return Endpoint(self._address, pace)

    # ---- from the worker's thread

    def ask(self, job: TextJob) -> None:
        task = self._build_call(job.request)
        self._loop.call_soon_threadsafe(self._begin_task, job.id, task)

    def _build_call(self, request: Generate) -> EndpointCall:
        if request.task == "forward":
            return build_forward_call(request, self._traits.model)
        return build_call(request, self._traits)

    def extend_window(self, job_id: int, size_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._extend_window, job_id, size_bytes)

    def _extend_window(self, job_id: int, size_bytes: int) -> None:
        if (window := self._windows.get(job_id)) is not None:
            window.extend(size_bytes)

    def cancel(self, job_id: int) -> None:
        self._loop.call_soon_threadsafe(self._cancel_task, job_id)

    def load_now(self) -> Load:
        tasks = len(self._tasks)
        waiting = min(self._pace.waiting, tasks) if tasks else 0
        age_s = time.monotonic() - self._beat_s if tasks else 0.0
        return Load(tasks - waiting, waiting, 0.0, age_s)

    @property
    def trouble(self) -> str:
        return self._watch.trouble

    def close(self) -> None:
        if self._thread is None:
            return  # closed while it loaded
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_S)

    def _begin_task(self, job_id: int, task: EndpointCall) -> None:
        self._keep_task(job_id, self._loop.create_task(self._run_call(job_id, task)))

    def _keep_task(self, job_id: int, running: asyncio.Task[None]) -> None:
        self._tasks[job_id] = running
        running.add_done_callback(lambda _: self._tasks.pop(job_id, None))

    def _cancel_task(self, job_id: int) -> None:
        if (running := self._tasks.get(job_id)) is not None:
            running.cancel()

    # ---- the loop

    def _run_loop(self) -> None:
        try:
            self._loop.run_until_complete(self._run_until_closed())
        finally:
            self._loop.close()

    async def _run_until_closed(self) -> None:
        background = [
            asyncio.create_task(work) for work in (self._record_progress(), self._keep_watch())
        ]
        await self._closing.wait()
        running = [*background, *self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._endpoint.close()

    async def _record_progress(self) -> None:
        """Record progress while the loop runs, as the endpoint may take long to answer."""
        while True:
            self._note_progress()
            await asyncio.sleep(_BEAT_S)

    def _note_progress(self) -> None:
        self._beat_s = time.monotonic()

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S / 8)
            match self._watch.due_request(time.monotonic()):
                case "list":
                    await self._list_models()
                case "greet":
                    await self._send_greeting()

    async def _list_models(self) -> None:
        refusal: Refused | None = None
        try:
            status, body = await self._endpoint.get("/models", _LOOK_BYTES)
            refusal = None if status == 200 else response_refusal(status, {}, body)
        except Refused as error:
            refusal = error
        self._watch.listed(refusal, time.monotonic())

    async def _send_greeting(self) -> None:
        task = make_greeting(self._traits, embeds=self._embeds)
        try:
            async with self._endpoint.send_call(task, patient=False):
                self._watch.answered(time.monotonic())
        except Refused as refusal:
            self._watch.refused(refusal, time.monotonic())
            self._watch.greeted_in_vain()

    # ---- one request

    async def _run_call(self, job_id: int, task: EndpointCall) -> None:
        failure: RequestError
        try:
            # while the endpoint is in trouble, retries are pointless
            async with self._endpoint.send_call(task, patient=not self.trouble) as reply:
                self._watch.answered(time.monotonic())
                if task.request.task == "forward":
                    await self._forward_response(job_id, reply)
                elif self._embeds:
                    await self._embed_inputs(job_id, task, reply)
                else:
                    await self._stream_answer(job_id, task, reply)
            return
        except Refused as refusal:
            self._watch.refused(refusal, time.monotonic())
            failure = refusal.error
        except RequestError as error:
            failure = error
        except Exception:
            log.exception("endpoint_request_failed")
            failure = EndpointFailed("the request to the endpoint failed; see the logs")
        if not await self._is_lost(failure):
            self._queue_output(TextOutput(job_id, [], failure=failure))

    async def _is_lost(self, failure: RequestError) -> bool:
        """Return whether a request failed because the engine has died, and goes on elsewhere."""
        return False

    async def _stream_answer(self, job_id: int, task: EndpointCall, reply: Reply) -> None:
        answer = ResponseParser(task.request, task.prompt_tokens, self._most_chars)

        def queue_piece() -> None:
            if not answer.empty:
                self._queue_output(answer.piece(job_id))

        await read_reply(reply, answer, queue_piece)
        self._pace.correct_estimate(reply.sent, answer.prompt_tokens + answer.completion_tokens)
        self._queue_output(answer.piece(job_id, last=True))
        await drain_reply(reply)

    async def _embed_inputs(self, job_id: int, task: EndpointCall, reply: Reply) -> None:
        found, used = parse_vectors(await reply.read_all(), len(task.request.inputs))
        tokens = task.prompt_tokens if used is None else used
        self._pace.correct_estimate(reply.sent, tokens)
        self._queue_output(TextOutput(job_id, [], "stop", vectors=found, prompt_tokens=tokens))

    async def _forward_response(self, job_id: int, reply: Reply) -> None:
        self._windows[job_id] = window = Window()
        usage = UsageReader(reply.kind)
        try:
            async for part in read_parts(reply, window):
                usage.note_piece(part.data)
                self._queue_output(TextOutput(job_id, [], http=part))
        finally:
            del self._windows[job_id]
        prompt, completion = usage.count_tokens()
        self._pace.correct_estimate(reply.sent, prompt + completion)
        last = TextOutput(job_id, [], "stop", prompt_tokens=prompt, completion_tokens=completion)
        self._queue_output(last)

    def _queue_output(self, output: TextOutput) -> None:
        """Emit an output together with the others of this tick of the event loop."""
        if not self._outputs:
            self._loop.call_soon(self._emit_all)
        self._outputs.append(output)

    def _emit_all(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._emit(outputs)


def _read_address(options: dict[str, Any]) -> Address:
    """Return the configured address. Raises LoadError without a key that can be sent."""
    key, name = "", options.get("key_environment")
    if name is not None:
        key = os.environ.get(name, "").strip()
        if not key:
            raise LoadError(f"the variable {name}, which holds the key to it, is not set")
        if not (key.isascii() and key.isprintable()):  # httpx would quote it in its error
            raise LoadError(
                f"the variable {name}, which holds the key to it, is more than a line of ASCII"
            )
    return Address(
        url=options["url"].rstrip("/"),
        key=key,
        headers=options.get("headers", {}),
        slots=options.get("slots", 32),
        connect_timeout_s=options.get("connect_timeout_s", 10.0),
        first_byte_timeout_s=options.get("first_byte_timeout_s", 120.0),
        silence_timeout_s=options.get("silence_timeout_s", 120.0),
        retries=options.get("retries", 4),
    )
