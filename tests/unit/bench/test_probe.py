"""What is wrong with a server is a sentence, before any load is put on it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from servekit.bench import probe
from servekit.bench.client.client_protocol import Asking, Target
from servekit.bench.lengths import Lengths
from servekit.errors import ConfigError, ServekitError, StartError

Answer = tuple[int, object]


@contextlib.contextmanager
def server(
    answer: Callable[[str, dict[str, Any]], Answer], key: str | None = None
) -> Iterator[Target]:
    """A server that answers path and body with a status and JSON, or bytes as they are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size)) if size else {}
            body["key"] = self.headers.get("authorization")
            status, found = answer(self.path, body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Target("127.0.0.1", listening.server_port, "/v1", key=key)
        finally:
            listening.shutdown()
            thread.join()


def asking(**changes: Any) -> Asking:
    fields: dict[str, Any] = {
        "api": "chat",
        "model": "m",
        "stream": True,
        "prompt_tokens": Lengths("fixed", 256),
        "output_tokens": Lengths("fixed", 16),
        "turns": Lengths("fixed", 1),
    }
    return Asking(**{**fields, **changes})


LIST = {"object": "list", "data": [{"id": "a", "object": "model"}, {"id": "b"}]}


def test_models_are_asked_with_the_key() -> None:
    def answer(path: str, body: dict[str, Any]) -> Answer:
        return (200, LIST) if (path, body["key"]) == ("/v1/models", "Bearer k") else (401, {})

    with server(answer, key="k") as target:
        assert probe.list_models(target) == ["a", "b"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, {"error": {"message": "no key"}}, r"wants a key \(HTTP 401: no key\).*--api-key"),
        (403, {"detail": "forbidden"}, "HTTP 403: forbidden"),
        (200, b"<html>It works!</html>", "does not speak OpenAI's API"),
        (200, {"models": []}, "does not speak OpenAI's API"),
        (500, {"error": "boom"}, "HTTP 500: boom"),
    ],
)
def test_what_is_wrong_with_a_server(status: int, body: object, words: str) -> None:
    with server(lambda *_: (status, body)) as target, pytest.raises(StartError, match=words):
        probe.list_models(target)


def test_a_server_without_a_list_has_none() -> None:
    with server(lambda *_: (404, {})) as target:
        assert probe.list_models(target) is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("127.0.0.1", 1, "/v1"), "nothing answers at http://127.0.0.1:1/v1"),
        (Target("a..b", 80, "/v1"), "no host is called 'a..b'"),
        (Target("no-such-host.invalid", 80, "/v1"), "no host is called 'no-such-host.invalid'"),
    ],
)
def test_nobody_there(target: Target, words: str) -> None:
    with pytest.raises(StartError, match=words):
        probe.list_models(target)


def test_the_only_model_needs_no_name() -> None:
    assert probe.choose_model(None, ["a"], "u") == "a"
    assert probe.choose_model("b", ["a", "b"], "u") == "b"
    assert probe.choose_model("b", None, "u") == "b", "there is no list to look in"


@pytest.mark.parametrize(
    ("wanted", "known", "words"),
    [
        (None, ["a", "b"], "several models.*--model; there are: a, b"),
        ("c", ["a", "b"], "no model 'c'; there are: a, b"),
        (None, [], "it has none"),
        (None, None, "name one with --model"),
    ],
)
def test_a_model_must_be_there(wanted: str | None, known: list[str] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        probe.choose_model(wanted, known, "u")


def counting(chars_per_token: float, overhead: int) -> Callable[[str, dict[str, Any]], Answer]:
    def answer(path: str, body: dict[str, Any]) -> Answer:
        assert path == "/v1/chat/completions"
        assert (body["model"], body["max_tokens"], "stream" in body) == ("m", 1, False)
        tokens = round(len(body["messages"][0]["content"]) / chars_per_token) + overhead
        return 200, {"choices": [{"message": {}}], "usage": {"prompt_tokens": tokens}}

    return answer


@pytest.mark.parametrize(("chars", "overhead"), [(1.0, 0), (5.2, 31), (4.0, 9)])
def test_the_length_of_tokens_is_learnt(chars: float, overhead: int) -> None:
    with server(counting(chars, overhead)) as target:
        told = probe.calibrate_tokens(target, asking(), seed=1, timeout_s=5.0)
    assert told.token_chars == pytest.approx(chars, rel=0.02)
    assert told.overhead_tokens == pytest.approx(overhead, abs=1)


def test_who_counts_nothing_has_four_characters_a_token() -> None:
    with server(lambda *_: (200, {"choices": []})) as target:
        assert probe.calibrate_tokens(target, asking(), 1, 5.0) == asking()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, {"error": {"message": "no such model"}}, "HTTP 404: no such model"),
        (401, {}, "wants a key"),
        (200, b"hello", "does not speak OpenAI's API"),
        (200, {"hello": 1}, "no choices"),
        (200, {"error": {"message": "sorry"}}, "an error: sorry"),
    ],
)
def test_a_server_that_does_not_answer_requests(status: int, body: object, words: str) -> None:
    with (
        server(lambda *_: (status, body)) as target,
        pytest.raises(ServekitError, match=words),
    ):
        probe.calibrate_tokens(target, asking(), 1, 5.0)


def test_an_answer_that_never_comes() -> None:
    never = threading.Event()

    def answer(*_: object) -> Answer:
        never.wait(5)
        return 200, {}

    with server(answer) as target:
        with pytest.raises(StartError, match=r"does not answer within 0\.2 s"):
            probe.calibrate_tokens(target, asking(), 1, timeout_s=0.2)
        never.set()
