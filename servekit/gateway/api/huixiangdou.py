"""HuixiangDou's own LLM server, for installations that still have its client.

`POST /inference` answers `{"text", "error"}`, always 200: its client takes any other status for a
reason to give up. `POST /stream` answers with server-sent events of text alone: it prints all that
comes, so there is no `[DONE]`, and a failure is a connection that is cut. Answers are greedy, as
its server's were: it scores texts by them.

The model is the one that `backend` names, else (its clients say "local", or a remote service) the
first in the file. Source: llm_client.py and llm_server_hybrid.py of InternLM/HuixiangDou.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta

from servekit.errors import ClientClosed, ModelUnavailable, RequestError, ServekitError
from servekit.gateway.api.endpoint import Endpoint, Refuse
from servekit.gateway.api.openai.schema import decode
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
#: Between looks whether a model that is coming has come.
LOOK_EVERY_S = 0.1

Round = Annotated[list[str | None], Meta(min_length=2)]


class InferenceRequest(msgspec.Struct):
    """Body of POST /inference and /stream. `history` has pairs of a question and its answer."""

    prompt: str = ""
    history: Annotated[list[Round], Meta(max_length=2048)] | None = None
    backend: str | None = None
    remote: bool | None = None  # what older clients say instead


class Cut(Exception):
    """The connection is to be cut: there is no other way to tell this client of a failure."""


async def refuse(send: Send, error: ServekitError) -> None:
    """`{"text": "", "error": "..."}`; 200 unless it wasn't a request to the server at all."""
    status = error.status if isinstance(error, MethodNotAllowed) else 200
    body = {"text": "", "error": error.message or error.code}
    await send_json(send, _encode(body), status, error_headers(error))


async def refuse_stream(send: Send, error: ServekitError) -> None:
    """With its status, for that is all that the client looks at."""
    body = {"text": "", "error": error.message or error.code}
    await send_json(send, _encode(body), error.status, error_headers(error))


class Whole(ResponseEncoder):
    """The answer to POST /inference. What the model thinks is no part of it."""

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        error = ""
        if choice.reasoning and not choice.text:
            error = f"the model did not get past its thoughts, {turn.completion_tokens} tokens long"
        return _encode({"text": choice.text, "error": error})

    async def refuse(self, send: Send, error: ServekitError) -> None:
        await refuse(send, error)


class Stream(ResponseEncoder):
    """The answer to POST /stream.

    White space at the end of an event would be lost: the client strips what it reads. It goes with
    what follows.
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
    """One server-sent event, with a `data:` line for each line of the text."""
    lines = [f"data: {line}\r\n" for line in _BREAK.split(text)]
    return "".join([*lines, "\r\n"]).encode()


class Legacy:
    """The endpoints, as ASGI routes by path, and how they refuse."""

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
            # returning before the answer is complete has the server close the connection
            log.warning("stream cut off", path=scope["path"], error=str(cut))

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, form: ResponseEncoder, *, stream: bool
    ) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            ask = self._ask(body, api_key(scope), stream=stream)
            del body  # or it is held for as long as the answer takes
            turn = await self._open(ask, receive)
        except (ClientGone, ClientClosed):
            return
        except ServekitError as error:
            await form.refuse(send, error)
        except Exception:
            log.exception("unexpected error", path=scope["path"])
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
        """Once the model can serve: its client takes a restart for the end."""
        patience = Patience(self._router, ask)
        watch = DisconnectWatcher(patience, receive)
        try:
            return await patience.turn()
        finally:
            watch.end()


class Patience:
    """Waits for a model that is coming, but not for one that isn't; ends when its client goes."""

    def __init__(self, router: Router, ask: GenerationRequest) -> None:
        self._router = router
        self._ask = ask
        self._gone = asyncio.Event()

    def cancel(self) -> None:
        """The client is gone."""
        self._gone.set()

    async def turn(self) -> Generation:
        """The turn, opened. Raises what `Generation` does, and ClientClosed."""
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
        if question and answer:  # as its client leaves half a round out
            messages.append(ChatMessage("user", question))
            messages.append(ChatMessage("assistant", answer))
    return [*messages, ChatMessage("user", request.prompt)]
