"""Endpoints that servekit does not know: which model has them, what its worker gets and answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.gateway.api.forwarding import KNOWN, Forwarding
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.http.asgi import send_json
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.forwarding import HttpPart
from servekit.protocol.messages import (
    PROTOCOL,
    AccessRules,
    Cancel,
    Delta,
    DeltaBatch,
    Failed,
    GatewayToWorker,
    Generate,
    Hello,
    KeyRule,
    ModelInfo,
    ModelStatus,
    ReplicaStatus,
    Topology,
)
from servekit.protocol.transport.connection import Connection, listen_at
from servekit.protocol.types import Capability
from tests.polling import poll_async

LIMIT_BYTES = 4 * 2**20
FORWARDS: tuple[Capability, ...] = ("forward",)
SPEECH = "/v1/audio/speech"
JSON = [(b"content-type", b"application/json")]
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)


def info(*serves: Capability) -> ModelInfo:
    return ModelInfo(100, 4, False, "server", "none", "cpu", serves=serves)


class Server:
    """A worker before a server that answers as `answer` does, and what it was sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[Generate] = []
        self.cancelled: list[int] = []
        self.answer: Callable[[int], list[Any]] = lambda id: [
            Delta(id, "", http=HttpPart(b"a", 200, ((b"content-type", b"text/plain"),))),
            Delta(id, "", http=HttpPart(b"b"), finish="stop"),
        ]

    async def start(self) -> None:
        self._listener = await listen_at(self.path, self._connect)

    def _connect(self) -> Connection[GatewayToWorker]:
        peer: Connection[GatewayToWorker] = Connection(
            GatewayToWorker, lambda message: self._take(peer, message), lambda error: None
        )
        return peer

    def _take(self, peer: Connection[GatewayToWorker], message: GatewayToWorker) -> None:
        if isinstance(message, Hello):
            peer.send(Hello(PROTOCOL, "worker", self.path.stem, info(*FORWARDS)))
        elif isinstance(message, Cancel):
            self.cancelled.append(message.id)
        elif isinstance(message, Generate):
            self.asked.append(message)
            for one in self.answer(message.id):
                peer.send(DeltaBatch([one]) if isinstance(one, Delta) else one)

    def close(self) -> None:
        self._listener.close()


@dataclass
class Answer:
    """What an endpoint has sent."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Scene:
    """A router with some models, all of which one server is behind."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder / "server.sock")
        self.router = Router("gateway/test")
        self.forwarding = Forwarding(self.router, LIMIT_BYTES)
        self.gone = asyncio.Event()  # the client
        self.calls: list[InflightRequest] = []
        take = self.router.queue_call

        def note(call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
            self.calls.append(call)
            return take(call, timeout_s)

        self.router.queue_call = note  # type: ignore[method-assign]

    def serve(self, *models: ModelStatus, access: AccessRules | None = None) -> None:
        self.router.apply_topology(Topology(models, access=access or AccessRules()))

    def model(self, name: str, *endpoints: str, serves: Any = FORWARDS) -> ModelStatus:
        replica = ReplicaStatus(f"{name}/0", "ready", str(self.server.path), 1, "cpu")
        status = ModelStatus(name, "command", "-", 0, (replica,), info(*serves))
        return replace(status, endpoints=endpoints)

    async def ask(
        self,
        path: str = SPEECH,
        body: bytes = b'{"input": "x"}',
        headers: Any = JSON,
        query: bytes = b"",
        endpoint: Any = None,
    ) -> Answer:
        """Ask an endpoint as uvicorn does."""
        answer, told = Answer(), [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if told:
                return told.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], dict(message["headers"])
            else:
                answer.body += message["body"]
                answer.ended = not message.get("more_body")

        scope = {"path": path, "query_string": query, "headers": [*headers]}
        await (endpoint or self.forwarding)(scope, receive, send)
        return answer


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.server.start()
    yield scene
    scene.serve()
    scene.server.close()


# ---------------------------------------------------------------- which paths there are


async def test_a_path_is_covered_if_some_model_has_it(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH), scene.model("b", "/pooling", "/v2/*"))
    forwarding = scene.forwarding
    assert all(map(forwarding.covers, [SPEECH, "/pooling", "/v2/x", "/v2/x/y_1.a-b"]))
    assert not any(map(forwarding.covers, ["/v1/images/edits", "/v2", "/pooling/x", "/"]))


@pytest.mark.parametrize(
    "path", ["/v1/../admin", "/v1/.hidden", "/v1//x", "/v1/x/", "/v1/a%2fb", "/v1/ä", "v1/x", ""]
)
async def test_a_path_that_servers_may_read_otherwise_is_not_covered(
    scene: Scene, path: str
) -> None:
    scene.serve(scene.model("a", "/v1/*", "/*"))
    assert scene.forwarding.covers("/v1/x")
    assert not scene.forwarding.covers(path)


async def test_well_known_endpoints_are_described_and_metrics_have_few_labels(
    scene: Scene,
) -> None:
    scene.serve(scene.model("a", SPEECH), scene.model("b", "/v2/*"))
    forwarding = scene.forwarding
    assert forwarding.known_endpoints() == {SPEECH: KNOWN[SPEECH]}
    assert forwarding.label("/pooling") == "/pooling"  # known, though no model has it
    assert forwarding.label("/v2/any/path") == "/v2/*"
    assert forwarding.label("/v3/any") == ""


# ---------------------------------------------------------------- which model it is for


@pytest.mark.parametrize(
    ("body", "headers", "query"),
    [
        (b'{"model": "b", "input": "x"}', JSON, b""),
        (b'{"model": "b"}', [*JSON, (b"x-model", b"a")], b"model=a"),
        (b"bytes", [], b"x=1&model=b"),
        (b"bytes", [(b"x-model", b"a")], b"model=b"),
        (b"bytes", [(b"x-model", b"b")], b"models=a"),
        (b"bytes", [(b"x-model", b"b")], b"model="),
    ],
)
async def test_the_model_is_named_in_the_body_else_the_query_else_a_header(
    scene: Scene, body: bytes, headers: Any, query: bytes
) -> None:
    scene.serve(scene.model("a", "/v1/*"), scene.model("b", "/v1/*"))
    assert (await scene.ask(body=body, headers=headers, query=query)).status == 200
    assert [call.model for call in scene.calls] == ["b"]


async def test_a_name_in_the_query_is_decoded_and_the_rest_is_left_as_it_is(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH), scene.model("b c", SPEECH))
    query = b"x=%20&model=b+c&y&z=1%2B1&model=a"
    assert (await scene.ask(body=b"bytes", headers=(), query=query)).status == 200
    [asked] = scene.server.asked
    assert asked.http is not None and asked.http.query == "x=%20&y&z=1%2B1"


@pytest.mark.parametrize(
    ("models", "default", "found"),
    [
        # the default model, if it has the endpoint
        ({"a": [SPEECH], "b": [SPEECH]}, "b", "b"),
        # else the first that has it
        ({"a": [], "b": [SPEECH], "c": [SPEECH]}, "", "b"),
        ({"a": [SPEECH], "b": []}, "b", "a"),
        # who lists it comes before who has all, the default model too
        ({"a": ["/v1/*"], "b": [SPEECH]}, "", "b"),
        ({"a": ["/v1/*"], "b": ["/v1/*"]}, "b", "b"),
    ],
)
async def test_without_a_name_it_is_the_first_model_that_has_the_endpoint(
    scene: Scene, models: dict[str, list[str]], default: str, found: str
) -> None:
    access = AccessRules(default_model=default)
    scene.serve(*(scene.model(name, *paths) for name, paths in models.items()), access=access)
    assert (await scene.ask()).status == 200
    assert [call.model for call in scene.calls] == [found]


async def test_a_model_without_the_endpoint_is_refused_and_those_with_it_are_named(
    scene: Scene,
) -> None:
    scene.serve(scene.model("a"), scene.model("b", SPEECH), scene.model("c", "/v1/*"))
    refused = await scene.ask(body=b'{"model": "a"}')
    assert (refused.status, refused.error["param"]) == (400, "model")
    assert refused.error["message"] == (
        f"the model 'a' has no {SPEECH}; models that may have it: 'b', 'c'"
    )
    unknown = await scene.ask(body=b'{"model": "z"}')
    assert unknown.status == 404


async def test_a_key_is_told_of_its_own_models_only(scene: Scene) -> None:
    rules = AccessRules(keys=(KeyRule("k", digest=b"d", models=("a", "c")),))
    scene.serve(scene.model("a"), scene.model("b", SPEECH), scene.model("c"), access=rules)
    ACTING.set(ApiKey(rules.keys[0], 0.0))
    forbidden = await scene.ask(body=b'{"model": "b"}')
    assert forbidden.status == 403
    elsewhere = await scene.ask("/pooling", body=b'{"model": "b"}')
    assert elsewhere.status == 403, "nor what that model has not"
    refused = await scene.ask(body=b'{"model": "a"}')
    assert "none that you may use" in refused.error["message"]
    assert scene.server.asked == []


# ---------------------------------------------------------------- what the server gets


async def test_the_server_gets_the_body_and_the_headers_that_are_about_it(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    headers = [
        (b"authorization", b"Bearer secret"),
        (b"content-type", b"application/json"),
        (b"cookie", b"a=b"),
        (b"accept", b"audio/mpeg"),
        (b"accept-language", b"de"),
        (b"x-model", b"a"),
    ]
    await scene.ask(body=b'{"input": "x", "model": "a"}', headers=headers)
    [asked] = scene.server.asked
    assert (asked.task, asked.http is not None) == ("forward", True)
    http = asked.http
    assert http is not None
    assert http.headers == (
        (b"content-type", b"application/json"),
        (b"accept", b"audio/mpeg"),
        (b"accept-language", b"de"),
    )
    assert http.path == SPEECH and http.size_bytes == len(asked.body)
    assert http.digest == hashlib.sha256(asked.body).digest()
    assert http.model_at is not None and http.model_is_json
    named = asked.body[: http.model_at] + b'"theirs"' + asked.body[http.model_at :]
    assert json.loads(named) == {"input": "x", "model": "theirs"}


async def test_a_large_body_is_read_like_a_small_one(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    body = json.dumps({"model": "a", "input": "x" * 2**20}).encode()
    assert (await scene.ask(body=body)).status == 200
    [asked] = scene.server.asked
    assert asked.http is not None and asked.http.size_bytes > 2**20


async def test_a_compressed_body_is_refused(scene: Scene) -> None:
    """Nobody could find the model in it."""
    scene.serve(scene.model("a", SPEECH))
    refused = await scene.ask(headers=[*JSON, (b"content-encoding", b"gzip")])
    assert (refused.status, refused.error["param"]) == (400, "content-encoding")
    plain = await scene.ask(headers=[*JSON, (b"content-encoding", b"identity")])
    assert plain.status == 200


async def test_a_body_over_the_limit_is_refused(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    assert (await scene.ask(body=b"x" * (LIMIT_BYTES + 1))).status == 413
    assert scene.server.asked == []


# ---------------------------------------------------------------- what the client gets


async def test_the_response_is_the_servers(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    scene.server.answer = lambda id: [
        Delta(id, "", http=HttpPart(b"a", 418, ((b"content-type", b"text/plain"),))),
        Delta(id, "", http=HttpPart(b"b")),
        Delta(id, "", http=HttpPart(b"c"), finish="stop"),
    ]
    answer = await scene.ask()
    assert answer == Answer(418, {b"content-type": b"text/plain"}, b"abc", True)
    assert scene.router.in_flight == 0


async def test_a_failure_before_the_response_is_an_error_of_servekit(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    scene.server.answer = lambda id: [Failed(id, "engine_error", "it will not")]
    answer = await scene.ask()
    assert answer.status == 500 and answer.ended
    assert "it will not" in answer.error["message"]


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (EVENTS, True),
        # their length would be wrong, or the bytes could not be read
        ((*EVENTS, (b"content-length", b"9")), False),
        ((*EVENTS, (b"content-encoding", b"gzip")), False),
        (((b"content-type", b"text/plain"),), False),
    ],
)
async def test_a_failure_within_a_response_is_an_event_where_there_are_events(
    scene: Scene, headers: Any, told: bool
) -> None:
    """Elsewhere the response stays without an end, and the server closes the connection."""
    scene.serve(scene.model("a", SPEECH))
    scene.server.answer = lambda id: [
        Delta(id, "", http=HttpPart(b"data: 1\n\n", 200, headers)),
        Failed(id, "engine_error", "it will not"),
    ]
    answer = await scene.ask()
    begun, _, rest = answer.body.partition(b"\n\n")
    assert (answer.status, begun) == (200, b"data: 1")
    assert answer.ended == told
    assert rest.endswith(b"\n\n") == (b"it will not" in rest) == told


async def test_a_client_that_leaves_ends_its_request_at_the_server(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    scene.server.answer = lambda id: []
    asking = asyncio.create_task(scene.ask())
    await poll_async("the server has it", lambda: scene.server.asked)
    scene.gone.set()
    async with asyncio.timeout(10):
        answer = await asking
    assert (answer.status, answer.body) == (0, b"")
    await poll_async("the server is told", lambda: scene.server.cancelled)
    assert scene.router.in_flight == 0


async def test_a_response_that_nobody_takes_ends_the_request_at_the_server(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    scene.server.answer = lambda id: [Delta(id, "", http=HttpPart(b"a", 200))]

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        raise OSError("the connection is broken")

    scope: dict[str, Any] = {"path": SPEECH, "query_string": b"", "headers": []}
    with pytest.raises(OSError, match="broken"):
        await scene.forwarding(scope, receive, send)
    await poll_async("the server is told", lambda: scene.server.cancelled)


async def test_requests_of_a_session_are_told_from_others_where_there_are_replicas(
    scene: Scene,
) -> None:
    model = scene.model("a", SPEECH)
    [first] = model.replicas
    scene.serve(replace(model, replicas=(first, replace(first, name="a/1"))))
    await scene.ask(headers=[*JSON, (b"x-session-id", b"talk")])
    assert [call.session for call in scene.calls] == ["talk"]


# ---------------------------------------------------------------- endpoints that servekit has too

RERANK = "/v1/rerank"


async def own(scope: Any, receive: Any, send: Any) -> None:
    """servekit's own endpoint, which answers with the body."""
    message = await receive()
    assert not message.get("more_body")
    await send_json(send, message["body"], 207)


async def ask_before(scene: Scene, body: bytes, **fields: Any) -> Answer:
    return await scene.ask(RERANK, body, endpoint=scene.forwarding.before(own, ("score",)))


async def test_only_requests_for_a_model_that_lists_it_leave_servekits_endpoint(
    scene: Scene,
) -> None:
    scene.serve(scene.model("own", serves=("score",)), scene.model("theirs", RERANK))
    for body in (b'{"model": "own", "x": 1}', b'{"x": 1}'):
        answer = await ask_before(scene, body)
        assert (answer.status, answer.body) == (207, body), "the body is whole"
    answer = await ask_before(scene, b'{"model": "theirs"}')
    assert (answer.status, answer.body) == (200, b"ab")
    assert len(scene.server.asked) == 1


async def test_without_a_model_it_is_forwarded_where_the_default_one_cannot_answer(
    scene: Scene,
) -> None:
    scene.serve(scene.model("own", serves=("generate",)), scene.model("theirs", RERANK))
    assert (await ask_before(scene, b'{"x": 1}')).status == 200
    assert (await ask_before(scene, b'{"model": "own"}')).status == 207
    # an endpoint that needs no certain task is servekit's
    anything = await scene.ask(RERANK, b"{}", endpoint=scene.forwarding.before(own))
    assert anything.status == 207


async def test_where_no_model_lists_it_the_endpoint_is_servekits_own(scene: Scene) -> None:
    scene.serve(scene.model("own", serves=("score",)))
    body = b"not even JSON {" + b"x" * 10
    answer = await ask_before(scene, body)
    assert (answer.status, answer.body) == (207, body)


async def test_a_body_whose_model_cannot_be_read_is_refused(scene: Scene) -> None:
    scene.serve(scene.model("theirs", RERANK))
    assert (await ask_before(scene, b'{"model": 3}')).status == 400
    assert (await ask_before(scene, b'{"model": "z"}')).status == 404
    large = b'{"x": "' + b"x" * 2**20 + b'", "model": 3}'
    assert (await ask_before(scene, large)).status == 400
    assert (await ask_before(scene, b"x" * (LIMIT_BYTES + 1))).status == 413
    assert scene.server.asked == []


async def test_a_client_that_leaves_within_its_body_gets_nothing(scene: Scene) -> None:
    scene.serve(scene.model("theirs", RERANK))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"path": RERANK, "query_string": b"", "headers": []}
    await scene.forwarding.before(own)(scope, receive, send)
    assert sent == []


async def test_a_refusal_of_the_router_is_the_answer(scene: Scene) -> None:
    scene.serve(scene.model("a", SPEECH))
    scene.router.drain()
    assert (await scene.ask()).status == 503
