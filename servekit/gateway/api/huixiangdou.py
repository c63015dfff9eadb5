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

from servekit.errors import ModelUnavailable, RequestError, ServekitError
from servekit.gateway.api.endpoint import GenerationEndpoint
from servekit.gateway.api.fields import ANSWER, QUESTION, doc
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.http.asgi import Envelope, MethodNotAllowed
from servekit.gateway.http.response import Handler
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
    error: Annotated[str, doc("The reason why there is no text; empty if there is one")]


def encode_error(error: ServekitError) -> tuple[int, bytes]:
    """Encode `{"text": "", "error": "..."}`, with 200 unless the method is not allowed."""
    status = error.status if isinstance(error, MethodNotAllowed) else 200
    return status, encode_stream_error(error)[1]


def encode_stream_error(error: ServekitError) -> tuple[int, bytes]:
    """Encode an error with its own status, the only thing that this client looks at."""
    return error.status, _encode(InferenceAnswer("", error.message or error.code))


class InferenceEncoder(ResponseEncoder):
    """The answer to POST /inference, without the model's reasoning."""

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        error = ""
        if choice.reasoning and not choice.text:
            tokens = generation.completion_tokens
            error = f"the model did not finish its thoughts, {tokens} tokens long"
        return _encode(InferenceAnswer(choice.text, error))


class StreamEncoder(ResponseEncoder):
    """The answer to POST /stream.

    The client strips each event, so white space at the end of an event is held back and sent with
    the text that follows.
    """

    def __init__(self) -> None:
        self._held = ""

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        said = [e.text for chunk in chunks for e in chunk.events if isinstance(e, Text)]
        text = self._held + "".join(said)
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return event(kept) if kept else b""

    def encode_end(self, generation: Generation) -> bytes:
        return event(self._held) if self._held else b""

    def encode_late_error(self, error: ServekitError) -> None:
        log.warning("stream_cut_off", path="/stream", error=error.message)


def event(text: str) -> bytes:
    """Return one server-sent event, with a `data:` line for each line of the text."""
    lines = [f"data: {line}\r\n" for line in _BREAK.split(text)]
    return "".join([*lines, "\r\n"]).encode()


class Legacy:
    """The HuixiangDou endpoints, as handlers by path, and their error formats."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.handlers: dict[str, Handler] = {
            "/inference": GenerationEndpoint(
                router, self._parse_inference, open_when_ready
            ).start_answer,
            "/stream": GenerationEndpoint(router, self._parse_stream, open_when_ready).start_answer,
        }
        self.envelopes: dict[str, Envelope] = {
            "/inference": encode_error,
            "/stream": encode_stream_error,
        }

    def _parse_inference(self, body: bytes, key: str) -> tuple[GenerationRequest, InferenceEncoder]:
        return self._request(body, key, stream=False), InferenceEncoder()

    def _parse_stream(self, body: bytes, key: str) -> tuple[GenerationRequest, StreamEncoder]:
        return self._request(body, key, stream=True), StreamEncoder()

    def _request(self, body: bytes, key: str, *, stream: bool) -> GenerationRequest:
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
            raise ModelUnavailable("no model may be used here")
        return router.find("").status.name


async def open_when_ready(router: Router, request: GenerationRequest) -> Generation:
    """Return the generation once the model can serve, if that is expected.

    This client does not retry. Raises the errors of `Generation`.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        route = router.find(request.model)
        waited_s = loop.time() - began_s
        hopeless = route.is_permanently_down or router.draining
        try:
            route.check_available()
            return Generation(router, request)
        except ModelUnavailable:
            if hopeless or waited_s > route.status.timeout_s:
                raise
        await asyncio.sleep(LOOK_EVERY_S)


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
