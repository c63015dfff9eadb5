"""Ollama's API over a real router and echo workers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.gateway.api.ollama import models
from servekit.gateway.api.ollama.endpoints import stay_s
from servekit.gateway.app import Application, ErrorMiddleware
from servekit.protocol.messages import AccessRules, KeyRule, Topology
from servekit.protocol.residency import ResidencyStatus
from tests.unit.gateway.conftest import DEADLINE_S, Service

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "ä"]}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
#: What ends the echo engine's answer where a model would end it itself.
END = "¤"
OPTIONS = {"stop": [END], "num_predict": 512}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def client(service: Service, **options: Any) -> httpx.AsyncClient:
    """A client of an application whose model calls tools as Hermes does, and thinks."""
    said = {"tool_parser": "hermes", "reasoning_parser": "think"}
    [worker] = await service.up(said=said, **options)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    app = Application(service.router, 2**20, ui=False)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://servekit")


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A request to which the echo engine says `text`, and then what stops it."""
    messages = [{"role": "user", "content": f"{text}{END}"}]
    return {"model": "m:latest", "messages": messages, "options": OPTIONS, **more}


async def answered(service: Service, path: str, **body: Any) -> Any:
    async with await client(service) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def lines(service: Service, path: str, **body: Any) -> list[Any]:
    async with await client(service) as http:
        answer = await http.post(path, json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def check_end(last: Any, reason: str = "stop") -> None:
    assert last["done"] is True
    assert last["done_reason"] == reason
    assert last["eval_count"] > 0
    assert sum(last[name] for name in DURATIONS[1:]) == pytest.approx(
        last["total_duration"], abs=1000
    )


async def test_a_chat_is_streamed_unless_told_otherwise(service: Service) -> None:
    *parts, last = await lines(service, "/api/chat", **chat("abc"))
    assert "".join(part["message"]["content"] for part in parts) == "abc"
    assert all(part["done"] is False and part["model"] == "m:latest" for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["prompt_eval_count"] == 4
    check_end(last)


async def test_a_whole_chat_has_it_all_in_one_object(service: Service) -> None:
    text = f"<think>Hm.</think>Well.{CALL}{CALL}"
    said = await answered(service, "/api/chat", **chat(text, stream=False, tools=[TOOL]))
    message = said["message"]
    assert (message["content"], message["thinking"]) == ("Well.", "Hm.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "look", "arguments": {"at": [1, "ä"]}}] * 2
    check_end(said)


async def test_a_stream_tells_calls_once_they_are_whole(service: Service) -> None:
    text = f"<think>Hm.</think>Well.{CALL}{CALL}"
    *parts, last = await lines(service, "/api/chat", **chat(text, tools=[TOOL]))
    messages = [part["message"] for part in parts]
    assert "".join(m.get("thinking", "") for m in messages) == "Hm."
    assert "".join(m["content"] for m in messages) == "Well."
    calls = [c["function"] for m in messages for c in m.get("tool_calls", ())]
    assert calls == [{"name": "look", "arguments": {"at": [1, "ä"]}}] * 2
    check_end(last)


async def test_thoughts_are_not_told_where_they_are_not_wanted(service: Service) -> None:
    said = await answered(
        service, "/api/chat", **chat("<think>Hm.</think>Well.", stream=False, think=False)
    )
    assert said["message"] == {"role": "assistant", "content": "Well."}


async def test_generate_answers_a_prompt(service: Service) -> None:
    body = {"model": "m", "prompt": f"abc{END}", "options": OPTIONS}
    *parts, last = await lines(service, "/api/generate", **body)
    assert "".join(part["response"] for part in parts) == "abc"
    assert last["response"] == ""
    check_end(last)


async def test_raw_takes_the_prompt_as_it_is(service: Service) -> None:
    body = {"model": "m", "prompt": "abc", "raw": True, "stream": False}
    said = await answered(service, "/api/generate", **body, options={"num_predict": 2.0})
    assert said["response"] == "ab"
    check_end(said, "length")


@pytest.mark.parametrize("limit", [-1, -2, 100_000])
async def test_num_predict_goes_no_further_than_the_context(service: Service, limit: int) -> None:
    async with await client(service, max_context=64) as http:
        body = {"model": "m", "prompt": "a" * 60, "stream": False}
        said = await http.post("/api/generate", json=body | {"options": {"num_predict": limit}})
    assert said.status_code == 200
    assert 0 < said.json()["eval_count"] <= 60


async def test_nothing_to_say_is_a_model_to_load(service: Service) -> None:
    said = await answered(service, "/api/chat", model="m")
    assert (said["done"], said["done_reason"]) == (True, "load")


async def test_log_probabilities_come_with_the_text(service: Service) -> None:
    said = await answered(service, "/api/chat", **chat("abc", stream=False, logprobs=True))
    assert [one["token"] for one in said["logprobs"]][:3] == ["a", "b", "c"]


async def test_embeddings_are_unit_vectors(service: Service) -> None:
    async with await client(service) as http:
        both = (await http.post("/api/embed", json={"model": "m", "input": ["ab", "c"]})).json()
        one = (await http.post("/api/embeddings", json={"model": "m", "prompt": "ab"})).json()
        few = (
            await http.post("/api/embed", json={"model": "m", "input": "ab", "dimensions": 3})
        ).json()
        none = (await http.post("/api/embed", json={"model": "m", "input": []})).json()
    assert both["embeddings"][0] == pytest.approx(one["embedding"])
    assert both["prompt_eval_count"] == 3
    assert math.hypot(*both["embeddings"][1]) == pytest.approx(1)
    assert len(few["embeddings"][0]) == 3
    assert math.hypot(*few["embeddings"][0]) == pytest.approx(1)
    assert none["embeddings"] == []


async def test_what_is_too_long_to_embed_is_cut_unless_told_otherwise(service: Service) -> None:
    long = "ab" * 100
    async with await client(service, max_context=64) as http:
        body = {"model": "m", "input": [long, "c", long[:63] + "b"]}
        cut = await http.post("/api/embed", json=body)
        refused = await http.post("/api/embed", json=body | {"truncate": False})
        older = await http.post("/api/embeddings", json={"model": "m", "prompt": long})
    vectors = cut.json()["embeddings"]
    assert vectors[0] == vectors[2] == pytest.approx(older.json()["embedding"])
    assert vectors[1] != vectors[0]
    assert (refused.status_code, "at most 64" in refused.json()["error"]) == (400, True)


async def test_models_are_told_as_clients_expect(service: Service) -> None:
    async with await client(service) as http:
        tags = (await http.get("/api/tags")).json()["models"]
        ps = (await http.get("/api/ps")).json()["models"]
        show = (await http.post("/api/show", json={"model": "m:latest"})).json()
        version = (await http.get("/api/version")).json()
        pull = (await http.post("/api/pull", json={"model": "m"})).json()
    assert [model["name"] for model in tags] == ["m:latest"] == [m["model"] for m in ps]
    assert {m["details"]["format"] for m in (*tags, *ps, show)} == {""}, "it has no weights"
    assert {"completion", "tools", "thinking", "embedding"} == set(show["capabilities"])
    assert show["model_info"]["echo.context_length"] == 8192
    assert version["version"]
    assert pull == {"status": "success"}


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("stays_s", "unused_s", "left_s"), [(300.0, 100.0, 200.0), (300.0, 400.0, 0.0)]
)
async def test_ps_says_when_an_unused_model_will_leave(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    stays_s: float,
    unused_s: float,
    left_s: float,
    is_used: bool,
) -> None:
    later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + unused_s)
    async with await client(service) as http:
        if is_used:
            await http.post("/api/chat", json=chat("hello", stream=False))
        monkeypatch.setattr(models, "time", later)
        route = service.router.routes["m"]
        stays = ResidencyStatus("on_demand", "resident", stays_s=stays_s)
        service.router.apply_topology(Topology((replace(route.status, residence=stays),)))
        [running] = (await http.get("/api/ps")).json()["models"]
    leaves = datetime.fromisoformat(running["expires_at"]).timestamp()
    assert leaves - time.time() == pytest.approx(left_s, abs=30)


async def test_a_tools_message_answers_the_call_of_its_name(service: Service) -> None:
    async with await client(service) as http:
        seen = service.workers[0].record_requests()
        calls: list[Any] = [
            {"function": {"name": name, "arguments": {}}} for name in ("look", "see")
        ]
        body = chat("") | {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_name": "see", "content": "seen"},
                {"role": "tool", "content": "looked"},
            ]
        }
        answer = await http.post("/api/chat", json=body)
    assert answer.status_code == 200
    _, asked, *results = seen[0].messages
    ids = {call.name: call.id for call in asked.tool_calls}
    assert [(r.name, r.tool_call_id) for r in results] == [
        ("see", ids["see"]),
        ("look", ids["look"]),
    ]


@pytest.mark.parametrize(
    ("path", "change", "status", "says"),
    [
        ("/api/chat", {"model": "nope"}, 404, "nope"),
        ("/api/show", {"model": "nope:latest"}, 404, "nope"),
        ("/api/pull", {"model": "nope"}, 404, "nope"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "images"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"num_predict": 1.5}}, 400, "options.num_predict"),
        ("/api/chat", {"options": {"seed": 1e300}}, 400, "options.seed"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"options": {"temperature": "hot"}}, 400, "options.temperature"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"prompt": "a", "template": "b"}, 400, "template"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "/api/chat"),
        ("/api/push", {}, 400, "configuration file"),
        ("/api/embed", {"input": [""]}, 400, "empty"),
    ],
)
async def test_refusals_are_ollamas(
    service: Service, path: str, change: dict[str, Any], status: int, says: str
) -> None:
    async with await client(service) as http:
        answer = await http.post(path, json=chat("abc") | change)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert says in answer.json()["error"]


async def test_a_model_is_not_removed_by_ollama_rm(service: Service) -> None:
    async with await client(service) as http:
        answer = await http.request("DELETE", "/api/delete", json={"model": "m"})
    assert answer.status_code == 400
    assert "configuration file" in answer.json()["error"]


async def test_a_model_that_does_not_think_is_not_made_to(service: Service) -> None:
    [worker] = await service.up()
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    app = Application(service.router, 2**20, ui=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as http:
        answer = await http.post("/api/chat", json=chat("abc", think=True))
    assert answer.status_code == 400
    assert "does not think" in answer.json()["error"]


async def test_the_gate_and_the_wrong_method_have_it_too(service: Service) -> None:
    async with await client(service) as http:
        wrong = await http.get("/api/chat")
        unknown = await http.post("/api/nothing")
        assert (wrong.status_code, unknown.status_code) == (405, 404)
        assert isinstance(wrong.json()["error"], str)
        assert isinstance(unknown.json()["error"], str)
        rules = AccessRules(keys=(KeyRule("a", digest=b"x" * 32),))
        status = service.router.routes["m"].status
        service.router.apply_topology(Topology((status,), access=rules))
        chat_, tags = await http.post("/api/chat"), await http.get("/api/tags")
    assert (chat_.status_code, tags.status_code) == (401, 401)
    assert isinstance(chat_.json()["error"], str)
    assert isinstance(tags.json()["error"], str)


async def test_a_failure_after_the_first_byte_is_a_last_line(service: Service) -> None:
    """The model is taken out of the file, and its worker ends, while it answers."""
    [worker] = await service.up(step_s=0.01)
    app = Application(service.router, 2**20, ui=False)
    body = chat("abc", options={"num_predict": 500})
    parts = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            service.router.apply_topology(Topology(()))
            worker.kill()

    scope = {"type": "http", "method": "POST", "path": "/api/chat", "headers": []}
    async with asyncio.timeout(DEADLINE_S):
        await app(scope, receive, send)
    *lines_, last = b"".join(message["body"] for message in sent[1:]).splitlines()
    assert lines_
    assert all(json.loads(line)["done"] is False for line in lines_)
    assert list(json.loads(last)) == ["error"]
    assert sent[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/messages", "type"), ("/api/chat", "error"), ("/v1/completions", "error")],
)
async def test_what_nobody_foresaw_has_the_envelope_of_its_path(
    service: Service, path: str, key: str
) -> None:
    await service.up()
    app = Application(service.router, 2**20, ui=False)

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    guarded = ErrorMiddleware(broken, structlog.get_logger(), app.envelopes)
    transport = httpx.ASGITransport(guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as http:
        answer = await http.post(path)
    assert answer.status_code == 500
    assert next(iter(answer.json())) == key
    assert "an internal error" in answer.text
    assert isinstance(answer.json()["error"], str) == (path == "/api/chat")


@pytest.mark.parametrize(
    ("engine", "path", "form"),
    [
        ("transformers", "/a/folder", "safetensors"),
        ("llamacpp", "/a/b.gguf", "gguf"),
        ("openai", "gpt-x", ""),
        ("echo", "", ""),
    ],
)
async def test_the_format_is_that_of_weights_that_are_here(
    service: Service, engine: str, path: str, form: str
) -> None:
    await service.up()
    route = service.router.routes["m"]
    route.status = replace(route.status, engine=engine, path=path)
    assert models.details(route).format == form


@pytest.mark.parametrize(
    ("said", "means_s"),
    [
        (0, 0.0),
        (2.5, 2.5),
        (-1, math.inf),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (" 1.5s ", 1.5),
        ("-1m", math.inf),
        ("-1", math.inf),
        ("30", 30.0),
    ],
)
def test_what_is_said_and_meant(said: float | str, means_s: float) -> None:
    assert stay_s(said) == means_s


@pytest.mark.parametrize("said", ["", "-", "soon", "m5", "5m!", "--1s"])
def test_what_is_no_duration(said: str) -> None:
    with pytest.raises(RequestError, match="keep_alive: expected a number of seconds"):
        stay_s(said)
