"""The gateway's ASGI application: hot routes, the UI by path prefix, FastAPI for all the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Match

from servekit import __version__
from servekit.errors import ClientClosed, ModelNotFound, RequestError, ServekitError
from servekit.gateway.api.admin.endpoints import Supervisor, add_administration
from servekit.gateway.api.admin.lora import Lora
from servekit.gateway.api.admin.metrics import add_metrics
from servekit.gateway.api.anthropic.endpoints import Anthropic
from servekit.gateway.api.anthropic.response import error_body
from servekit.gateway.api.audio.endpoints import TASKS as audio_tasks
from servekit.gateway.api.audio.endpoints import Audio
from servekit.gateway.api.forwarding import FORWARDED_FIRST, Forwarding
from servekit.gateway.api.health_types import (
    Health,
    Live,
    LoadProgress,
    ModelHealth,
    ReplicaHealth,
    Version,
)
from servekit.gateway.api.huixiangdou import Legacy
from servekit.gateway.api.ollama.endpoints import Ollama, add_reads
from servekit.gateway.api.openai.batches import Batches
from servekit.gateway.api.openai.embeddings import Vectors
from servekit.gateway.api.openai.endpoints import OpenAI
from servekit.gateway.api.openai.response_types import Model, ModelList
from servekit.gateway.api.openai.responses import Responses
from servekit.gateway.api.openapi import docs_pages
from servekit.gateway.api.openapi.document import (
    describe_forwarded_routes,
    describe_hot_routes,
)
from servekit.gateway.api.paging import query_parameters, read_limit
from servekit.gateway.api.scoring.endpoints import TASKS as scoring_tasks
from servekit.gateway.api.scoring.endpoints import Scoring
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.auth.middleware import AuthMiddleware
from servekit.gateway.http.asgi import (
    ASGIApp,
    Envelope,
    MethodNotAllowed,
    Receive,
    Scope,
    Send,
    encode_error,
    error_headers,
    error_object,
    error_type,
    send_error,
)
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.http.response import asgi_endpoint
from servekit.gateway.routing.adapter_route import AdapterRoute, base_of
from servekit.gateway.routing.router import ModelQueue, Router
from servekit.gateway.telemetry.metrics import OTHER
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.gateway.ui import login
from servekit.protocol.transport.rpc import Way
from servekit.protocol.types import Progress, Task

log: Any = structlog.get_logger("servekit.gateway")

#: The most models of a page, as Anthropic's API has it.
_MOST_MODELS = 1000
#: How the paths begin of clients whose base URL has "/v1" or "/api" too often, or not at all.
_WRONG_BASES = (
    ("/v1/v1/", "/v1/"),
    ("/api/v1/", "/v1/"),
    ("/v1/api/", "/api/"),
    ("/api/api/", "/api/"),
    ("/api/", "/v1/"),
    ("/", "/v1/"),
)
_PAGE_PARAMETERS = query_parameters(
    ("limit", "The most models", {"type": "integer", "minimum": 1, "maximum": _MOST_MODELS}),
    ("after_id", "Only models after this one", {"type": "string"}),
    ("before_id", "Only models before this one", {"type": "string"}),
)


class Application:
    """ASGI application that dispatches by path.

    `ui` is set once Gradio has been imported; until then the UI's pages show `ui_state`.
    """

    def __init__(
        self,
        router: Router,
        max_body_bytes: int,
        *,
        ui: bool,
        legacy: bool = False,
        operators: Way | None = None,
        responses: Path | None = None,
    ) -> None:
        """Create the routes of all APIs.

        `operators`: the supervisor's control socket, or a function that sends it a request.
        `responses`: the file of stored responses, beside which files and batches are kept; None:
        nothing is.
        """
        self.router = router
        anthropic, ollama = Anthropic(router, max_body_bytes), Ollama(router, max_body_bytes)
        self.responses = Responses(router, responses)
        handlers = OpenAI(router).handlers | self.responses.handlers
        handlers |= anthropic.handlers | ollama.handlers
        #: By path: the error formats other than OpenAI's.
        self.envelopes = anthropic.envelopes | ollama.envelopes
        if legacy:
            huixiangdou = Legacy(router)
            handlers |= huixiangdou.handlers
            self.envelopes |= huixiangdou.envelopes
        self.hot = {
            path: asgi_endpoint(handler, max_body_bytes, self._envelope(path))
            for path, handler in handlers.items()
        }
        self.hot |= Vectors(router, max_body_bytes).routes | anthropic.routes | ollama.routes
        self.hot |= Scoring(router, max_body_bytes).routes | Audio(router, max_body_bytes).routes
        fast = {path.encode(): handler for path, handler in handlers.items()}
        self.gate = AuthMiddleware(router.access, fast, self.envelopes)
        self.exchanges = self.gate.exchanges
        self.supervisor = Supervisor(operators, router.access)
        self.login = login.Login(router.access, self.supervisor)
        self.ui: ASGIApp | None = None
        self.ui_state = "the UI is starting; reload in a moment" if ui else ""
        self.hot |= Lora(self.supervisor, router.access, max_body_bytes).routes
        self.forwarding = Forwarding(router, max_body_bytes)
        for path in FORWARDED_FIRST:
            tasks = (scoring_tasks | audio_tasks).get(path, ())
            self.hot[path] = self.forwarding.before(self.hot[path], tasks)
        self.rest = build_rest(router, self.supervisor, ui=ui, hot=self.hot)
        self.responses.add_reads(self.rest)
        folder = None if responses is None else responses.with_name("files")
        #: Answers a request of a caller that is known (`ACTING`).
        self.internal = ErrorMiddleware(self._http, log, self.envelopes, self.count)
        self.batches = Batches(router, folder, self.internal, max_body_bytes)
        self.batches.add_routes(self.rest, self.hot)
        describe_forwarded_routes(self.rest, self.forwarding.known_endpoints)
        self._paths = {*self.hot, *(str(getattr(one, "path", "")) for one in self.rest.routes)}

    def _envelope(self, path: str) -> Envelope:
        return self.envelopes.get(path, encode_error)

    def count(self, scope: Scope, status: int) -> None:
        """Count a response by path and status.

        Unknown paths share one label, because clients could create any number of series.
        """
        path: str = scope["path"]
        if (route := scope.get("route")) is not None:
            path = route.path
        elif path not in self._paths:
            path = "/ui" if path.startswith("/ui/") else scope.get("forwarded", OTHER)
        self.router.measures.answers[path, status] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.endswith("/") and not path.startswith("/ui/"):
                scope["path"] = path.rstrip("/") or "/"  # a redirect would lose a POST's body
            if self.gate.open:
                await self._http(scope, receive, send)
            else:
                await self.gate(scope, receive, send, self._http)
        elif scope["type"] == "lifespan":
            await self.rest(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path in login.CALLS and self.ui_state:
            scope["path"] = path = login.CALLS[path]
        hot = self.hot.get(path)
        if hot is not None:
            if scope["method"] == "POST":
                await hot(scope, receive, send)
            else:
                await send_error(send, MethodNotAllowed(path, "POST"), self._envelope(path))
        elif self.ui_state and (path in login.PATHS or login.carries_link(scope)):
            await self.login(scope, receive, send)
        elif self.ui_state and (path == "/ui" or path.startswith("/ui/")):
            await self._ui(scope, receive, send)
        elif scope["method"] == "POST" and self._forwards(scope):
            await self.forwarding(scope, receive, send)
        elif scope["method"] == "HEAD":  # uvicorn omits the body
            await self.rest({**scope, "method": "GET"}, receive, send)
        else:
            await self.rest(scope, receive, send)

    def _forwards(self, scope: Scope) -> bool:
        """Return whether some model has this endpoint, and servekit itself has none."""
        if not self.forwarding.covers(scope["path"]):
            return False
        if any(route.matches(scope)[0] is Match.FULL for route in self.rest.routes):
            return False
        scope["forwarded"] = self.forwarding.label(scope["path"])
        return True

    async def _ui(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.ui is not None:
            await self.ui(scope, receive, send)
        else:
            await self.show_waiting(send)

    async def show_waiting(self, send: Send) -> None:
        """Send a page that asks again until the UI is there."""
        page = _WAITING_PAGE % self.ui_state.encode()
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"retry-after", b"2")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": page})


_WAITING_PAGE = b"""<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=2>
<title>servekit</title><style>body{font:16px system-ui;display:grid;place-items:center;
height:90vh;color-scheme:light dark}</style><p>%b</p>"""


def build_rest(
    router: Router, supervisor: Supervisor, *, ui: bool, hot: Collection[str]
) -> FastAPI:
    """Build the FastAPI application: health, models, administration and the OpenAPI document.

    The document also describes the hot routes.
    """
    app = FastAPIOffline(  # the API pages must work without internet access
        title="servekit",
        version=__version__,
        description="OpenAI-compatible serving of the models in one configuration file. "
        "The [documentation](/docs) describes the rest.",
        docs_url=None,
        redoc_url=None,
    )
    _add_health(app, router)
    _add_models(app, router)
    add_reads(app, router)
    add_metrics(app, supervisor, router.access)
    add_administration(app, supervisor)
    docs_pages.add_manual(app)
    docs_pages.add_swagger(app)
    _add_errors(app, hot)
    describe_hot_routes(app, hot)

    @app.get("/version", tags=["service"], summary="servekit's version")
    async def version() -> Response:
        return _encode(Version(__version__))

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/ui/" if ui else "/docs")

    return app


def _add_health(app: FastAPI, router: Router) -> None:
    @app.get("/livez", tags=["service"], summary="The gateway answers")
    async def livez() -> Response:
        return _encode(Live("ok"))

    no: dict[int | str, dict[str, Any]] = {
        503: {"description": "Some model cannot; `models` has the reasons"}
    }

    def is_ready() -> bool:
        able = all(route.available for route in router.routes.values())
        return bool(router.routes) and not router.draining and able

    @app.get("/health", include_in_schema=False)
    @app.get("/v1/health", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """200 while /readyz is, and 503 else, with an empty body: for load balancers and clients
        that look before they ask.
        """
        return Response(status_code=200 if is_ready() else 503)

    @app.get(
        "/readyz", tags=["service"], summary="Every model can complete a request", responses=no
    )
    async def readyz() -> Response:
        """200 only while a request to each model can complete; 503 with the reasons otherwise.

        A model that is loaded on demand can while it is not loaded, too, unless its last load has
        failed. One that an operator has unloaded does not count.

        With keys, `models` are those that the caller's key may use; without a key it is left out.
        """
        ready = is_ready()
        body = Health("ready" if ready else "draining" if router.draining else "not ready")
        if not router.access.closed or ACTING.get() is not None:
            body.models = {
                name: model_health(route)
                for name, route in router.routes.items()
                if router.access.may_use(name)
            }
        return _encode(body, 200 if ready else 503)


def _encode(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def model_health(route: ModelQueue) -> ModelHealth:
    """Return a model's entry in /readyz: whether it is ready, and the state of each replica."""
    residence = route.status.residence
    replicas = [
        ReplicaHealth(
            name=replica.name,
            state=replica.state,
            device=replica.device,
            restarts=replica.restarts,
            progress=_describe_load(replica.progress) if replica.progress else None,
            reason=replica.trouble or replica.reason or None,
        )
        for replica in route.status.replicas
    ]
    return ModelHealth(
        ready=route.ready and not route.in_trouble,
        state=model_state(route),
        running=route.running,
        waiting=route.waiting,
        replicas=replicas,
        adapters={one.name: one.state for one in route.status.adapters},
        residency=residence.tier if residence is not None else "resident",
        reason=(residence.reason or None) if residence is not None else None,
    )


def _describe_load(progress: Progress) -> LoadProgress:
    return LoadProgress(progress.phase, progress.done, progress.total, progress.unit)


def model_state(route: ModelQueue) -> str:
    """Return the best state among the model's replicas.

    The state is "ready" only if this gateway can reach a ready replica.
    """
    if route.ready:
        return "ready"
    if isinstance(route, AdapterRoute) and route.adapter.state != "serving":
        return route.adapter.state
    states = [replica.state for replica in route.status.replicas]
    order = ("ready", "loading", "starting", "stalled", "backoff", "asleep", "draining", "failed")
    best = next((state for state in order if state in states), "stopped")
    return "starting" if best == "ready" else best


def _add_models(app: FastAPI, router: Router) -> None:
    @app.get(
        "/v1/models",
        tags=["OpenAI"],
        summary="The models served",
        openapi_extra={"parameters": _PAGE_PARAMETERS},
    )
    async def models(request: Request) -> Response:
        return _encode(_page([_model(route) for route in router.models()], request.query_params))

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One model")
    async def model(model: str) -> Response:
        if not model:
            raise ModelNotFound("name a model", param="model")
        route = router.find(model)
        router.access.require_model(route.status.name, base_of(route))
        return _encode(_model(route))


def _page(models: list[Model], query: Mapping[str, str]) -> ModelList:
    """Return the models that Anthropic's `limit`, `after_id` and `before_id` ask for; else all."""
    limit = read_limit(query, len(models), _MOST_MODELS)
    start = _position(models, query, "after_id", -1) + 1
    end = _position(models, query, "before_id", len(models))
    among = models[start:end]
    backwards = "before_id" in query and "after_id" not in query
    page = among[max(0, len(among) - limit) :] if backwards else among[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ModelList("list", page, has_more=len(page) < len(among), first_id=first, last_id=last)


def _position(models: list[Model], query: Mapping[str, str], name: str, default: int) -> int:
    if name not in query:
        return default
    for at, model in enumerate(models):
        if model.id == query[name]:
            return at
    raise RequestError(f"{name}: the list has no model {query[name][:100]!r}", param=name)


def _model(route: ModelQueue) -> Model:
    status = route.status
    info = status.info
    context = info.max_context if info else None
    return Model(
        id=status.name,
        object="model",
        created=status.created,
        owned_by="servekit",
        max_model_len=context,
        engine=status.engine,
        aliases=list(status.aliases),
        state=model_state(route),
        # same fields as vLLM's: the path, and an adapter's base model
        root=status.path,
        parent=base_of(route) or None,
        tasks=[] if info is None else [one for one in info.serves if one in get_args(Task)],
        # Anthropic's fields, because its clients read the same list
        type="model",
        display_name=status.name,
        created_at=f"{datetime.fromtimestamp(status.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        lifecycle="active",
        max_input_tokens=context,
        max_tokens=context,
    )


def _add_errors(app: FastAPI, hot: Collection[str]) -> None:
    """Answer each error in the envelope of the path's API, including FastAPI's own errors."""

    @app.exception_handler(ServekitError)
    async def handle_own_error(request: Request, error: ServekitError) -> Response:
        headers = {k.decode(): v.decode() for k, v in error_headers(error)}
        body = _in_envelope(request, error_object(error), error.status)
        return JSONResponse(body, error.status, headers)

    @app.exception_handler(HTTPException)
    async def handle_library_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            known = {*hot, *(getattr(one, "path", "") for one in app.routes)}
            meant = _find_meant(request.url.path, known)
            see = f"it is {meant}: the client's base URL is wrong" if meant else "see /docs"
            message = f"there is no {request.method} {request.url.path} here; {see}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}; see /docs"
        body = {
            "message": message,
            "type": error_type(error.status_code),
            "param": None,
            "code": {404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        }
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # `Application` serves HEAD
        return JSONResponse(
            _in_envelope(request, body, error.status_code), error.status_code, headers
        )


def _find_meant(path: str, known: Collection[str]) -> str:
    """Return the path that a wrong base URL has led away from; "" if there is none."""
    for wrong, right in _WRONG_BASES:
        meant = right + path.removeprefix(wrong)
        if path.startswith(wrong) and meant in known:
            return meant
    return ""


def _in_envelope(request: Request, error: dict[str, Any], status: int) -> dict[str, Any]:
    """Return the body of an error, in Anthropic's format for its paths and its clients."""
    path = request.url.path
    theirs = path.startswith("/v1/models") and "anthropic-version" in request.headers
    if theirs or path.startswith("/v1/messages/"):
        return error_body(status, error["message"])
    return {"error": error["message"] if path.startswith("/api/") else error}


class ErrorMiddleware:
    """The outermost layer: logs an unexpected error and answers with the API's error envelope."""

    def __init__(
        self,
        app: ASGIApp,
        log: Any,
        envelopes: Mapping[str, Envelope] | None = None,
        count: Callable[[Scope, int], None] = lambda scope, status: None,
    ) -> None:
        """Wrap `app`.

        `envelopes` has, by path, the error formats other than OpenAI's.
        `count` is called for each response, with its status.
        """
        self._app = app
        self._count = count
        self._log = log
        self._envelopes = envelopes or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = False, ClientClosed.status
        origin = RequestContext(dict(scope["headers"]), scope.get("client"))
        origin.repeats = scope.get("repeats", False)
        ORIGIN.set(origin)  # visible in this request's task only

        def watched(message: Any) -> Awaitable[None]:  # hot path: adds no coroutine
            nonlocal started, status
            if not started:
                started, status = True, message["status"]
                self._count(scope, status)
                message = {**message, "headers": [*message.get("headers", ()), *origin.headers]}
            return send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            self._log.exception("unexpected_error", path=scope["path"])
            if not started:
                encode = self._envelopes.get(scope["path"], encode_error)
                status = ServekitError.status
                await send_error(send, ServekitError("an internal error; see the logs"), encode)
        finally:
            if (caller := ACTING.get()) is not None:
                origin.key = caller.rule.name
            RECORDER.note_asgi(scope["path"], status, origin)
