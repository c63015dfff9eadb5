"""HuixiangDou's own LLM server API, for installations that still use its client.

`POST /inference` answers `{"text", "error"}`, always with 200: the client gives up at any other
status. `POST /stream` answers with server-sent events of text alone. The client prints all events,
so there is no `[DONE]`, and a failure cuts the connection. Decoding is greedy, as in the original
server: the client scores texts by the answers.

The model is the one that `backend` names. For any other value (clients say "local", or a remote
service) it is the first model of the file. Source: llm_client.py and llm_server_hybrid.py of
InternLM/HuixiangDou.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta

from servekit.errors import ClientClosed, ModelUnavailable, RequestError, ServekitError
from servekit.gateway.api.endpoint import Endpoint, Refuse
from servekit.gateway.api.fields import ANSWER, QUESTION, doc
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.responder import DisconnectWatcher, ResponseEncoder, respond
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    ClientGone,
    MethodNotAllowed,
    Receive,
    Scope,
    Send,
    api_key,
    error_headers,
    read_body,
    send_json,
)
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import Text
from servekit.protocol.messages import ChatMessage, SamplingParams

log: Any = structlog.get_logger("servekit.gateway")

_encode = msgspec.json.Encoder().encode
_BREAK = re.compile(r"\r\n|\r|\n")
#: The time between two checks whether a loading model is ready.
LOOK_EVERY_S = 0.1

Round = Annotated[list[str | None], Meta(min_length=2)]


class InferenceRequest(msgspec.Struct):
    """Body of POST /inference and /stream. `history` has pairs of a question and its answer."""

    prompt: Annotated[str, doc("The question", QUESTION)] = ""
    history: Annotated[list[Round], Meta(max_length=2048, examples=[[]])] | None = None
    """The rounds before the question: a question and its answer each."""
    backend: str | None = None
    """The name of a model; any other name means the first model of the file."""
    remote: Annotated[bool, doc("Has no effect; older clients send it")] | None = None


class InferenceAnswer(msgspec.Struct):
    """The answer of /inference, with status 200 also if there is none, and errors of both paths."""

    text: Annotated[str, doc("The text", ANSWER)]
    error: Annotated[str, doc("Why there is no text; empty if there is")]


class Cut(Exception):
    """The connection has to be cut: this client knows no other sign of a failure."""


async def refuse(send: Send, error: ServekitError) -> None:
    """Answer `{"text": "", "error": "..."}`, with 200 unless the method is not allowed."""
    status = error.status if isinstance(error, MethodNotAllowed) else 200
    body = InferenceAnswer("", error.message or error.code)
    await send_json(send, _encode(body), status, error_headers(error))


async def refuse_stream(send: Send, error: ServekitError) -> None:
    """Answer with the error's own status, the only thing that this client looks at."""
    body = InferenceAnswer("", error.message or error.code)
    await send_json(send, _encode(body), error.status, error_headers(error))


class Whole(ResponseEncoder):
    """The answer to POST /inference, without the model's reasoning."""

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        error = ""
        if choice.reasoning and not choice.text:
            error = f"the model did not get past its thoughts, {turn.completion_tokens} tokens long"
        return _encode(InferenceAnswer(choice.text, error))

    async def refuse(self, send: Send, error: ServekitError) -> None:
        await refuse(send, error)


class Stream(ResponseEncoder):
    """The answer to POST /stream.

    The client strips each event, so white space at the end of an event is held back and sent with
    the text that follows.
    """

    headers = EVENT_STREAM

    def __init__(self) -> None:
        self._held = ""

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        said = [e.text for piece in pieces for e in piece.events if isinstance(e, Text)]
        text = self._held + "".join(said)
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return event(kept) if kept else b""

    def closing(self, turn: Generation) -> bytes:
        return event(self._held) if self._held else b""

    async def refuse(self, send: Send, error: ServekitError) -> None:
        await refuse_stream(send, error)

    def late_error(self, error: ServekitError) -> bytes:
        raise Cut(error.message)


def event(text: str) -> bytes:
    """Return one server-sent event, with a `data:` line for each line of the text."""
    lines = [f"data: {line}\r\n" for line in _BREAK.split(text)]
    return "".join([*lines, "\r\n"]).encode()


class Legacy:
    """The HuixiangDou endpoints, as ASGI routes by path, and their error formats."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes
        self.routes: dict[str, Endpoint] = {
            "/inference": self.inference,
            "/stream": self.stream,
        }
        self.envelopes: dict[str, Refuse] = {"/inference": refuse, "/stream": refuse_stream}

    async def inference(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, Whole(), stream=False)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send, Stream(), stream=True)
        except Cut as cut:
            # the server closes the connection when an ASGI app returns before its answer is
            # complete
            log.warning("stream_cut_off", path=scope["path"], error=str(cut))

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, form: ResponseEncoder, *, stream: bool
    ) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            ask = self._ask(body, api_key(scope), stream=stream)
            del body  # otherwise the body stays in memory while the answer is generated
            turn = await self._open(ask, receive)
        except (ClientGone, ClientClosed):
            return
        except ServekitError as error:
            await form.refuse(send, error)
        except Exception:
            log.exception("unexpected_error", path=scope["path"])
            await form.refuse(send, ServekitError("an internal error; see the logs"))
        else:
            await respond(turn, form, receive, send)

    def _ask(self, body: bytes, key: str, *, stream: bool) -> GenerationRequest:
        request = decode(InferenceRequest, body)
        if not request.prompt:
            raise RequestError("the prompt is empty", param="prompt")
        return GenerationRequest(
            model=self._model(request.backend or ""),
            params=SamplingParams(temperature=0),
            messages=_messages(request),
            stream=stream,
            key=key,
        )

    def _model(self, backend: str) -> str:
        router = self._router
        if backend and router.serves(backend):
            return backend
        if not any(router.models()):
            raise ModelUnavailable("there is no model here that may be used")
        return router.find("").status.name

    async def _open(self, ask: GenerationRequest, receive: Receive) -> Generation:
        """Return the generation once the model can serve; this client does not retry."""
        patience = Patience(self._router, ask)
        watch = DisconnectWatcher(patience, receive)
        try:
            return await patience.turn()
        finally:
            watch.end()


class Patience:
    """Waits for a model that is expected to serve, and stops when the client disconnects."""

    def __init__(self, router: Router, ask: GenerationRequest) -> None:
        self._router = router
        self._ask = ask
        self._gone = asyncio.Event()

    def cancel(self) -> None:
        """Stop the wait: the client has disconnected."""
        self._gone.set()

    async def turn(self) -> Generation:
        """Return the opened generation. Raises the errors of `Generation`, and ClientClosed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not self._gone.is_set():
            route = self._router.find(self._ask.model)
            waited_s = loop.time() - began_s
            hopeless = route.hopeless or self._router.draining
            try:
                route.check_available()
                return Generation(self._router, self._ask)
            except ModelUnavailable:
                if hopeless or waited_s > route.status.timeout_s:
                    raise
            await self._pause()
        raise ClientClosed("the client is gone")

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._gone.wait()
        except TimeoutError:
            pass


def _messages(request: InferenceRequest) -> list[ChatMessage]:
    messages = []
    for question, answer, *_ in request.history or ():
        if question and answer:  # its client leaves out half rounds, too
            messages.append(ChatMessage("user", question))
            messages.append(ChatMessage("assistant", answer))
    return [*messages, ChatMessage("user", request.prompt)]


_operation = partial(
    Operation,
    request=InferenceRequest,
    response=InferenceAnswer,
    tag="HuixiangDou",
    error=InferenceAnswer,
)
OPERATIONS = (
    _operation("/inference", "An answer in the format of HuixiangDou's own LLM server"),
    _operation("/stream", "The same, streamed", pieces=(str,)),
)
