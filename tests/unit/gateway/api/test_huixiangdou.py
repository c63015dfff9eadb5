"""HuixiangDou's LLM server over a real router and echo workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from servekit.gateway.api.huixiangdou import StreamEncoder, event
from servekit.gateway.app import Application
from servekit.gateway.generation.generation import Generation, GenerationChunk
from servekit.gateway.tool_parsing import Text
from servekit.protocol.messages import (
    AccessRules,
    KeyRule,
    ReplicaStatus,
    Topology,
    WorkerState,
)
from tests.unit.gateway.conftest import DEADLINE_S, EchoWorker, Service, until


def client(service: Service) -> httpx.AsyncClient:
    app = Application(service.router, 2**20, ui=False, legacy=True)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://servekit")


async def asked(service: Service, path: str = "/inference", **body: Any) -> httpx.Response:
    async with client(service) as http, asyncio.timeout(DEADLINE_S):
        return await http.post(path, json=body)


async def up(service: Service, tokens: int, **options: Any) -> EchoWorker:
    """A worker whose answers have so many tokens; these requests say nothing of it."""
    [worker] = await service.up(said={"sampling": {"max_tokens": tokens}}, **options)
    return worker


def replica(state: WorkerState, reason: str = "") -> ReplicaStatus:
    """One that is not there to be connected to."""
    return ReplicaStatus("w", state, "/nowhere", 1, "cpu", reason=reason)


def texts_of(body: bytes) -> list[str]:
    """The texts of a stream's events, put together as the standard says."""
    parts = body.decode().split("\r\n\r\n")
    assert parts.pop() == ""
    lines = [part.split("\r\n") for part in parts]
    assert all(line.startswith("data: ") for part in lines for line in part)
    return ["\n".join(line[6:] for line in part) for part in lines]


@pytest.mark.parametrize(
    "more",
    [
        {"history": [["q", "a"], ["q", None], ["q", ""]], "backend": "local"},
        {"history": [], "remote": False},
        {"backend": "kimi", "remote": True, "history": None},
        {},
    ],
)
async def test_inference_takes_every_form_that_clients_have_had(
    service: Service, more: dict[str, Any]
) -> None:
    await up(service, 2)
    answer = await asked(service, prompt="你好", **more)
    assert answer.status_code == 200
    assert answer.json() == {"text": "你好", "error": ""}


async def test_history_is_a_conversation_and_answers_are_greedy(service: Service) -> None:
    [worker] = await service.up()
    seen = worker.record_requests()
    await asked(service, prompt="c", history=[["a", "b"], [None, "x"]], backend="local")
    assert [(m.role, m.content) for m in seen[0].messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert seen[0].params.temperature == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": 1}',
        b'{"prompt": ""}',
        b'{"prompt": "a", "history": [["q"]]}',
        b'{"prompt": "' + b"a" * 9000 + b'"}',
        b" " * (2**20 + 1),
    ],
)
async def test_whatever_is_wrong_the_status_is_200_and_the_error_a_sentence(
    service: Service, body: bytes
) -> None:
    await service.up()
    async with client(service) as http:
        answer = await http.post("/inference", content=body)
        stream = await http.post("/stream", content=body)
    assert answer.status_code == 200
    assert answer.json()["text"] == ""
    assert len(answer.json()["error"]) > 5
    assert 400 <= stream.status_code < 500  # its client prints what comes with 200


async def test_a_key_that_is_missing_is_such_an_error(service: Service) -> None:
    await service.up()
    async with client(service) as http:
        status = service.router.routes["m"].status
        access = AccessRules(keys=(KeyRule("a", digest=b"x" * 32),))
        service.router.apply_topology(Topology((status,), access=access))
        answer = await http.post("/inference", json={"prompt": "a"})
        stream = await http.post("/stream", json={"prompt": "a"})
    assert answer.status_code == 200
    assert "API key" in answer.json()["error"]
    assert stream.status_code == 401


async def test_another_method_is_no_request_to_it(service: Service) -> None:
    await service.up()
    async with client(service) as http:
        assert (await http.get("/inference")).status_code == 405


async def test_it_is_not_there_unless_the_file_says_so(service: Service) -> None:
    await service.up()
    app = Application(service.router, 2**20, ui=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as http:
        assert (await http.post("/inference", json={"prompt": "a"})).status_code == 404


async def test_backend_may_name_a_model(service: Service) -> None:
    await up(service, 1)
    status = service.router.routes["m"].status
    gone = replace(status, name="other", aliases=("remote",), replicas=())
    service.router.apply_topology(Topology((status, gone)))
    first = (await asked(service, prompt="a", backend="local")).json()
    named = (await asked(service, prompt="a", backend="remote")).json()
    assert first["text"] == "a"
    assert "'other' cannot serve" in named["error"]


async def test_a_model_that_is_coming_is_waited_for(service: Service) -> None:
    """At a gateway that has never seen it ready, where others are told at once to come again."""
    worker = await service.worker(said={"sampling": {"max_tokens": 3}})
    service.tell(worker.status("loading"))
    async with client(service) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        waiting = asyncio.create_task(http.post("/inference", json={"prompt": "abc"}))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        service.tell(worker.status())
        answer = await asyncio.wait_for(waiting, DEADLINE_S)
    assert answer.json() == {"text": "abc", "error": ""}


async def test_a_model_that_will_not_come_is_not(service: Service) -> None:
    service.tell(replica("failed", "out of memory"))
    assert "out of memory" in (await asked(service, prompt="a")).json()["error"]


async def test_who_goes_away_while_waiting_is_forgotten(service: Service) -> None:
    service.tell(replica("loading"))
    app = Application(service.router, 2**20, ui=False, legacy=True)
    parts = [{"type": "http.request", "body": b'{"prompt": "a"}'}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/inference", "headers": []}
    async with asyncio.timeout(DEADLINE_S):
        await app(scope, receive, send)
    assert not sent


async def test_a_stream_is_events_of_text_alone(service: Service) -> None:
    text = "Eins,  zwei\n\ndrei.\r\nVier \t"
    await up(service, len(text), step_s=0.002)
    answer = await asked(service, "/stream", prompt=text, history=[], backend="local")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-encoding" not in answer.headers
    events = texts_of(answer.content)
    assert "".join(events) == text.replace("\r\n", "\n")
    assert len(events) > 5
    assert all(one == one.rstrip() for one in events[:-1])  # the client would lose it


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a b", "data: a b\r\n\r\n"),
        ("a\nb\r\nc", "data: a\r\ndata: b\r\ndata: c\r\n\r\n"),
        ("\n\nb", "data: \r\ndata: \r\ndata: b\r\n\r\n"),
    ],
)
def test_a_line_break_is_a_line_of_the_same_event(text: str, written: str) -> None:
    assert event(text) == written.encode()


def test_white_space_goes_with_what_follows() -> None:
    form, turn = StreamEncoder(), cast(Generation, None)
    pieces = [[GenerationChunk(0, [Text(text)])] for text in ("a \r", "\n", "b", " ")]
    said = [form.encode_chunks(turn, piece) for piece in pieces]
    assert said == [event("a"), b"", event(" \r\nb"), b""]
    assert form.encode_end(turn) == event(" ")


async def test_a_stream_that_fails_is_cut_off(service: Service) -> None:
    """The model is taken out of the file, and its worker ends, while it answers."""
    [worker] = await service.up(step_s=0.005)
    app = Application(service.router, 2**20, ui=False, legacy=True)
    parts = [{"type": "http.request", "body": json.dumps({"prompt": "a" * 500}).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            service.router.apply_topology(Topology(()))
            worker.kill()

    scope = {"type": "http", "method": "POST", "path": "/stream", "headers": []}
    async with asyncio.timeout(DEADLINE_S):
        await app(scope, receive, send)
    assert sent[0]["status"] == 200
    assert all(message["more_body"] for message in sent[1:])  # so that the server cuts it off
    assert set("".join(texts_of(b"".join(m["body"] for m in sent[1:])))) == {"a"}
    await until(lambda: service.router.in_flight == 0)
