"""Bodies that nobody foresaw: each is answered in its API's own way, and never by a 5xx."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.instance import Instance, echo

#: Of each endpoint: 50 in an ordinary run, 150 in the lane `fuzz`.
EXAMPLES = settings().max_examples // 2

NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, -1, 1, 0.5, 2, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)

TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "thinking", "thinking": "b", "signature": ""},
    {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}},
]
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low"},
}
OPTIONS = {
    "num_predict": 5,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0,
    "seed": 1,
    "stop": ["x"],
    "repeat_penalty": 1.1,
    "repeat_last_n": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "num_ctx": 9,
    "mirostat": 0,
}
CHAT = {
    "model": "m:latest",
    "messages": [
        {"role": "user", "content": "a", "images": []},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "abc"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "options": OPTIONS,
    "format": "",
    "think": True,
    "logprobs": True,
    "top_logprobs": 2,
    "keep_alive": "5m",
}
GENERATE = {"model": "m", "prompt": "a", "system": "s", "raw": False, "options": OPTIONS}
EMBED = {"model": "m", "input": ["a"], "dimensions": 3, "truncate": True}
SHOW = {"model": "m", "name": "m", "verbose": True}
LEGACY = {"prompt": "a", "history": [["q", "a"]], "backend": "local", "remote": False}

Check = Callable[[httpx.Response], bool]


def anthropics(answer: httpx.Response) -> bool:
    body = answer.json()
    return body["type"] == "error" and isinstance(body["error"]["message"], str)


def ollamas(answer: httpx.Response) -> bool:
    return isinstance(answer.json()["error"], str)


def legacys(answer: httpx.Response) -> bool:
    return answer.json()["text"] == "" and isinstance(answer.json()["error"], str)


ENDPOINTS: dict[str, tuple[Any, Check]] = {
    "/v1/messages": (MESSAGES, anthropics),
    "/v1/messages/count_tokens": (MESSAGES, anthropics),
    "/api/chat": (CHAT, ollamas),
    "/api/generate": (GENERATE, ollamas),
    "/api/embed": (EMBED, ollamas),
    "/api/embeddings": (GENERATE, ollamas),
    "/api/show": (SHOW, ollamas),
    "/api/pull": (SHOW, ollamas),
    "/inference": (LEGACY, legacys),
    "/stream": (LEGACY, legacys),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that is in a body, itself excepted."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@st.composite
def bodies(draw: st.DrawFn, valid: Any) -> Any:
    """A body that is right but for one or two places."""
    body = copy.deepcopy(valid)
    for path in draw(st.lists(st.sampled_from(list(places(valid))), min_size=1, max_size=2)):
        target = body
        try:
            for key in path[:-1]:
                target = target[key]
            if draw(st.booleans()):
                target[path[-1]] = draw(JSON)
            else:
                del target[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # the other change has taken it away
    return body


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = echo("m", max_context=64) | {"tool_parser": "hermes", "reasoning_parser": "think"}
    server = {"legacy": "huixiangdou"}
    with Instance.up(tmp_path_factory.mktemp("fuzz"), [model], server=server) as instance:
        instance.until_settled()
        with httpx.Client(base_url=instance.url, timeout=30) as client:
            yield client


def answer_to(http: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


def check(path: str, answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    for words in ("internal error", "engine failed", "api_error"):  # after a 200, too
        assert words not in answer.text
    if answer.status_code >= 400:
        assert ENDPOINTS[path][1](answer), answer.text


@pytest.mark.lane("long")
@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_is_the_services_fault(http: httpx.Client, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(ENDPOINTS[path][0]))
    check(path, answer_to(http, path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_bodies_that_are_changed_are_right_themselves(http: httpx.Client, path: str) -> None:
    answer = answer_to(http, path, json.dumps(ENDPOINTS[path][0]).encode())
    assert answer.status_code == 200, answer.text


DEEP = b'{"model":"m","max_tokens":1,"prompt":"a","input":"a","x":' + b"[" * 200_000
SCHEMA = b'{"properties":{"a":' * 2000 + b"{}" + b"}}" * 2000


@pytest.mark.lane("long")
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"a"',
        b"{",
        b'{"model": NaN}',
        b'{"model": "m", "model": 1e999}',
        DEEP,
        b'{"model":"m","prompt":"' + b"a" * 100_000 + b'"}',
        b'{"model":"m","format":' + SCHEMA + b',"messages":[{"role":"user","content":"a"}]}',
        b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}],"tools":'
        b'[{"name":"a","input_schema":' + SCHEMA + b"}]}",
    ],
    ids=range(12),
)
def test_what_is_hardly_a_body_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    check(path, answer_to(http, path, body))
