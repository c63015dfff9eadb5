"""The HTTP API of a real instance, with the clients people have."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from tests.integration.instance import Instance, echo
from tests.polling import poll

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [
        {**echo("echo"), "aliases": ["gpt-4o"]},
        {**echo("slow", step_s=0.01, slots=2), "max_queue": 2},
        echo("pausing", step_s=1.5),
    ]
    server = {"max_body_bytes": 100_000}
    with Instance.up(tmp_path_factory.mktemp("api"), models, server=server) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def http(instance: Instance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=instance.url, timeout=30) as client:
        yield client


def running(http: httpx.Client, model: str = "slow") -> int:
    return int(http.get("/readyz").json()["models"][model]["running"])


def hi(text: str = "hello") -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"model": "echo", "prompt": "a", "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": "echo", "prompt": "a", "stream": True}),
        ("POST", "/v1/completions", {"model": "nobody", "prompt": "a"}),
        ("POST", "/v1/completions", {"model": "echo", "prompt": "a", "n": 2, "max_tokens": 1}),
        ("POST", "/v1/messages", {"model": "echo", "messages": hi("a"), "max_tokens": 1}),
        ("POST", "/v1/embeddings", {"model": "echo"}),
        ("GET", "/v1/models", None),
        ("GET", "/nowhere", None),
    ],
)
def test_every_answer_tells_its_id(
    http: httpx.Client, method: str, path: str, body: object
) -> None:
    own = http.request(method, path, json=body, headers={"x-request-id": "mine-1"})
    assert own.headers.get_list("x-request-id") == ["mine-1"]
    made = [http.request(method, path, json=body).headers["x-request-id"] for _ in range(2)]
    assert len({*made, "mine-1"}) == 3
    assert all(len(one) >= 16 for one in made)


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="gpt-4o", messages=hi("héllo 你好 🙂"), max_tokens=9
    )
    assert answer.model == "echo"
    choice = answer.choices[0]
    assert choice.message.content == "héllo 你好 "
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 9)


def test_streamed_chat_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="slow", messages=hi(), max_tokens=12, stream=True, stop=["oh"],
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == "hell"
    assert len([piece for piece in text if piece]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_no_usage_chunk_that_was_not_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="echo", messages=hi(), max_tokens=3, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_completions_with_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "abcab"
    ids = client.completions.create(model="echo", prompt=[104, 105], max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in ids) == "hi"


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert {model.id for model in client.models.list()} == {"echo", "slow", "pausing"}
    assert client.models.retrieve("gpt-4o").id == "echo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing/such")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=hi())
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="echo", prompt="x" * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as absurd:
        client.completions.create(model="echo", prompt="x", max_tokens=10**9)
    assert absurd.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"\x00\xff" * 100, 400),
        ("POST", "/v1/chat/completions", b'{"messages": 3}', 400),
        ("POST", "/v1/completions", b'"' + b"x" * 100_001 + b'"', 413),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/models", b"", 405),
        ("GET", "/nowhere", b"", 404),
        ("GET", "/ui", b"", 404),
        ("POST", "/v1/completions", b'{"model":"slow/..","prompt":"x"}', 404),
    ],
)
def test_every_error_has_the_envelope(
    http: httpx.Client, method: str, path: str, body: bytes, status: int
) -> None:
    answer = http.request(method, path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    assert "Traceback" not in answer.text


def test_a_chunked_body_over_the_limit_is_413(instance: Instance) -> None:
    connection = HTTPConnection(instance.url.removeprefix("http://"), timeout=30)
    connection.request(
        "POST", "/v1/completions", iter([b"x" * 60_000] * 2), encode_chunked=True,
        headers={"Transfer-Encoding": "chunked"},
    )  # fmt: skip
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_client_that_leaves_in_a_long_pause_is_noticed_before_its_end(
    instance: Instance, path: str
) -> None:
    """The end of its connection looks like that of a client which still reads."""
    address = httpx.URL(instance.url)
    left = re.compile(
        r"request_finished.* first_s=([\d.]+) .*outcome=client_closed.* total_s=([\d.]+)"
    )
    before = len(left.findall(instance.log))
    leaver = HTTPConnection(str(address.host), address.port, timeout=30)
    body = json.dumps({"model": "pausing", "messages": hi("hello, you"), "stream": True})
    leaver.request("POST", path, body, {"content-type": "application/json"})
    response = leaver.getresponse()
    assert response.read1(1000)
    response.close()
    leaver.close()
    first_s, total_s = poll("it is noticed", lambda: left.findall(instance.log)[before:])[0]
    assert float(total_s) - float(first_s) < 1.0


def test_a_client_that_leaves_frees_its_slot(http: httpx.Client) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 8000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        assert running(http) == 1
    poll("the slot is free", lambda: running(http) == 0, 10)


def test_a_client_that_hangs_up_on_a_whole_answer_frees_its_slot(http: httpx.Client) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 8000}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    poll("the slot is free", lambda: running(http) == 0, 10)


def test_a_slow_client_stalls_only_itself(instance: Instance, http: httpx.Client) -> None:
    address = instance.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "echo", "prompt": "x" * 4000, "max_tokens": 4000, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address[0], int(address[1]))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(3):
            slow.sendall((head + body).encode())
            quick = http.post("/v1/completions", json={"model": "echo", "prompt": "hello"})
            assert quick.json()["choices"][0]["text"] == "hellohellohelloh"


def test_a_full_queue_is_429_with_retry_after(http: httpx.Client, instance: Instance) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 200}

    def ask() -> None:
        httpx.post(f"{instance.url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    poll("two run and two wait", lambda: _load(http) == (2, 2), 10)
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()


def _load(http: httpx.Client) -> tuple[int, int]:
    slow = http.get("/readyz").json()["models"]["slow"]
    return slow["running"], slow["waiting"]


def test_the_document_has_the_hot_routes(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/readyz"):
        assert path in document["paths"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    named = chat["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][named]["properties"]
    page = http.get("/docs/swagger")
    assert page.status_code == 200
    assert "//cdn." not in page.text
    assert http.get("/version").json()["version"]
    assert http.get("/livez").json() == {"status": "ok"}
