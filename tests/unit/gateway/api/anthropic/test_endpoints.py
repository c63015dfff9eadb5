"""Anthropic's Messages API over a real router and echo workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.gateway.api.anthropic.response import error_body
from servekit.gateway.app import Application
from servekit.protocol.messages import AccessRules, KeyRule, Topology
from tests.unit.gateway.conftest import DEADLINE_S, Service

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "ä"]}}\n</tool_call>'
TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
#: What ends the echo engine's answer where a model would end it itself.
END = "¤"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (418, "invalid_request_error")),
        *((500, "api_error"), (502, "api_error"), (503, "overloaded_error")),
    ],
)
def test_each_status_has_its_type_of_error(status: int, kind: str) -> None:
    assert error_body(status, "no")["error"] == {"type": kind, "message": "no"}


async def client(service: Service, **options: Any) -> httpx.AsyncClient:
    """A client of an application whose model calls tools as Hermes does, and thinks."""
    said = {"tool_parser": "hermes", "reasoning_parser": "think"}
    [worker] = await service.up(said=said, **options)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    app = Application(service.router, 2**20, ui=False)
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://servekit")


def asking(text: str, **more: Any) -> dict[str, Any]:
    """A request to which the echo engine says `text`, and then what stops it."""
    messages = [{"role": "user", "content": f"{text}{END}"}]
    return {"model": "m", "max_tokens": 512, "messages": messages, "stop_sequences": [END], **more}


async def said(service: Service, **body: Any) -> Any:
    async with await client(service) as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(service: Service, **body: Any) -> list[Any]:
    async with await client(service) as http:
        answer = await http.post("/v1/messages", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


async def test_a_message_says_what_was_used_and_which_stop_sequence_ended_it(
    service: Service,
) -> None:
    message = await said(service, **asking("abc"))
    assert message["content"] == [{"type": "text", "text": "abc"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", END)
    assert message["usage"]["input_tokens"] == 4
    assert message["usage"]["output_tokens"] >= 4  # the engine's last step may go further
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")


async def test_a_call_is_a_block_of_its_own(service: Service) -> None:
    message = await said(service, **asking(f"Well.{CALL}{CALL}", tools=[TOOL]))
    text, *calls = message["content"]
    assert text == {"type": "text", "text": "Well."}
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [
        ("tool_use", "look", {"at": [1, "ä"]})
    ] * 2
    assert calls[0]["id"] != calls[1]["id"]
    assert message["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_off_is_a_stop_sequence(service: Service) -> None:
    cut = CALL.partition('"at"')[0]
    message = await said(service, **asking(cut, tools=[TOOL]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", END)
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert "INVALID_JSON" in message["content"][0]["input"]
    events = await streamed(service, **asking(cut, tools=[TOOL]))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": END}


async def test_a_stream_says_the_same_as_the_whole(service: Service) -> None:
    body = asking(f"<think>Hm.</think>Well.{CALL}{CALL}", tools=[TOOL])
    thinking = {"type": "enabled", "budget_tokens": 100}
    events = await streamed(service, **body, thinking=thinking)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    content: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            [(_, text)] = [(k, v) for k, v in event["delta"].items() if k != "type"]
            key = {"text_delta": "text", "thinking_delta": "thinking"}.get(event["delta"]["type"])
            block_ = content[event["index"]]
            block_[key or "json"] = block_.get(key or "json", "") + text
    for one in content[2:]:
        one["input"] = json.loads(one.pop("json"))
        one.pop("id")
    assert content == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Well."},
        *[{"type": "tool_use", "name": "look", "input": {"at": [1, "ä"]}}] * 2,
    ]
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["input_tokens"] == len(body["messages"][0]["content"])


@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_a_streams_beginning_says_how_long_the_prompt_is(
    service: Service, step_s: float
) -> None:
    """Whether its answer comes at once or token by token."""
    async with await client(service, step_s=step_s) as http:
        answer = await http.post("/v1/messages", json=asking("abcdef", stream=True))
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line[:6] == "data: "]
    usage = events[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, 0)
    assert events[-2]["usage"]["input_tokens"] == 7


async def test_thoughts_are_left_out_unless_asked_for(service: Service) -> None:
    body = asking("<think>Hm.</think>Well.")
    message = await said(service, **body)
    assert message["content"] == [{"type": "text", "text": "Well."}]
    events = await streamed(service, **body)
    assert "thinking" not in json.dumps(events)


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        ("abc", {"max_tokens": 2}, "max_tokens"),
        ("a" * 90, {"max_tokens": 100_000, "stop_sequences": []}, "model_context_window_exceeded"),
    ],
)
async def test_the_reason_tells_the_limit_asked_for_from_the_contexts_end(
    service: Service, text: str, more: Any, reason: str
) -> None:
    message = await said(service, max_context=128, **{**asking(text), **more})
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)


async def test_a_prefill_is_gone_on_with(service: Service) -> None:
    [worker] = await service.up()
    seen = worker.record_requests()
    app = Application(service.router, 2**20, ui=False)
    body = asking("x")
    body["messages"] = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": [{"type": "text", "text": "1, 2,"}]},
    ]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://servekit"
    ) as http:
        answer = await http.post(
            "/v1/messages", json=body | {"stop_sequences": [], "max_tokens": 5}
        )
    assert answer.json()["content"][0]["text"] == "1, 2,"
    assert seen[0].continues
    assert [m.role for m in seen[0].messages] == ["user", "assistant"]


async def test_tokens_are_counted_without_generating(service: Service) -> None:
    async with await client(service) as http:
        counted = await http.post(
            "/v1/messages/count_tokens",
            json={"model": "m", "system": "x", "messages": [{"role": "user", "content": "abcde"}]},
        )
    assert counted.json() == {"input_tokens": 5}  # a chat is its last message, to the echo engine


@pytest.mark.parametrize(
    ("change", "status", "kind", "says"),
    [
        ({"model": "nope"}, 404, "not_found_error", "nope"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         400, "invalid_request_error", "an image's source is of type base64 or url"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "see"}},
         400, "invalid_request_error", "'see'"),
        ({"tools": [TOOL, TOOL]}, 400, "invalid_request_error", "two named 'look'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         400, "invalid_request_error", "web_search_20250305"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9999}},
         400, "invalid_request_error", "less than max_tokens"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
    ],
)  # fmt: skip
async def test_refusals_have_anthropics_envelope(
    service: Service, change: dict[str, Any], status: int, kind: str, says: str
) -> None:
    body = {k: v for k, v in (asking("abc") | change).items() if v is not None}
    async with await client(service) as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
    assert says in answer.json()["error"]["message"]


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(
    service: Service,
) -> None:
    async with await client(service) as http:
        answer = await http.post("/v1/messages", json=asking("a" * 9000))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long: this model's maximum context length is 8192")


async def test_a_thread_is_refused_so_that_the_client_goes_on_without(service: Service) -> None:
    async with await client(service) as http:
        answer = await http.post("/v1/messages", json=asking("abc", thread={"type": "create"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_what_has_no_effect_is_taken(service: Service) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    async with await client(service) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = asking("abc", context_management={"edits": edits})
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "servekit-warning" not in answer.headers


async def test_the_gate_and_the_wrong_method_have_it_too(service: Service) -> None:
    async with await client(service) as http:
        wrong = await http.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        unknown = await http.get("/v1/messages/batches")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["type"] == "not_found_error"
        rules = AccessRules(keys=(KeyRule("a", digest=b"x" * 32),))
        status = service.router.routes["m"].status
        service.router.apply_topology(Topology((status,), access=rules))
        answer = await http.post("/v1/messages", json=asking("abc"))
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_failure_after_the_first_byte_is_an_event(service: Service) -> None:
    """The model is taken out of the file, and its worker ends, while it answers."""
    [worker] = await service.up(step_s=0.01)
    app = Application(service.router, 2**20, ui=False)
    body = asking("abc", stream=True) | {"stop_sequences": [], "max_tokens": 500}
    parts = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            service.router.apply_topology(Topology(()))
            worker.kill()

    path = "/v1/messages"
    async with asyncio.timeout(DEADLINE_S):
        await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    assert sent[0]["status"] == 200
    assert sent[1]["body"].startswith(b"event: message_start\n")
    assert sent[-1]["body"].startswith(b"event: error\ndata: ")
    assert json.loads(sent[-1]["body"].split(b"data: ")[1])["error"]["type"] == "overloaded_error"
