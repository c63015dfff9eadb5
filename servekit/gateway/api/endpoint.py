"""POST endpoints: read a body, write an answer or an error of the API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

import structlog

from servekit.errors import ModelNotFound, ServekitError
from servekit.gateway.api.images import has_addresses, list_media
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.generation.generation import (
    Generation,
    GenerationRequest,
    open_generation,
)
from servekit.gateway.generation.stream_writer import ResponseEncoder, StreamWriter
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    Envelope,
    ErrorResponses,
    Receive,
    Scope,
    Send,
    api_key,
    read_body,
    send_json,
    session_of,
)
from servekit.gateway.http.request_context import INCOMPLETE, ORIGIN
from servekit.gateway.http.response import DisconnectWatcher, Endpoint, Response
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.router import IncompleteRequest, Router
from servekit.protocol.messages import Delta

log: Any = structlog.get_logger("servekit.gateway")

#: Parses a body and the client's key into a request and its answer format, or into the answer, or
#: what makes the answer.
ParseGeneration = Callable[
    [bytes, str], "tuple[GenerationRequest, ResponseEncoder] | bytes | Answer"
]
#: Makes an answer in JSON, or the events of a stream.
Answer = Callable[[], Coroutine[Any, Any, bytes | AsyncIterator[bytes]]]
ParseCalls = Callable[[bytes, str], tuple["Calls", Callable[[list[Delta]], bytes]]]
ParsePlain = Callable[[bytes], bytes]
OpenGeneration = Callable[[Router, GenerationRequest], Coroutine[Any, Any, Generation]]


async def open_completed(router: Router, request: GenerationRequest) -> Generation:
    """Return a `Generation` of a request that `complete_request` completes. Raises RequestError."""
    await complete_request(router, request)
    return await open_generation(router, request)


async def complete_request(router: Router, request: GenerationRequest) -> None:
    """Read the earlier messages of a request, and fetch the images of all messages.

    Raises RequestError, before anything is fetched if the model takes no images, or not from this
    key.
    """
    if request.complete is not None:
        await request.complete(request)
    rules = router.access.rules.fetch_images
    if rules.hosts and request.messages is not None and has_addresses(request.messages):
        from servekit.gateway.api.image_fetching import fetch_images

        route = router.find(request.model)
        router.access.require_model(route.status.name, base_of(route))
        router.check_media(route, list_media(request.messages))
        request.messages = await fetch_images(request.messages, rules, _name_client())


def _name_client() -> str:
    """Return the key that asks, where keys are needed, else the client's address."""
    if (caller := ACTING.get()) is not None:
        return f"key:{caller.rule.name}"
    origin = ORIGIN.get()
    return "" if origin is None else f"address:{origin.address}"


class GenerationEndpoint:
    """An endpoint whose answer is a generation, streamed or whole; `start_answer` is its `Handler`.

    `open_later`, if given, opens every generation. Otherwise one is opened at once, unless it has
    to be completed, or its model is loaded on demand and has never been loaded.
    """

    def __init__(
        self,
        router: Router,
        parse: ParseGeneration,
        open_later: OpenGeneration | None = None,
    ) -> None:
        self._router = router
        self._parse = parse
        self._open_later = open_later
        self._tasks: set[asyncio.Task[None]] = set()

    def start_answer(self, response: Response) -> None:
        """Start to answer. Raises ServekitError for a wrong request."""
        body, response.body = bytes(response.body), b""
        # where keys are required, the router sets the key's name
        key = "" if self._router.access.closed else api_key(response.headers)
        parsed = self._parse(body, key)
        size_bytes = len(body)
        del body  # otherwise the body stays in memory while the answer is generated
        if not isinstance(parsed, tuple):
            if isinstance(parsed, bytes):
                response.send_json(parsed)
            else:
                self._start(response, size_bytes, partial(self._send_later, response, parsed))
            return
        request, encoder = parsed
        if self._router.chooses:
            request.session = session_of(response.headers) or request.session
        if not self._opens_later(request):
            StreamWriter(response, Generation(self._router, request), encoder)
            return
        self._start(response, size_bytes, partial(self._begin, response, request, encoder))

    def _start(
        self, response: Response, size_bytes: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `work` in a task, which ends when the client is gone. Raises QueueFull."""
        context = copy_context()
        context.run(INCOMPLETE.set, True)

        def fail(error: ServekitError) -> None:
            response.send_error(error)
            task.cancel()

        self._router.hold_incomplete(request := IncompleteRequest(size_bytes, fail))
        answering = _answer_errors(response, work)
        task = asyncio.get_running_loop().create_task(answering, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._router.release_incomplete(request))
        response.on_gone = partial(_cancel, task)

    def _opens_later(self, request: GenerationRequest) -> bool:
        """Return whether to wait for the rest of the request, or for a model's first load."""
        if self._open_later is not None or request.complete is not None:
            return True
        if request.messages is None:
            return False
        if self._router.access.rules.fetch_images.hosts and has_addresses(request.messages):
            return True
        if not self._router.has_unknown:
            return False
        try:
            status = self._router.find(request.model).status
        except ModelNotFound:
            return False  # it is refused at once
        return status.info is None and status.residence is not None

    async def _send_later(self, response: Response, make_answer: Answer) -> None:
        answer = await make_answer()
        if isinstance(answer, bytes):
            response.send_json(answer)
            return
        events = await begin_stream(answer)
        response.begin_stream(EVENT_STREAM)
        # in a task of its own: the body, which this one counts, is gone
        task = asyncio.get_running_loop().create_task(
            _answer_errors(response, partial(_relay, response, events))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        response.on_gone = partial(_cancel, task)

    async def _begin(
        self, response: Response, request: GenerationRequest, encoder: ResponseEncoder
    ) -> None:
        request.began_s = time.monotonic()
        generation = await (self._open_later or open_completed)(self._router, request)
        StreamWriter(response, generation, encoder)


async def begin_stream(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first part of a stream, so that its errors come before it; return all parts."""
    first = await anext(events, b"")

    async def go_on() -> AsyncIterator[bytes]:
        yield first
        async for part in events:
            yield part

    return go_on()


async def _relay(response: Response, events: AsyncIterator[bytes]) -> None:
    """Write a stream while the client reads."""
    writable = asyncio.Event()
    response.on_writable = writable.set
    async for part in events:
        while not response.is_writable:
            writable.clear()
            await writable.wait()
        response.write(part)
    response.write(b"", last=True)


async def _answer_errors(response: Response, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        await work()
    except ServekitError as error:
        response.send_error(error)
    except Exception:
        log.exception("unexpected_error")
        response.send_error(ServekitError("an internal error; see the logs"))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class Calls(Protocol):
    """The calls of one HTTP request, which succeed or fail together."""

    def cancel(self) -> None: ...

    async def answers(self) -> list[Delta]: ...


class EndpointFactory:
    """Makes ASGI endpoints of one API, whose error format is `encode`."""

    def __init__(self, max_body_bytes: int, encode: Envelope) -> None:
        self._max_body_bytes = max_body_bytes
        self._encode = encode

    def calls(self, parse: ParseCalls) -> Endpoint:
        """Return an endpoint whose answer combines several calls, none of them streamed."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            async with ErrorResponses(send, self._encode):
                body = await read_body(scope, receive, self._max_body_bytes)
                asked, write = parse(body, api_key(dict(scope["headers"])))
                del body
                watch = DisconnectWatcher(asked, receive)
                try:
                    answers = await asked.answers()
                    # writing thousands of vectors would block the event loop, and all streams
                    await send_json(send, await asyncio.to_thread(write, answers))
                finally:
                    watch.stop_watching()
                    asked.cancel()

        return endpoint

    def plain(self, parse: ParsePlain) -> Endpoint:
        """Return an endpoint that the gateway answers by itself, without a worker."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            async with ErrorResponses(send, self._encode):
                await send_json(send, parse(await read_body(scope, receive, self._max_body_bytes)))

        return endpoint
