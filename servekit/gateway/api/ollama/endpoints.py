"""Ollama's API: /api/chat, /api/generate, /api/embed and the endpoints about models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from servekit import __version__
from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.endpoint import EndpointFactory, GenerationEndpoint
from servekit.gateway.api.ollama import models
from servekit.gateway.api.ollama.embeddings import Embedding, write_one
from servekit.gateway.api.ollama.request import (
    ChatRequest,
    Common,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    NameRequest,
    check_generate,
    generate_messages,
    messages,
    sampling,
    template,
)
from servekit.gateway.api.ollama.response import OllamaEncoder, encode_error
from servekit.gateway.api.ollama.response_types import (
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGenerated,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
)
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import LINES, Operation
from servekit.gateway.generation.generation import GenerationRequest
from servekit.gateway.http.asgi import Envelope
from servekit.gateway.http.response import Endpoint, Handler
from servekit.gateway.routing.adapter_route import AdapterRoute, base_of
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import Delta
from servekit.units import parse_duration

_encode = msgspec.json.Encoder().encode
#: Ollama's endpoints that change models; here the configuration file defines the models.
_NOT_HERE = ("/api/push", "/api/create", "/api/copy")


class Ollama:
    """Ollama's endpoints by path, as handlers and ASGI routes, and their error formats."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        door = EndpointFactory(max_body_bytes, encode_error)
        self.handlers: dict[str, Handler] = {
            "/api/chat": GenerationEndpoint(router, self._parse_chat).start_answer,
            "/api/generate": GenerationEndpoint(router, self._parse_generate).start_answer,
        }
        self.routes: dict[str, Endpoint] = {
            "/api/embed": door.calls(self._embed),
            "/api/embeddings": door.calls(self._embeddings),
            "/api/show": door.plain(self._show),
            "/api/pull": door.plain(self._pull),
            **dict.fromkeys(_NOT_HERE, door.plain(_refuse_changes)),
        }
        reads = ("/api/tags", "/api/ps", "/api/version", "/api/delete")
        paths = (*self.handlers, *self.routes, *reads)
        self.envelopes: dict[str, Envelope] = dict.fromkeys(paths, encode_error)

    # ---- generating

    def _parse_chat(self, body: bytes, key: str) -> tuple[GenerationRequest, OllamaEncoder] | bytes:
        request = decode(ChatRequest, body)
        route, form = self._begin(request, chat=True)
        if not request.messages:
            return self._without_a_question(request, route, form)
        ask = self._make_request(request, route, key)
        ask.messages = messages(request.messages)
        ask.tools = request.tools or []
        return ask, form

    def _parse_generate(
        self, body: bytes, key: str
    ) -> tuple[GenerationRequest, OllamaEncoder] | bytes:
        request = decode(GenerateRequest, body)
        check_generate(request)
        route, form = self._begin(request, chat=False)
        if not request.prompt:
            return self._without_a_question(request, route, form)
        ask = self._make_request(request, route, key)
        info = route.status.info
        plain = info is not None and not info.chat and not (request.system or request.images)
        if request.raw or plain:
            ask.prompts = [request.prompt]
        else:
            ask.messages = generate_messages(request)
        return ask, form

    def _begin(self, request: Common, *, chat: bool) -> tuple[ModelQueue, OllamaEncoder]:
        route = models.find_model(self._router, request.model)
        self._report_keep_alive(route, request.keep_alive)
        form = OllamaEncoder(
            request.model or route.status.name,
            chat=chat,
            thoughts=request.think is not False,
            logprobs=bool(request.logprobs),
        )
        return route, form

    def _report_keep_alive(self, route: ModelQueue, keep_alive: float | str | None) -> None:
        """Pass on how long the model is to stay loaded. Raises RequestError, Forbidden."""
        if keep_alive is not None:
            self._router.access.require_model(route.status.name, base_of(route))
            self._router.demand.report_keep_alive(route, stay_s(keep_alive))

    def _without_a_question(self, request: Common, route: ModelQueue, form: OllamaEncoder) -> bytes:
        """Start to load a model, or with `keep_alive` 0 to unload it, without waiting."""
        self._router.access.require_model(route.status.name, base_of(route))
        stays_s = None if request.keep_alive is None else stay_s(request.keep_alive)
        if stays_s == 0:
            return form.loaded(goes=True)
        route.check_available()
        self._router.demand.report_keep_alive(route, stays_s, loads=True)
        return form.loaded()

    def _make_request(self, request: Common, route: ModelQueue, key: str) -> GenerationRequest:
        status = route.status
        return GenerationRequest(
            model=status.name,
            params=sampling(request),
            template=template(request.think, status.name, status.info),
            stream=request.stream is not False,
            key=key,
        )

    # ---- embedding

    def _embed(self, body: bytes, key: str) -> tuple[Embedding, Callable[[list[Delta]], bytes]]:
        request = decode(EmbedRequest, body)
        inputs = [request.input] if isinstance(request.input, str) else request.input
        route = models.find_model(self._router, request.model)
        self._report_keep_alive(route, request.keep_alive)
        truncate = request.truncate is not False
        embedding = Embedding(self._router, route, key, inputs, truncate=truncate)
        name = request.model or route.status.name
        return embedding, partial(embedding.encode_answer, name, request.dimensions or 0)

    def _embeddings(
        self, body: bytes, key: str
    ) -> tuple[Embedding, Callable[[list[Delta]], bytes]]:
        request = decode(EmbeddingsRequest, body)
        route = models.find_model(self._router, request.model)
        self._report_keep_alive(route, request.keep_alive)
        inputs = [request.prompt] if request.prompt else []
        return Embedding(self._router, route, key, inputs, truncate=True), write_one

    # ---- models

    def _show(self, body: bytes) -> bytes:
        return _encode(models.describe_model(self._named(body)))

    def _pull(self, body: bytes) -> bytes:
        """Answer success, as a served model needs no download; raise a failed adapter's error."""
        route = self._named(body)
        if isinstance(route, AdapterRoute):
            route.check_loaded()
        return _encode(OllamaStatus("success"))

    def _named(self, body: bytes) -> ModelQueue:
        request = decode(NameRequest, body)
        route = models.find_model(self._router, request.model or request.name)
        self._router.access.require_model(route.status.name, base_of(route))
        return route


def _refuse_changes(body: bytes) -> bytes:
    raise Unsupported("the models are those of servekit's configuration file; change that")


def add_reads(app: FastAPI, router: Router) -> None:
    """Add the GET endpoints, and the DELETE of `ollama rm`."""

    @app.delete("/api/delete", include_in_schema=False)
    async def delete() -> Response:
        return Response(_refuse_changes(b""))

    @app.get("/api/tags", tags=["Ollama"], summary="The models served")
    async def tags() -> Response:
        return Response(_encode(models.tags(router)), media_type="application/json")

    @app.get("/api/ps", tags=["Ollama"], summary="The models that can serve now")
    async def ps() -> Response:
        return Response(_encode(models.list_running(router)), media_type="application/json")

    @app.get("/api/version", tags=["Ollama"], summary="The version of Ollama's API spoken here")
    async def version() -> Response:
        body = OllamaVersion(models.API_VERSION, __version__)
        return Response(_encode(body), media_type="application/json")


_operation = partial(Operation, tag="Ollama", stream=LINES, error=OllamaError)


def stay_s(keep_alive: float | str) -> float:
    """Return the seconds of a number or of a duration such as "5m" or "1h30m"; infinity below 0.

    Raises RequestError.
    """
    if not isinstance(keep_alive, str):
        return float("inf") if keep_alive < 0 else float(keep_alive)
    text = keep_alive.strip()
    below = text.startswith("-")
    try:
        total_s = parse_duration(text[1:] if below else text)
    except ValueError:
        raise RequestError(
            'keep_alive: expected a number of seconds, or a duration such as "5m"',
            param="keep_alive",
        ) from None
    return float("inf") if below and total_s else total_s


OPERATIONS = (
    _operation(
        "/api/chat",
        "A chat, streamed unless `stream` is false",
        ChatRequest,
        OllamaChat,
        (OllamaChat, OllamaError),
    ),
    _operation(
        "/api/generate",
        "An answer to a prompt, streamed unless `stream` is false",
        GenerateRequest,
        OllamaGenerated,
        (OllamaGenerated, OllamaError),
    ),
    _operation("/api/embed", "Embeddings", EmbedRequest, OllamaEmbeddings),
    _operation(
        "/api/embeddings", "One embedding, in the older form", EmbeddingsRequest, OllamaEmbedding
    ),
    _operation("/api/show", "A model's properties", NameRequest, OllamaShown),
    _operation(
        "/api/pull",
        "Success if the model is served; nothing is downloaded",
        NameRequest,
        OllamaStatus,
        (OllamaStatus,),
    ),
)
