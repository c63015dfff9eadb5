"""What an endpoint does between the body and the answer: it waits, completes, streams and gives up.

The router and its echo worker are real; the formats are the test's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import ModelNotFound, RequestError, ServekitError
from servekit.gateway.api import image_fetching
from servekit.gateway.api.endpoint import (
    EndpointFactory,
    GenerationEndpoint,
    OpenGeneration,
    begin_stream,
    open_completed,
)
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.generation.generation import Choice, Generation, GenerationRequest
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.http.asgi import encode_error
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.http.response import asgi_endpoint
from servekit.protocol.access import ImageFetching
from servekit.protocol.messages import (
    AccessRules,
    ChatMessage,
    Delta,
    KeyRule,
    Media,
    SamplingParams,
    Topology,
)
from servekit.protocol.residency import ResidencyStatus
from tests.polling import poll_async
from tests.unit.gateway.conftest import ENDLESS, ENDLESS_TOKENS, Service

HELLO = [ChatMessage("user", "hello")]
KEYS = [(b"authorization", b"Bearer abc")]


class Plain(ResponseEncoder):
    """Answers with the text of the only choice."""

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        return json.dumps(choices[0].text).encode()


class Client:
    """Sends a request by ASGI, reads the answer as fast as it is let, and may leave."""

    def __init__(self, body: bytes = b"{}", headers: Any = ()) -> None:
        self.unread = [{"type": "http.request", "body": body}]
        self.scope: Any = {"type": "http", "headers": [*headers]}
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.status, self.body, self.ended = 0, b"", False

    async def receive(self) -> Any:
        if self.unread:
            return self.unread.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body")
        await self.reads.wait()

    async def ask(self, endpoint: Any) -> Client:
        async with asyncio.timeout(30):
            await endpoint(self.scope, self.receive, self.send)
        return self

    @property
    def said(self) -> Any:
        assert (self.status, self.ended) == (200, True), self.body
        return json.loads(self.body)

    @property
    def message(self) -> str:
        assert self.status != 200 and self.ended
        return str(json.loads(self.body)["error"]["message"])


def asked(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {"model": "m", "params": SamplingParams(max_tokens=5), "stream": False}
    return GenerationRequest(**(known | {"messages": [*HELLO]} | fields))


def answering(
    service: Service,
    parsed: Any,
    open_later: OpenGeneration | None = None,
    keys: list[str] | None = None,
) -> Any:
    """An endpoint to which every body means `parsed`."""

    def parse(body: bytes, key: str) -> Any:
        if keys is not None:
            keys.append(key)
        if isinstance(parsed, Exception):
            raise parsed
        return (parsed, Plain()) if isinstance(parsed, GenerationRequest) else parsed

    handler = GenerationEndpoint(service.router, parse, open_later).start_answer
    return asgi_endpoint(handler, 10**6, encode_error)


# ---------------------------------------------------------------- a generation


async def test_a_body_becomes_a_generation_and_its_answer(service: Service) -> None:
    await service.up()
    assert (await Client().ask(answering(service, asked()))).said == "hello"


async def test_a_wrong_body_is_refused(service: Service) -> None:
    client = await Client().ask(answering(service, RequestError("n: too many", param="n")))
    assert (client.status, client.message) == (400, "n: too many")


async def test_the_clients_key_is_told_only_where_no_keys_are_required(service: Service) -> None:
    await service.up()
    keys: list[str] = []
    await Client(headers=KEYS).ask(answering(service, asked(), keys=keys))
    service.router.access.apply_rules(AccessRules(keys=(KeyRule("k", digest=b"d"),)))
    ACTING.set(service.router.access.callers["k"])
    await Client(headers=KEYS).ask(answering(service, asked(), keys=keys))
    assert keys == ["Bearer abc", ""]


@pytest.mark.parametrize(
    ("replicas", "header", "own", "session"),
    [
        (2, b"one", "two", "one"),
        (2, b"", "two", "two"),
        (1, b"one", "two", "two"),  # it does not matter where there is no choice
    ],
)
async def test_a_session_is_named_in_a_header_or_the_body(
    service: Service, replicas: int, header: bytes, own: str, session: str
) -> None:
    await service.up(replicas)
    request = asked(session=own)
    headers = [(b"x-session-id", header)] if header else []
    assert (await Client(headers=headers).ask(answering(service, request))).said == "hello"
    assert request.session == session


# ---------------------------------------------------------------- what is completed first


async def complete(request: GenerationRequest) -> None:
    await asyncio.sleep(0)
    request.messages = [ChatMessage("user", "later")]


async def test_a_request_is_completed_before_it_is_opened(service: Service) -> None:
    await service.up()
    assert (await Client().ask(answering(service, asked(complete=complete)))).said == "later"
    await poll_async("it is counted no longer", lambda: not service.router._incomplete)


async def test_the_time_of_a_request_begins_before_it_is_completed(service: Service) -> None:
    await service.up(**ENDLESS)
    completed_s = 0.0

    async def complete(request: GenerationRequest) -> None:
        nonlocal completed_s
        completed_s = time.monotonic()

    params = SamplingParams(max_tokens=ENDLESS_TOKENS)
    request = asked(complete=complete, params=params, timeout_s=60.0)
    asking = asyncio.create_task(Client().ask(answering(service, request)))
    await poll_async("it runs", lambda: service.router._open)
    [call] = service.router._open
    assert 0 < call.created_s == request.began_s <= completed_s
    asking.cancel()


async def test_a_request_that_cannot_be_completed_is_refused(service: Service) -> None:
    await service.up()

    async def fail(request: GenerationRequest) -> None:
        raise ModelNotFound("there is no such response")

    client = await Client().ask(answering(service, asked(complete=fail)))
    assert (client.status, client.message) == (404, "there is no such response")


async def test_a_fault_of_our_own_is_an_internal_error(service: Service) -> None:
    await service.up()

    async def fail(request: GenerationRequest) -> None:
        raise ZeroDivisionError

    client = await Client().ask(answering(service, asked(complete=fail)))
    assert (client.status, client.message) == (500, "an internal error; see the logs")


async def test_an_endpoint_may_open_its_generations_in_a_way_of_its_own(service: Service) -> None:
    await service.up()

    async def open_other(router: Any, request: GenerationRequest) -> Generation:
        request.messages = [ChatMessage("user", "other")]
        return await open_completed(router, request)

    assert (await Client().ask(answering(service, asked(), open_other))).said == "other"


class Waiting:
    """A completion that never comes."""

    def __init__(self) -> None:
        self.begun = self.cancelled = False

    async def __call__(self, request: GenerationRequest) -> None:
        self.begun = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def begin_to_wait(service: Service, client: Client) -> tuple[Waiting, asyncio.Task[Client]]:
    waiting = Waiting()
    task = asyncio.create_task(client.ask(answering(service, asked(complete=waiting))))
    await poll_async("it waits", lambda: waiting.begun)
    return waiting, task


async def test_a_client_that_leaves_ends_what_its_request_waits_for(service: Service) -> None:
    await service.up()
    client = Client()
    waiting, task = await begin_to_wait(service, client)
    client.gone.set()
    await task
    await poll_async("it is given up", lambda: waiting.cancelled)
    assert (client.status, client.body) == (0, b"")
    await poll_async("it is counted no longer", lambda: not service.router._incomplete)


async def test_a_request_that_waits_is_taken_by_a_gateway_that_drains(service: Service) -> None:
    await service.up()
    go_on = asyncio.Event()

    async def wait(request: GenerationRequest) -> None:
        await go_on.wait()

    task = asyncio.create_task(Client().ask(answering(service, asked(complete=wait))))
    await poll_async("it waits", lambda: service.router._incomplete)
    service.router.drain()
    go_on.set()
    assert (await task).said == "hello"
    later = await Client().ask(answering(service, asked(complete=complete)))
    assert (later.status, later.message) == (503, "servekit is shutting down")


async def test_a_request_that_waits_is_told_of_the_end(service: Service) -> None:
    await service.up()
    waiting, task = await begin_to_wait(service, Client())
    assert service.router.fail_all()
    client = await task
    assert client.status == 503 and "send the request again" in client.message
    await poll_async("it is given up", lambda: waiting.cancelled)


async def test_requests_that_wait_hold_no_more_than_the_queue_may(service: Service) -> None:
    await service.up()
    service.router.access.apply_rules(AccessRules(max_queue_bytes=10))
    first = Client(b"x" * 6)
    _, task = await begin_to_wait(service, first)
    refused = await Client(b"x" * 5).ask(answering(service, asked(complete=complete)))
    assert refused.status == 429
    assert (await Client(b"x" * 4).ask(answering(service, asked(complete=complete)))).said
    first.gone.set()
    await task


# ---------------------------------------------------------------- which requests wait


async def waits(service: Service, request: GenerationRequest) -> bool:
    """Return whether a request is opened later than at once."""
    held: list[Any] = []
    hold = service.router.hold_incomplete

    def note(one: Any) -> None:
        held.append(one)
        hold(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.router, "hold_incomplete", note)
        client = Client()
        asking = asyncio.create_task(client.ask(answering(service, request)))
        await poll_async("it waits", lambda: held or client.ended or service.router.in_flight)
        client.gone.set()
        await asking
    return bool(held)


async def test_only_a_model_that_was_never_loaded_is_waited_for(service: Service) -> None:
    await service.up()
    status = service.router.routes["m"].status
    info = service.workers[0].runner.info
    known, unknown = replace(status, name="known", info=info), replace(status, info=None)
    stays = ResidencyStatus("on_demand", "stopped")
    lazy = replace(unknown, name="lazy", residence=stays, replicas=())
    service.router.apply_topology(Topology((unknown, known, lazy)))
    assert service.router.has_unknown
    assert await waits(service, asked(model="lazy"))
    assert not await waits(service, asked(model="known"))
    assert not await waits(service, asked(model="m"))
    assert not await waits(service, asked(model="nobody"))
    assert not await waits(service, asked(model="lazy", messages=None, prompts=["x"]))


async def test_images_that_are_to_be_fetched_are_waited_for_where_some_are(
    service: Service,
) -> None:
    await service.up()
    picture = Media(b"", "", address="http://images.example/a.png")
    message = ChatMessage("user", "what?", media=(picture,))
    assert not await waits(service, asked(messages=[message]))
    fetching = ImageFetching(("images.example",))
    service.router.access.apply_rules(AccessRules(fetch_images=fetching))
    assert await waits(service, asked(messages=[message]))
    assert not await waits(service, asked())


async def test_nothing_is_fetched_for_a_model_that_takes_no_images(service: Service) -> None:
    [worker] = await service.up()
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    fetching = AccessRules(fetch_images=ImageFetching(("images.example",)))
    service.router.apply_topology(Topology((status,), access=fetching))
    picture = Media(b"", "", address="http://images.example/a.png")
    request = asked(messages=[ChatMessage("user", "what?", media=(picture,))])
    with pytest.raises(RequestError, match="takes no images"):
        await open_completed(service.router, request)
    key = KeyRule("k", digest=b"d", models=("other",))
    service.router.access.apply_rules(replace(fetching, keys=(key,)))
    ACTING.set(ApiKey(key, 0.0))
    with pytest.raises(RequestError) as refused:
        await open_completed(service.router, request)
    assert refused.value.status == 403


async def test_images_are_fetched_in_the_name_of_the_key_else_of_the_clients_address(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have so many fetched at once."""
    [worker] = await service.up()
    info = replace(worker.runner.info, serves=("generate", "images"))
    status = replace(service.router.routes["m"].status, info=info)
    rules = AccessRules(fetch_images=ImageFetching(("images.example",)))
    service.router.apply_topology(Topology((status,), access=rules))
    names: list[str] = []

    async def note(messages: Any, rules: Any, client: str) -> Any:
        names.append(client)
        return HELLO

    monkeypatch.setattr(image_fetching, "fetch_images", note)

    async def fetch() -> None:
        picture = Media(b"", "", address="http://images.example/a.png")
        request = asked(messages=[ChatMessage("user", "what?", media=(picture,))])
        (await open_completed(service.router, request)).cancel()

    await fetch()
    ORIGIN.set(RequestContext({}, ("10.0.0.9", 1)))
    await fetch()
    ACTING.set(ApiKey(KeyRule("ada"), 0.0))
    await fetch()
    assert names == ["", "address:10.0.0.9", "key:ada"]


# ---------------------------------------------------------------- answers of the gateway's own


async def test_an_answer_in_json_needs_no_generation(service: Service) -> None:
    assert (await Client().ask(answering(service, b'{"a": 1}'))).said == {"a": 1}


def later(answer: Any) -> Callable[[], Awaitable[Any]]:
    async def make() -> Any:
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return make


async def events(*parts: bytes | Exception) -> AsyncIterator[bytes]:
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


async def test_an_answer_may_be_made_later(service: Service) -> None:
    assert (await Client().ask(answering(service, later(b'{"a": 1}')))).said == {"a": 1}
    refused = await Client().ask(answering(service, later(ModelNotFound("none"))))
    assert (refused.status, refused.message) == (404, "none")


async def test_a_stream_of_the_gateways_own_is_written_to_its_end(service: Service) -> None:
    client = await Client().ask(answering(service, later(events(b"a", b"b", b"c"))))
    assert (client.status, client.body, client.ended) == (200, b"abc", True)
    empty = await Client().ask(answering(service, later(events())))
    assert (empty.status, empty.body, empty.ended) == (200, b"", True)


async def test_an_error_before_the_first_part_of_a_stream_is_the_response(
    service: Service,
) -> None:
    refused = await Client().ask(answering(service, later(events(ModelNotFound("none")))))
    assert (refused.status, refused.message) == (404, "none")


@pytest.mark.parametrize("error", [ServekitError("broken"), ZeroDivisionError()])
async def test_an_error_within_a_stream_cuts_it(service: Service, error: Exception) -> None:
    client = await Client().ask(answering(service, later(events(b"a", error))))
    assert (client.status, client.body, client.ended) == (200, b"a", False)


async def test_a_stream_waits_for_a_client_that_does_not_read(service: Service) -> None:
    made: list[int] = []

    async def count() -> AsyncIterator[bytes]:
        for number in range(50):
            made.append(number)
            yield b"x"

    client = Client()
    client.reads.clear()
    asking = asyncio.create_task(client.ask(answering(service, later(count()))))
    await poll_async("the first part", lambda: client.status)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(made) < 10, "the others wait"
    client.reads.set()
    await asking
    assert (client.body, client.ended) == (b"x" * 50, True)


async def test_a_client_that_leaves_ends_its_stream(service: Service) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    client = Client()
    asking = asyncio.create_task(client.ask(answering(service, later(endless()))))
    await poll_async("the first part", lambda: client.body)
    client.gone.set()
    async with asyncio.timeout(30):
        await asking
        await closed.wait()


async def test_a_stream_of_parts_begins_with_the_first() -> None:
    assert [part async for part in await begin_stream(events(b"a", b"b"))] == [b"a", b"b"]


# ---------------------------------------------------------------- calls, and plain answers


class Calls:
    """Calls that are answered when the test says so."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.result: asyncio.Future[list[Delta]] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.cancelled += 1
        if not self.result.done():
            self.result.set_exception(RequestError("cancelled"))

    async def answers(self) -> list[Delta]:
        return await self.result


def combining(calls: Calls, keys: list[str] | None = None) -> Any:
    def parse(body: bytes, key: str) -> Any:
        if keys is not None:
            keys.append(key)
        return calls, lambda answers: json.dumps([one.text for one in answers]).encode()

    return EndpointFactory(100, encode_error).calls(parse)


async def test_the_answers_of_several_calls_are_one() -> None:
    calls, keys = Calls(), list[str]()
    calls.result.set_result([Delta(1, "a"), Delta(2, "b")])
    assert (await Client(headers=KEYS).ask(combining(calls, keys))).said == ["a", "b"]
    assert keys == ["Bearer abc"]
    assert calls.cancelled == 1, "what is left of them"


async def test_a_failure_of_calls_is_the_response_and_cancels_them_all() -> None:
    calls = Calls()
    calls.result.set_exception(ModelNotFound("none"))
    client = await Client().ask(combining(calls))
    assert (client.status, client.message, calls.cancelled) == (404, "none", 1)


async def test_a_client_that_leaves_cancels_its_calls() -> None:
    calls, client = Calls(), Client()
    client.gone.set()
    await client.ask(combining(calls))
    assert calls.cancelled == 2


async def test_a_body_over_the_limit_is_not_parsed() -> None:
    calls = Calls()
    assert (await Client(b"x" * 101).ask(combining(calls))).status == 413
    plain = EndpointFactory(100, encode_error).plain(lambda body: body)
    assert (await Client(b"x" * 101).ask(plain)).status == 413
    assert (await Client(b'"x"').ask(plain)).said == "x"


async def test_a_wrong_body_of_a_plain_endpoint_is_refused() -> None:
    def parse(body: bytes) -> bytes:
        raise RequestError("n: too many", param="n")

    client = await Client().ask(EndpointFactory(100, encode_error).plain(parse))
    assert client.message == "n: too many"


async def test_a_client_that_leaves_ends_a_generation_that_was_completed(service: Service) -> None:
    await service.up(**ENDLESS)
    request = asked(complete=complete, params=SamplingParams(max_tokens=ENDLESS_TOKENS))
    client = Client()
    asking = asyncio.create_task(client.ask(answering(service, request)))
    await poll_async("it runs", lambda: service.workers[0].running)
    client.gone.set()
    await asking
    await poll_async("the worker is told", lambda: not service.workers[0].running)
    assert service.router.in_flight == 0
