"""What is wrong with an answer: its status, its envelope, its stream."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.cases import Asked
from tests.fuzz.client import Answer

#: An error is a sentence: it does not give back what was sent.
MAX_ERROR_BYTES = 4096
_OF_HTTP = ("invalid_http", "header_too_large", "request_timeout")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
LEGACY = ("/inference", "/stream")
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")


class Wrong(Exception):
    """What is wrong, in a few words that are the same for the same fault."""


def check(asked: Asked, answer: Answer) -> None:
    """Raise Wrong for an answer that must not be given."""
    status = answer.status
    if status >= 500 and not (status == 504 and asked.may_time_out):
        raise Wrong(f"status {status}")
    if asked.method == "HEAD" or status in (204, 304):
        return
    if status >= 400:
        _check_error(asked, answer)
    elif 300 <= status < 400:
        if not answer.headers.get("location"):
            raise Wrong("a redirection to nowhere")
    elif answer.kind == "application/json":
        _check_json(asked, _json(answer.body))
    elif answer.kind == "text/event-stream":
        _check_events(asked, answer.body)
    elif answer.kind == "application/x-ndjson":
        _check_lines(answer.body)
    elif not answer.kind.startswith("text/") and asked.path:
        raise Wrong(f"content type {answer.kind!r}")


def _json(data: bytes) -> Any:
    """Strictly: no NaN, valid UTF-8."""
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"not JSON: {type(error).__name__}") from None


def _no_constant(name: str) -> None:
    raise ValueError(name)


# ---------------------------------------------------------------- errors


def _check_error(asked: Asked, answer: Answer) -> None:
    if answer.kind != "application/json":
        raise Wrong(f"an error {answer.status} of content type {answer.kind!r}")
    if len(answer.body) > MAX_ERROR_BYTES:
        raise Wrong(f"an error {answer.status} of over {MAX_ERROR_BYTES} bytes")
    said = _json(answer.body)
    if not any(test(said) for test in _envelopes(asked, said)):
        raise Wrong(f"an error {answer.status} in a wrong envelope")
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        raise Wrong(f"an error {answer.status} without retry-after")


def _envelopes(asked: Asked, said: Any) -> list[Any]:
    """Those that will do."""
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict) and error.get("code") in _OF_HTTP:
        return [is_openai]  # it was no request yet
    if not asked.path:
        return [is_openai, is_anthropic, is_ollama, is_legacy]
    if asked.path in ANTHROPIC:
        return [is_anthropic]
    if asked.path in LEGACY:
        return [is_legacy]
    return [is_ollama if asked.path.startswith("/api/") else is_openai]


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def is_openai(said: Any) -> bool:
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return False
    free = all(error[name] is None or _text(error[name]) for name in ("param", "code"))
    return free and _text(error["message"]) and _text(error["type"])


def is_anthropic(said: Any) -> bool:
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or said.get("type") != "error":
        return False
    return _text(error.get("type")) and _text(error.get("message"))


def is_ollama(said: Any) -> bool:
    return isinstance(said, dict) and set(said) == {"error"} and _text(said["error"])


def is_legacy(said: Any) -> bool:
    return isinstance(said, dict) and said.get("text") == "" and _text(said.get("error"))


# ---------------------------------------------------------------- answers

#: What an answer has, by path.
_KEYS = {
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/responses": {"id", "object", "created_at", "model", "output", "status", "usage"},
    "/v1/embeddings": {"object", "data", "model", "usage"},
    "/v1/messages": {"id", "type", "role", "content", "model", "stop_reason", "usage"},
    "/v1/messages/count_tokens": {"input_tokens"},
    "/tokenize": {"count", "max_model_len", "tokens"},
    "/detokenize": {"prompt"},
    "/api/chat": {"model", "created_at", "message", "done"},
    "/api/generate": {"model", "created_at", "response", "done"},
    "/api/embed": {"model", "embeddings"},
    "/inference": {"text", "error"},
    **{path: {"text", "usage"} for path in AUDIO},
}


def _check_json(asked: Asked, said: Any) -> None:
    if not isinstance(said, dict):
        raise Wrong("an answer that is no object")
    missing = _KEYS.get(asked.path, set()) - set(said) if asked.method == "POST" else set()
    if missing:
        raise Wrong(f"an answer without {sorted(missing)}")


# ---------------------------------------------------------------- streams


def _check_lines(body: bytes) -> None:
    if not body.endswith(b"\n"):
        raise Wrong("a stream that ends within a line")
    lines = [_json(line) for line in body[:-1].split(b"\n")]
    if not all(isinstance(line, dict) for line in lines):
        raise Wrong("a line that is no object")
    last = lines[-1]
    if last.get("done") is not True and not is_ollama(last):
        raise Wrong("a stream without its last line")
    if any(line.get("done") is not False for line in lines[:-1]):
        raise Wrong("a stream that goes on after its end")


def _check_events(asked: Asked, body: bytes) -> None:
    if asked.path == "/stream":
        _check_legacy(body)
        return
    events = _events(body)
    if asked.path in ("/v1/responses", "/v1/messages"):
        _check_named(asked, events)
        return
    *before, last = events or [("", b"")]
    said = [_json(data) for _, data in before]
    if last[1] != b"[DONE]":
        if not is_openai(_json(last[1])):
            raise Wrong("a stream without [DONE]")
    elif not said:
        raise Wrong("a stream of nothing")
    if asked.path in AUDIO:
        *deltas, done = [one.get("type") for one in said]
        if done != "transcript.text.done" or set(deltas) - _PARTS_OF_TRANSCRIPT:
            raise Wrong("events of a transcript that are not its own")
    elif not all(isinstance(one, dict) and "choices" in one for one in said):
        raise Wrong("an event without choices")


_PARTS_OF_TRANSCRIPT = {"transcript.text.delta", "transcript.text.segment"}


def _events(body: bytes) -> list[tuple[str, bytes]]:
    """(name, data) of each event; comments left out."""
    if not body.endswith(b"\n\n"):
        raise Wrong("a stream that ends within an event")
    found = []
    for event in body[:-2].split(b"\n\n"):
        if event.startswith(b":"):
            continue
        name, data = "", None
        for line in event.split(b"\n"):
            if line.startswith(b"data: ") and data is None:
                data = line[6:]
            elif line.startswith(b"event: ") and not name:
                name = line[7:].decode()
            else:
                raise Wrong(f"a line of a stream: {line[:20]!r}")
        if data is None:
            raise Wrong("an event without data")
        found.append((name, data))
    return found


_LAST = {
    "/v1/responses": {"response.completed", "response.incomplete", "response.failed", "error"},
    "/v1/messages": {"message_stop", "error"},
}


def _check_named(asked: Asked, events: list[tuple[str, bytes]]) -> None:
    for name, data in events:
        if _json(data).get("type") != name:
            raise Wrong("an event whose type is not its name")
    if not events or events[-1][0] not in _LAST[asked.path]:
        raise Wrong("a stream without its last event")
    if any(name in _LAST[asked.path] for name, _ in events[:-1]):
        raise Wrong("a stream that goes on after its end")


def _check_legacy(body: bytes) -> None:
    if body and not body.endswith(b"\r\n\r\n"):
        raise Wrong("a stream that ends within an event")
    for line in body.decode().split("\r\n"):
        if line and not line.startswith("data: "):
            raise Wrong("a line without data:")
