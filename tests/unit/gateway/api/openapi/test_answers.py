"""What the gateway really answers, whole and streamed, fits what its document says of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from msgspec.structs import replace

from servekit.gateway.api.openapi.document import OPERATIONS, READS, REMOVALS
from servekit.gateway.api.openapi.operation import FORM, Operation
from servekit.gateway.app import Application
from servekit.protocol.access import BatchRules, ResponseStorage
from servekit.protocol.messages import AccessRules, Topology
from tests.unit.gateway import conftest
from tests.unit.gateway.api.openapi.reading import data_of, example_of, make_document, make_reading
from tests.unit.gateway.conftest import Service
from tests.unit.gateway.hearing_engine import HearingEngine

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "ä"]}}\n</tool_call>'
SAID = [{"role": "user", "content": f"<think>Hm.</think>Let me see. {CALL}¤"}]
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ALL_OF_CHAT: dict[str, Any] = {
    "messages": SAID,
    "tools": TOOLS,
    "stop": "¤",
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
}
#: Bodies that have the answer hold whatever it can, by path.
RICH: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        ALL_OF_CHAT,
        ALL_OF_CHAT | {"stream_options": {"include_usage": True}},
        ALL_OF_CHAT | {"logprobs": False, "top_logprobs": None, "separate_reasoning": False},
    ],
    "/v1/completions": [
        {"prompt": ["ab", "cd"], "logprobs": 2, "n": 2, "max_tokens": 3},
        {"prompt": "ab", "echo": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/responses": [
        {
            "input": SAID,
            "tools": [{"type": "function", **FUNCTION}],
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 200,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
        },
        {"input": "abc", "max_output_tokens": 2},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64", "dimensions": 3}],
    "/v1/messages": [
        {
            "messages": SAID,
            "max_tokens": 500,
            "stop_sequences": ["¤"],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "thinking": {"type": "enabled", "budget_tokens": 100},
        },
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 10**6},
    ],
    "/api/chat": [
        {
            "messages": SAID,
            "tools": TOOLS,
            "options": {"stop": ["¤"], "num_predict": 500},
            "logprobs": True,
            "top_logprobs": 1,
            "think": True,
        },
        {},
    ],
    "/api/generate": [{"prompt": SAID[0]["content"], "options": {"stop": ["¤"]}, "think": True}],
    "/api/embed": [{"input": ["a", "b"], "dimensions": 3}],
    "/api/embeddings": [{"prompt": ""}],
    "/v1/audio/transcriptions": [
        {
            "response_format": "verbose_json",
            "timestamp_granularities[]": ["word", "segment"],
            "language": "german",
        }
    ],
}


@pytest.fixture
async def client(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway whose model calls tools, thinks and hears, and which stores responses."""
    monkeypatch.setattr(conftest, "EchoEngine", HearingEngine)
    [worker] = await service.up(said={"tool_parser": "hermes", "reasoning_parser": "think"})
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    batches = BatchRules(2**20, 10, 10, 1.0, 1)
    rules = AccessRules(store_responses=ResponseStorage(2**20), batches=batches)
    service.router.apply_topology(Topology((status,), access=rules))
    file = tmp_path / "responses.db"
    application = Application(service.router, 10**6, ui=False, legacy=True, responses=file)
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as client:
        yield client
    application.responses.close()
    application.batches.close()


async def post(
    client: httpx.AsyncClient, operation: Operation, body: dict[str, Any]
) -> httpx.Response:
    if operation.body != FORM:
        return await client.post(operation.path, json=body)
    form = {name: value for name, value in body.items() if name != "file"}
    return await client.post(operation.path, data=form, files={"file": ("a.wav", b"one two")})


def bodies(operation: Operation) -> list[dict[str, Any]]:
    asked = [example_of(operation), *RICH.get(operation.path, ())]
    return [body | {"model": "m"} for body in asked]


#: Those of adapters are answered by the supervisor; see test_lora.
ANSWERED = [operation for operation in OPERATIONS if operation.tag != "adapters"]


async def test_the_document_that_is_served_is_the_one_that_is_read(
    client: httpx.AsyncClient,
) -> None:
    served = (await client.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(make_document()))


@pytest.mark.parametrize("operation", ANSWERED, ids=lambda operation: operation.path)
async def test_a_whole_answer_is_as_described(
    client: httpx.AsyncClient, operation: Operation
) -> None:
    reader = make_reading()
    for body in bodies(operation):
        whole = body | ({"stream": False} if operation.pieces else {})
        answer = await post(client, operation, whole)
        assert answer.status_code == 200, answer.text
        if operation.path != "/stream":
            reader.check(operation.path, answer.json())


STREAMING = [operation for operation in OPERATIONS if operation.pieces]


@pytest.mark.parametrize("operation", STREAMING, ids=lambda operation: operation.path)
async def test_a_streamed_answer_is_as_described(
    client: httpx.AsyncClient, operation: Operation
) -> None:
    reader = make_reading()
    for body in bodies(operation):
        if body.get("response_format") == "verbose_json":
            continue  # it is not streamed
        answer = await post(client, operation, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        kind = answer.headers["content-type"].partition(";")[0]
        pieces = [answer.text] if operation.path == "/stream" else data_of(answer.text)
        assert pieces
        for piece in pieces:
            reader.check(operation.path, piece, kind)


@pytest.mark.parametrize("path", READS)
async def test_what_is_read_is_as_described(client: httpx.AsyncClient, path: str) -> None:
    reader = make_reading()
    if path.startswith(("/v1/files", "/v1/batches")):
        file = {"file": ("in.jsonl", b"{}")}
        stored = await client.post("/v1/files", data={"purpose": "batch"}, files=file)
    else:
        stored = await client.post("/v1/responses", json={"model": "m", "input": "hello"})
    if path.startswith("/v1/batches"):
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = asked | {"input_file_id": stored.json()["id"]}
        stored = await client.post("/v1/batches", json=made)
        reader.check("/v1/batches", stored.json())
        answer = await client.post(f"/v1/batches/{stored.json()['id']}/cancel")
        reader.check("/v1/batches/{id}/cancel", answer.json())
    page = path.format(model="m", id=stored.json()["id"])
    answer = await client.get(page)
    assert answer.status_code == 200
    reader.check(path, answer.json(), method="get")
    if path in REMOVALS:
        answer = await client.delete(page)
        assert answer.status_code == 200
        reader.check(path, answer.json(), method="delete")


async def test_a_reader_notices_what_is_missing_and_what_is_too_much(
    client: httpx.AsyncClient,
) -> None:
    reader = make_reading()
    answer = (await client.post("/tokenize", json={"prompt": "a"})).json()
    for wrong in (answer | {"more": 1}, {"count": 1}, answer | {"tokens": ["a"]}):
        with pytest.raises(jsonschema.ValidationError):
            reader.check("/tokenize", wrong)
