"""OpenAI's chat completions and completions: the hot routes, from the socket to the queue and back.

Nearly every request takes the fast path (`FastResponse`): no task of its own, and the answer is
written in the event-loop tick in which it arrives. Unusual HTTP (pipelined, HTTP/1.0, connection:
close, 100-continue) goes through ASGI, with the same answer. All waiting tokens of a stream leave
in one write and as one event: a client that keeps up gets one event for each engine step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.api.openai.generation_request import chat_ask, completion_ask
from servekit.gateway.api.openai.request import (
    Prompt,
    chat_messages,
    chat_sampling,
    check_prompt_logprobs,
    completion_prompts,
    completion_sampling,
)
from servekit.gateway.api.openai.response import ChatForm, CompletionForm
from servekit.gateway.api.openai.response_types import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    OpenAIError,
)
from servekit.gateway.api.openai.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    decode,
)
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.responder import (
    DisconnectWatcher,
    FastResponseAsgi,
    ResponseEncoder,
    respond,
)
from servekit.gateway.generation.generation import Generation, GenerationRequest, open_turn
from servekit.gateway.generation.openai_encoder import CHAT, COMPLETION, OpenAIEncoder, Shape
from servekit.gateway.generation.stream_writer import StreamWriter
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    SESSION,
    ClientGone,
    Receive,
    Scope,
    Send,
    api_key,
    envelope,
    read_body,
    send_error,
    send_json,
    session_of,
)
from servekit.gateway.http.end_of_tick import EndOfTick
from servekit.gateway.http.fast_response import FastResponse, Handler
from servekit.gateway.routing.request import Deltas, InflightRequest
from servekit.gateway.routing.router import Router

log: Any = structlog.get_logger("servekit.gateway")

Plain = tuple[Shape, Common, InflightRequest]
Rich = tuple[GenerationRequest, ResponseEncoder]
Parse = Callable[[bytes, str], Plain | Rich]

STREAM_STARTS = {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM}


class OpenAI:
    """The two hot endpoints, on the fast path (`exchanges`) and as plain ASGI (`routes`)."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._cork = EndOfTick()
        self.routes: dict[str, Callable[[Scope, Receive, Send], Any]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
        }
        self.exchanges: dict[bytes, Handler] = {
            b"/v1/chat/completions": partial(self._begin, self._chat),
            b"/v1/completions": partial(self._begin, self._completion),
        }

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send, self._chat)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send, self._completion)

    def _chat(self, body: bytes, key: str) -> Plain | Rich:
        request = decode(ChatRequest, body)
        if not self._is_plain(request):
            return self._rich_chat(request, key)
        call = InflightRequest(
            request.model,
            chat_sampling(request),
            messages=chat_messages(request.messages),
            stream=bool(request.stream),
            key=key,
            priority=request.priority or 0,
        )
        return CHAT, request, call

    def _is_plain(self, request: ChatRequest) -> bool:
        """Return whether a chat has one choice, and an answer of nothing but text."""
        if (
            (request.n or 1) > 1
            or request.tools
            or request.tool_choice not in (None, "auto", "none")
            or request.logprobs
            or request.chat_template_kwargs
            or request.reasoning_effort
            or request.continue_final_message
            or request.add_generation_prompt is False
            or request.stop_token_ids
            or request.prompt_logprobs is not None
        ):
            return False
        status = self._router.find(request.model).status
        if (info := status.info) is None:
            return status.residence is None
        return not (info.dialect.think_end or info.dialect.tools == "harmony")

    def _rich_chat(self, request: ChatRequest, key: str) -> Rich:
        options = request.stream_options
        check_prompt_logprobs(request)
        ask = chat_ask(request, key)
        usage = bool(options and options.include_usage)
        told = request.prompt_logprobs
        return ask, ChatForm(usage=usage, logprobs=bool(request.logprobs), prompt_logprobs=told)

    def _completion(self, body: bytes, key: str) -> Plain | Rich:
        request = decode(CompletionRequest, body)
        prompts = completion_prompts(request)
        if self._is_rich(request, len(prompts)):
            return self._rich_completion(request, prompts, key)
        call = InflightRequest(
            request.model,
            completion_sampling(request),
            prompt=prompts[0],
            stream=bool(request.stream),
            key=key,
            priority=request.priority or 0,
        )
        return COMPLETION, request, call

    def _is_rich(self, request: CompletionRequest, prompts: int) -> bool:
        """Return whether there are several choices, or more than text in the answer."""
        told = request.logprobs is not None or request.prompt_logprobs is not None
        told = told or bool(request.echo or request.stop_token_ids)
        return prompts > 1 or (request.n or 1) > 1 or told

    def _rich_completion(self, request: CompletionRequest, prompts: list[Prompt], key: str) -> Rich:
        options = request.stream_options
        check_prompt_logprobs(request)
        ask = completion_ask(request, prompts, key)
        usage = bool(options and options.include_usage)
        form = CompletionForm(
            usage=usage,
            logprobs=request.logprobs,
            echo=bool(request.echo),
            prompt_logprobs=request.prompt_logprobs,
        )
        return ask, form

    def _begin(self, parse: Parse, exchange: FastResponse) -> None:
        """Start a request on the fast path. Raises ServekitError for a wrong request."""
        key = str(exchange.header(b"authorization"), "latin-1")
        body, exchange.body = bytes(exchange.body), b""
        parsed = parse(body, key)
        del body  # otherwise the body stays in memory while the answer is generated
        if len(parsed) == 2:
            ask, form = parsed
            ask.session = _session(exchange) or ask.session
            status = self._router.find(ask.model).status
            if status.info is None and status.residence is not None:
                self._spawn(exchange, self._begin_later(ask, form, exchange))
                return
            over = FastResponseAsgi(exchange)
            self._spawn(
                exchange, respond(Generation(self._router, ask), form, over.receive, over.send)
            )
            return
        shape, request, call = parsed
        if self._router.chooses:
            call.session = _session(exchange) or request.prompt_cache_key or ""
        self._router.open(call, request.timeout_s)
        pump = StreamWriter(exchange, call, self._answer_to(shape, request, call), self._cork)
        if call.stream and (options := request.stream_options) and options.queue_position:
            self._router.follow(call)
            pump.tell_places()

    async def _begin_later(
        self, ask: GenerationRequest, form: ResponseEncoder, exchange: FastResponse
    ) -> None:
        """Start a request for a model whose properties are unknown until it is loaded."""
        opening = asyncio.ensure_future(open_turn(self._router, ask))
        exchange.on_gone = partial(_give_up, opening)
        try:
            turn = await opening
        except ServekitError as error:
            exchange.fail(error)
            return
        except asyncio.CancelledError:
            return  # the client has disconnected
        over = FastResponseAsgi(exchange)
        await respond(turn, form, over.receive, over.send)

    def _spawn(self, exchange: FastResponse, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_done, exchange))

    def _on_done(self, exchange: FastResponse, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected_error", exc_info=error)
            exchange.fail(ServekitError("an internal error; see the logs"))

    def _answer_to(self, shape: Shape, request: Common, call: InflightRequest) -> OpenAIEncoder:
        options = request.stream_options
        model = self._router.find(call.model).status.name
        return OpenAIEncoder(shape, model, bool(options and options.include_usage), call.stream)

    async def _guard(self, scope: Scope, receive: Receive, send: Send, parse: Parse) -> None:
        """Answer one request; an error before the first byte is sent in OpenAI's format."""
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            parsed = parse(body, api_key(scope))
            del body  # otherwise the body stays in memory while the answer is generated
            session = session_of(scope)
            if len(parsed) == 2:
                ask, form = parsed
                ask.session = session or ask.session
                turn = await open_turn(self._router, ask)
            else:
                shape, request, call = parsed
                call.session = session or request.prompt_cache_key or ""
                self._router.open(call, request.timeout_s)
        except ClientGone:
            return
        except ServekitError as error:
            await send_error(send, error)
            return
        if len(parsed) == 2:
            await respond(turn, form, receive, send)
        else:
            await self._answer(shape, request, call, receive, send)

    async def _answer(
        self, shape: Shape, request: Common, call: InflightRequest, receive: Receive, send: Send
    ) -> None:
        options = request.stream_options
        answer = self._answer_to(shape, request, call)
        watch = DisconnectWatcher(call, receive)
        try:
            if not call.stream:
                await whole(answer, call, send)
            elif options and options.queue_position:
                self._router.follow(call)
                await stream_with_places(answer, call, send)
            else:
                await stream(answer, call, send)
        finally:
            watch.end()
            call.cancel()


def _give_up(opening: asyncio.Future[Generation]) -> None:
    opening.cancel()


def _session(exchange: FastResponse) -> str:
    return str(exchange.header(SESSION), "latin-1")


async def whole(answer: OpenAIEncoder, call: InflightRequest, send: Send) -> None:
    """Answer with one body, once the text is complete."""
    try:
        deltas = await call.deltas()
    except RequestError as error:
        if not isinstance(error, ClientClosed):
            await send_error(send, error)
        return
    await send_json(send, answer.whole(_text(deltas), deltas[-1]))


def _text(deltas: Deltas) -> str:
    return deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas])


async def stream(
    answer: OpenAIEncoder, call: InflightRequest, send: Send, *, started: bool = False
) -> None:
    """Answer with server-sent events; an error after the first byte becomes an event.

    `send` blocks while the client does not read, and delays this request alone. Tokens that arrive
    meanwhile leave in one write when the client reads again.
    """
    try:
        while True:
            deltas = await call.deltas()
            if not started:
                started = True
                await send(STREAM_STARTS)
            more = deltas[-1].finish is None
            events = answer.events(_text(deltas), None if more else deltas[-1])
            await send({"type": "http.response.body", "body": events, "more_body": more})
            if not more:
                return
    except ClientClosed:
        return
    except RequestError as error:
        if not started:
            await send_error(send, error)
            return
        event = b"data: " + envelope(error) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


async def stream_with_places(answer: OpenAIEncoder, call: InflightRequest, send: Send) -> None:
    """Stream like `stream`, after a comment for each new place in the queue; starts at once."""
    await send(STREAM_STARTS)
    place = call.place
    while place is not None:
        comment = b": queue position %d\n\n" % place
        await send({"type": "http.response.body", "body": comment, "more_body": True})
        place = await call.place_after(place)
    await stream(answer, call, send, started=True)


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "A chat completion",
        ChatRequest,
        ChatCompletion,
        (ChatChunk, OpenAIError),
    ),
    Operation(
        "/v1/completions",
        "A completion",
        CompletionRequest,
        Completion,
        (CompletionChunk, OpenAIError),
    ),
)
