"""Requests of all kinds, over a real router and an echo worker, leave nothing to be collected."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest
from msgspec.structs import replace

from servekit.gateway.app import Application, ErrorMiddleware
from servekit.gateway.server import serving
from servekit.protocol.messages import Topology
from tests.unit.gateway.conftest import Service, until

if TYPE_CHECKING:  # thousands of modules, which only a process that runs its tests needs
    import anthropic

TALK = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "x" * 5000}]
CHAT = {"model": "m", "messages": TALK, "max_tokens": 5}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

WHOLE: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", CHAT | {"messages": 3}, 400),
    ("/v1/chat/completions", CHAT | {"messages": LONG}, 400),
    ("/v1/chat/completions", CHAT | {"messages": LONG, "stream": True}, 400),
    ("/v1/chat/completions", CHAT | {"messages": LONG, "n": 2}, 400),
    ("/v1/chat/completions", CHAT | {"response_format": SCHEMA}, 400),
    ("/v1/chat/completions", CHAT | {"n": 2}, 200),
    ("/v1/chat/completions", CHAT | {"timeout_s": 0.001, "max_tokens": 900}, 504),
    ("/v1/chat/completions", {"model": "m", "tools": TOOLS, "messages":
        [{"role": "user", "content": CALLED}]}, 200),
    ("/v1/completions", {"model": "m", "prompt": "x" * 5000}, 400),
    ("/v1/messages", CHAT, 200),
    ("/v1/messages", CHAT | {"messages": LONG}, 400),
    ("/v1/messages/count_tokens", {"model": "m", "messages": TALK}, 200),
    ("/v1/responses", {"model": "m", "input": "hello"}, 200),
    ("/v1/responses", {"model": "m", "input": "x" * 5000}, 400),
    ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}, 200),
    ("/v1/embeddings", {"model": "m", "input": "x" * 5000}, 400),
    ("/tokenize", {"model": "m", "prompt": "hello"}, 200),
    ("/api/chat", {"model": "m", "messages": TALK, "stream": False}, 200),
    ("/api/chat", {"model": "m", "messages": LONG}, 400),
    ("/inference", {"prompt": "hello"}, 200),
    ("/v1/models/none", {}, 405),
    ("/none", {}, 404),
]  # fmt: skip
#: Streams that are left by their client after their first bytes.
LEFT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 1900, "stream": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1900, "stream": True, "n": 2}),
    ("/v1/messages", CHAT | {"max_tokens": 1900, "stream": True}),
    ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 1900, "stream": True}),
    ("/api/chat", {"model": "m", "messages": TALK, "options": {"num_predict": 1900}}),
]


@contextmanager
def nothing_for_the_collector() -> Iterator[None]:
    """Gateways freeze what they begin with, and collections are rare: cycles would pile up."""
    gc.freeze()  # and look at nothing that was there before
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [said for one in gc.garbage if (said := ours(one))] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()


def ours(one: object) -> str:
    """What this is, where it is the service's and not the test's."""
    if isinstance(one, FrameType):
        code = one.f_code
        return code.co_qualname if "/servekit/" in code.co_filename else ""
    kind = type(one)
    return kind.__qualname__ if kind.__module__.startswith(("servekit.", "uvicorn.")) else ""


@pytest.fixture
async def port(service: Service) -> Any:
    """Of an application whose slow model calls tools as Hermes does."""
    said = {"tool_parser": "hermes", "sampling": {"max_tokens": 100}}
    [worker] = await service.up(said=said, step_s=0.002, max_context=2048)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    app = Application(service.router, 2**20, ui=False, legacy=True)
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(app, listener, app.exchanges, 2**20):
        yield listener.getsockname()[1]


async def begun(
    port: int, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize(("path", "body", "status"), WHOLE)
async def test_an_answer_leaves_nothing_for_the_collector(
    service: Service, port: int, path: str, body: dict[str, Any], status: int
) -> None:
    async def once() -> None:
        reader, writer = await begun(port, path, body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == b"%d" % status
        [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        await reader.readexactly(int(length.split(b": ")[1]))
        writer.close()
        await writer.wait_closed()

    await once()  # what the first one imports and compiles is no matter
    with nothing_for_the_collector():
        await once()
        await until(lambda: not service.router.in_flight)
        await settled()


@pytest.mark.parametrize(("path", "body"), LEFT)
async def test_a_stream_that_is_left_leaves_nothing_for_the_collector(
    service: Service, port: int, path: str, body: dict[str, Any]
) -> None:
    async def once() -> None:
        reader, writer = await begun(port, path, body)
        assert await reader.read(50)
        writer.transport.abort()
        await until(lambda: not service.router.in_flight, "its call is cancelled")
        [worker] = service.workers
        await until(lambda: worker.running == 0)
        assert not any(step.finish for step in worker.steps), "it has not ended by itself"

    await once()
    with nothing_for_the_collector():
        await once()
        await settled()


async def settled() -> None:
    """The server has seen the ends of its connections, and their tasks have ended."""
    mine = asyncio.current_task()

    def over() -> bool:
        busy = {task.get_coro().__qualname__ for task in asyncio.all_tasks() if task is not mine}  # type: ignore[union-attr]
        return not any("respond" in name or "Protocol" in name for name in busy)

    await until(over)


@asynccontextmanager
async def anthropic_client(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own client of a service with the models a to e."""

    import anthropic

    [worker] = await service.up()
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology(tuple(replace(status, name=name) for name in "abcde")))
    transport = httpx2.ASGITransport(app=Application(service.router, 2**20, ui=False))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(
            api_key="x", base_url="http://servekit", http_client=http, max_retries=0
        )


async def test_anthropics_client_reads_the_models_page_by_page(service: Service) -> None:
    async with anthropic_client(service) as client:
        first = await client.models.list(limit=2)
        assert [model.id for model in first.data] == ["a", "b"] and first.has_more
        assert [model.id async for model in client.models.list(limit=2)] == list("abcde")
        before = await client.models.list(limit=2, before_id="e")
        assert [model.id for model in before.data] == ["c", "d"] and before.has_more
        rest = await client.models.list(after_id="c", limit=1000)
        assert [model.id for model in rest.data] == ["d", "e"] and not rest.has_more
        assert not (await client.models.list(after_id="e")).data
        assert len((await client.models.list()).data) == 5


@pytest.mark.parametrize(
    ("query", "said"),
    [
        *(({"limit": limit}, "limit") for limit in ("0", "1001", "-1", "x", "9" * 5000, "")),
        ({"after_id": "none"}, "after_id"),
        ({"before_id": ""}, "before_id"),
    ],
)
async def test_a_wrong_page_is_refused_by_name(
    service: Service, query: dict[str, str], said: str
) -> None:
    import anthropic

    async with anthropic_client(service) as client:
        with pytest.raises(anthropic.BadRequestError, match=said):
            await client.models.list(extra_query=query)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1/nothing", ""),
    ],
)
async def test_a_wrong_base_url_is_told(service: Service, path: str, meant: str) -> None:
    async with anthropic_client(service) as client:
        answer = await client._client.post(f"http://servekit{path}", json={})
    assert answer.status_code == 404
    said = f"it is {meant}: the client's base URL is wrong" if meant else "see /docs"
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message == f"there is no POST {path} here; {said}"


async def test_anthropics_client_gets_errors_of_models_in_its_format(service: Service) -> None:
    import anthropic

    async with anthropic_client(service) as client:
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.models.retrieve("none")
        assert error.value.type == "not_found_error"
        body = error.value.body
        assert isinstance(body, dict) and body["type"] == "error" and "none" in str(body["error"])
        plain = await client._client.get("http://servekit/v1/models/none")
        assert plain.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("ui", "status"), [(True, 400), (False, 404)])
async def test_pages_ask_for_transcripts_below_their_own_address(
    service: Service, ui: bool, status: int
) -> None:
    await service.up()
    app = Application(service.router, 2**20, ui=ui)
    outer = ErrorMiddleware(app, None, count=app.count)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(outer)) as client:
        form: dict[str, Any] = {"data": {"model": "m"}, "files": {"file": b"RIFF"}}
        answer = await client.post("http://servekit/ui/v1/audio/transcriptions", **form)
    assert answer.status_code == status
    counted = app.router.measures.answers
    if ui:  # by the router, as the echo engine hears nothing
        assert "'m'" in answer.text and "transcribe" in answer.text
        assert counted == {("/v1/audio/transcriptions", 400): 1}
