"""Presets at the gateway: names of their own, one queue, and what a request leaves out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.config.keys import fast_digest
from servekit.errors import Forbidden, ModelNotFound, ModelUnavailable, Unsupported
from servekit.gateway.app import Application
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.preset_route import complete_chat, complete_params, presets_of
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.ui.status_html import list_choices, render_status
from servekit.protocol.messages import (
    AccessRules,
    ChatMessage,
    KeyRule,
    ModelInfo,
    ModelStatus,
    Preset,
    SamplingParams,
    Topology,
)
from tests.unit.gateway.conftest import Service, until

SALT = b"s" * 32
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}
FAST = Preset("fast", {"temperature": 0.5, "max_tokens": 3}, "Be short.", OFF)
USER = ChatMessage("user", "abc")
BRIEF = ChatMessage("system", "Be short.")


def tell(service: Service, *presets: Preset, rules: AccessRules | None = None) -> None:
    """The workers there are, and these presets."""
    replicas = tuple(worker.status() for worker in service.workers)
    model = ModelStatus("m", "echo", "-", 7, replicas, aliases=("alias",), presets=presets)
    service.router.apply_topology(Topology((model,), access=rules or AccessRules()))


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose model has the preset `fast`."""
    await service.up()
    tell(service, FAST)
    app = Application(service.router, 10**6, ui=False)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as client:
        yield client


@pytest.fixture
def opened(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[InflightRequest]:
    """The calls of the router, as they come."""
    calls: list[InflightRequest] = []
    take = service.router.queue_call

    def open(call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
        calls.append(call)
        return take(call, timeout_s)

    monkeypatch.setattr(service.router, "queue_call", open)
    return calls


def route(preset: Preset) -> ModelQueue:
    [made] = presets_of(ModelQueue(ModelStatus("m", "echo", "-", 0, (), presets=(preset,))))
    return made


def ask(model: str, tokens: int | None = None) -> InflightRequest:
    params = complete_params(route(FAST), SamplingParams(max_tokens=tokens, seed=0))
    return InflightRequest(model, params, prompt="abc", stream=False)


# ---- values


def test_it_sets_what_is_left_out_and_nothing_else() -> None:
    made = complete_params(route(FAST), SamplingParams(top_p=0.9))
    assert made == SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, clamp=True)
    sent = SamplingParams(max_tokens=5, temperature=0.0)
    assert complete_params(route(FAST), sent) == sent
    assert complete_params(ModelQueue(ModelStatus("m", "echo", "-", 0, ())), sent) is sent


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ([USER], [BRIEF, USER]),
        ([ChatMessage("system", "Be long."), USER], [ChatMessage("system", "Be long."), USER]),
        ([ChatMessage("system", ""), USER], [ChatMessage("system", ""), USER]),
        ([USER, ChatMessage("system", "Stop.")], [USER, ChatMessage("system", "Stop.")]),
    ],
)
def test_its_system_message_is_for_chats_without_one(
    messages: list[ChatMessage], seen: list[ChatMessage]
) -> None:
    before = [*messages]
    assert complete_chat(route(FAST), messages, {})[0] == seen
    assert messages == before


@pytest.mark.parametrize(
    ("ours", "defaults", "sent", "seen"),
    [
        ({"a": 1, "b": 1}, {}, {"b": 2}, {"a": 1, "b": 2}),
        (OFF, {}, {"enable_thinking": True}, {"enable_thinking": True}),  # either name is enough
        (OFF, {}, {"thinking_budget": 9}, {**OFF, "thinking_budget": 9}),
        (ON, OFF, {}, ON),  # Anthropic's default is no wish of the client
        (ON, {}, OFF, OFF),
        ({}, OFF, {"a": 1}, {**OFF, "a": 1}),
    ],
)
def test_variables_of_the_client_go_before_its_own_and_these_before_the_apis(
    ours: dict[str, Any], defaults: dict[str, Any], sent: dict[str, Any], seen: dict[str, Any]
) -> None:
    preset = Preset("p", {}, template=ours)
    assert complete_chat(route(preset), [USER], sent, defaults) == ([USER], seen)


# ---- requests

CHAT = {"model": "fast", "messages": [{"role": "user", "content": "abc"}]}
MESSAGES = CHAT | {"max_tokens": 2}
RESPONSES = {"model": "fast", "input": "abc"}
GENERATE = {"model": "fast", "prompt": "abc", "stream": False}
OLLAMA = CHAT | {"stream": False}
OPTIONS = {"options": {"temperature": 0, "num_predict": 2}}


@pytest.mark.parametrize(
    ("path", "body", "temperature", "tokens", "system", "template"),
    [
        ("/v1/chat/completions", CHAT, 0.5, 3, "Be short.", OFF),
        (
            "/v1/chat/completions",
            CHAT | {"temperature": 0, "max_tokens": 2},
            0,
            2,
            "Be short.",
            OFF,
        ),
        (
            *("/v1/chat/completions", CHAT | {"reasoning_effort": "low"}, 0.5, 3, "Be short."),
            {**ON, "reasoning_effort": "low"},
        ),
        ("/v1/responses", RESPONSES, 0.5, 3, "Be short.", OFF),
        ("/v1/responses", RESPONSES | {"instructions": "Be long."}, 0.5, 3, "Be long.", OFF),
        ("/v1/messages", MESSAGES, 0.5, 2, "Be short.", OFF),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "adaptive"}}, 0.5, 2, "Be short.", ON),
        ("/api/chat", OLLAMA, 0.5, 3, "Be short.", OFF),
        ("/api/chat", OLLAMA | OPTIONS, 0, 2, "Be short.", OFF),
        ("/api/generate", GENERATE, 0.5, 3, "Be short.", OFF),
        ("/api/generate", GENERATE | {"system": "Be long."}, 0.5, 3, "Be long.", OFF),
        ("/api/generate", GENERATE | {"raw": True}, 0.5, 3, None, None),
        ("/v1/completions", {"model": "fast", "prompt": "abc"}, 0.5, 16, None, None),
    ],
)
async def test_every_api_knows_it(
    http: httpx.AsyncClient,
    opened: list[InflightRequest],
    path: str,
    body: dict[str, Any],
    temperature: float,
    tokens: int,
    system: str | None,
    template: dict[str, Any] | None,
) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["model"]) == (200, "fast"), answer.text
    [call] = opened
    assert (call.params.temperature, call.params.max_tokens) == (temperature, tokens)
    first = None if call.messages is None else call.messages[0]
    assert first == (None if system is None else ChatMessage("system", system))
    assert call.more.get("template") == template


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", CHAT),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/messages/count_tokens", CHAT | {"thinking": {"type": "disabled"}}),
    ],
)
async def test_a_prompt_is_counted_as_it_would_be_read(
    http: httpx.AsyncClient, opened: list[InflightRequest], path: str, body: dict[str, Any]
) -> None:
    assert (await http.post(path, json=body)).status_code == 200
    [call] = opened
    assert (call.messages, call.more["template"]) == ([BRIEF, USER], OFF)


async def test_the_model_itself_has_none_of_it(
    http: httpx.AsyncClient, opened: list[InflightRequest]
) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | {"model": "alias"})
    assert answer.json()["model"] == "m"
    [call] = opened
    assert (call.params, call.messages, call.more) == (SamplingParams(), [USER], {})


async def test_its_length_is_no_demand(service: Service, http: httpx.AsyncClient) -> None:
    """As the model's own `max_tokens`, it ends where the context does."""
    tell(service, Preset("long", {"max_tokens": 10**6}))
    answer = await http.post("/v1/chat/completions", json=CHAT | {"model": "long"})
    assert answer.status_code == 200, answer.text
    asked = CHAT | {"model": "long", "max_tokens": 10**6}
    assert (await http.post("/v1/chat/completions", json=asked)).status_code == 400


async def test_a_reload_changes_what_is_asked_next(service: Service) -> None:
    await service.up(step_s=0.002)
    tell(service, FAST)
    router = service.router
    call = router.queue_call(ask("fast", 60))
    await until(lambda: call.emitted)
    tell(service)
    assert router.routes["m"].running == 1
    with pytest.raises(ModelNotFound, match="the models are: m, alias"):
        router.queue_call(ask("fast"))
    assert (await call.next_delta()).text == "abc" * 20


async def test_a_death_changes_nothing(service: Service) -> None:
    first, second = await service.up(2, step_s=0.002)
    tell(service, FAST)
    call = service.router.queue_call(ask("fast", 60))
    await until(lambda: len(call.emitted) > 4)
    (first if first.running else second).kill()
    tell(service)
    assert (await call.next_delta()).text == "abc" * 20
    assert call.params.temperature == 0.5


async def test_one_of_a_model_that_makes_no_text_is_refused(service: Service) -> None:
    info = ModelInfo(100, 4, False, "e", "none", "cpu", serves=("embed",))
    model = ModelStatus("e", "echo", "-", 0, (), info, presets=(FAST,))
    service.router.apply_topology(Topology((model,)))
    call = InflightRequest("fast", SamplingParams(), more={"task": "embed", "inputs": ["a"]})
    with pytest.raises(Unsupported, match="does not generate text; it is an embedding model"):
        service.router.queue_call(call)


# ---- lists


async def test_how_it_is_listed(service: Service, http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["root"], one["parent"], one["state"]) for one in listed] == [
        ("m", "-", None, "ready"),
        ("fast", "-", "m", "ready"),
    ]
    assert [one["aliases"] for one in listed] == [["alias"], []]
    assert (await http.get("/v1/models/fast")).json() == listed[1]
    tags = (await http.get("/api/tags")).json()["models"]
    assert [(one["name"], one["details"]["parent_model"]) for one in tags] == [
        ("m:latest", ""),
        ("fast:latest", "m"),
    ]
    assert tags[0]["digest"] != tags[1]["digest"]
    running = (await http.get("/api/ps")).json()["models"]
    assert [one["name"] for one in running] == ["m:latest", "fast:latest"]
    shown = (await http.post("/api/show", json={"model": "fast"})).json()
    assert shown["details"]["parent_model"] == "m"
    pulled = await http.post("/api/pull", json={"model": "fast"})
    assert pulled.json() == {"status": "success"}
    assert [name for _, name in list_choices(service.router)] == ["m", "fast"]
    assert "presets: fast" in render_status(service.router, "fast")
    assert set((await http.get("/readyz")).json()["models"]) == {"m"}


async def test_who_may_use_it(service: Service) -> None:
    """By its own name, or by its model's; a key for the one alone may not use the model."""
    await service.up()
    keys = {"both": ("m",), "one": ("fast",), "none": ("other",)}
    rules = AccessRules(
        tuple(
            KeyRule(name, digest=fast_digest(name.encode(), SALT), models=models)
            for name, models in keys.items()
        ),
        salt=SALT,
    )
    tell(service, FAST, rules=rules)
    router = service.router
    seen = {}
    for name in keys:
        ACTING.set(router.access.callers[name])
        seen[name] = [one.status.name for one in router.models()]
        if name == "none":
            with pytest.raises(Forbidden):
                router.queue_call(ask("fast"))
        else:
            assert (await router.queue_call(ask("fast")).next_delta()).text == "abc"
    assert seen == {"both": ["m", "fast"], "one": ["fast"], "none": []}
    ACTING.set(router.access.callers["one"])
    assert router.find("").status.name == "fast", "the only one that it may use"
    with pytest.raises(Forbidden):
        router.queue_call(ask("m"))
    tell(service, FAST, replace(FAST, name="other"), rules=replace(rules, default_model="other"))
    assert router.find("").status.name == "fast"
    ACTING.set(router.access.callers["both"])
    assert router.find("").status.name == "other"


async def test_metrics_name_it_as_an_adapter_of_its_model(service: Service) -> None:
    await service.up()
    tell(service, FAST)
    await service.router.queue_call(ask("fast")).next_delta()
    service.router.drain()
    with pytest.raises(ModelUnavailable):
        service.router.queue_call(ask("fast"))
    counted = service.router.measures.pop_counts()
    assert counted is not None
    ended = [one for one in counted.series if one.metric == "servekit_requests_total"]
    assert {one.labels[:2] for one in ended} == {("m", "fast")}
    assert len(ended) == 2
