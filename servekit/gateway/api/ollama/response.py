"""Answers in Ollama's format: one object, or a stream of lines with an object each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from servekit.errors import ServekitError
from servekit.gateway.api.openai.response import logprob_of
from servekit.gateway.api.tool_arguments import arguments_of
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import TokenLogprob, ToolCall

_encode = msgspec.json.Encoder().encode

LINES = (
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


#: Ollama's names of parameters, by OpenAI's names, which the worker uses in its errors.
_NAMES = {"response_format": "format", "repetition_penalty": "repeat_penalty"}


def error_object(error: ServekitError) -> dict[str, str]:
    """Return `{"error": "..."}`, with Ollama's names of parameters."""
    message = error.message
    for theirs, ours in _NAMES.items():
        message = message.replace(theirs, ours)
    return {"error": message}


def encode_error(error: ServekitError) -> tuple[int, bytes]:
    """Return the status and body of an error response in Ollama's format."""
    return error.status, _encode(error_object(error))


def format_now() -> str:
    """Return the current time in Ollama's format."""
    return timestamp(time.time())


def timestamp(at: float) -> str:
    """Return a Unix time, in seconds, in Ollama's format."""
    second, micros = divmod(round(at * 1e6), 1_000_000)
    return f"{_second(second)}.{micros:06d}Z" if micros else f"{_second(second)}Z"


@lru_cache(maxsize=4)
def _second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().removesuffix("+00:00")


class OllamaEncoder(ResponseEncoder):
    """The answer to POST /api/chat or /api/generate; reasoning is left out unless `thoughts`."""

    headers = LINES

    def __init__(self, model: str, *, chat: bool, thoughts: bool, logprobs: bool) -> None:
        self._model = model
        self._chat = chat
        self._thoughts = thoughts
        self._logprobs = logprobs
        self._call: ToolCall | None = None  # the call that is being written
        self._finish: str | None = None
        name = _encode(model).replace(b"%", b"%%")
        said = b'"message":{"role":"assistant","content":%b}' if chat else b'"response":%b'
        self._template = b'{"model":%b,"created_at":"%%b",%b,"done":false}\n' % (name, said)

    def encode_late_error(self, error: ServekitError) -> bytes:
        return _encode(error_object(error)) + b"\n"

    # ---- whole

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        thoughts = choice.reasoning if self._thoughts else ""
        head = self._encode_message(choice.text, thoughts, [_called(call) for call in choice.calls])
        return _encode(
            head | self._encode_logprobs(choice.logprobs) | self._end(generation, choice.finish)
        )

    # ---- streamed

    def encode_text(self, generation: Generation, text: str) -> bytes:
        if self._call is not None:
            return super().encode_text(generation, text)
        return self._template % (format_now().encode(), _encode(text))

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        encoded: list[bytes] = []
        for chunk in chunks:
            self._finish = chunk.finish or self._finish
            logprobs = chunk.logprobs if self._logprobs else []
            for event in chunk.events:
                if type(event) is Text and self._call is None and not logprobs:
                    encoded.append(self.encode_text(generation, event.text))
                    continue
                for line in self._encode_event(event):
                    encoded.append(
                        self._line(line | self._encode_logprobs(logprobs) if logprobs else line)
                    )
                    logprobs = []  # log probabilities go with the first line of their tokens
            if logprobs:
                encoded.append(
                    self._line(self._encode_message("") | self._encode_logprobs(logprobs))
                )
        return b"".join(encoded)

    def _line(self, fields: dict[str, Any]) -> bytes:
        return _encode(fields | {"done": False}) + b"\n"

    def _encode_event(self, event: Event) -> Iterator[dict[str, Any]]:
        """Return the lines for one event; a tool call is written once it is complete."""
        match event:
            case CallArguments(_, text) if self._call is not None:
                call = self._call
                self._call = ToolCall(call.id, call.name, call.arguments + text)
                return
            case ToolCallStart(_, id, name):
                yield from self._whole_call()
                self._call = ToolCall(id, name, "")
            case Text(text):
                yield from self._whole_call()
                yield self._encode_message(text)
            case Reasoning(text) if self._thoughts:
                yield self._encode_message("", text)

    def _whole_call(self) -> Iterator[dict[str, Any]]:
        call, self._call = self._call, None
        if call is not None:
            yield self._encode_message("", "", [_called(call)])

    def encode_end(self, generation: Generation) -> bytes:
        lines = [self._line(line) for line in self._whole_call()]
        end = self._encode_message("") | self._end(generation, self._finish)
        return b"".join([*lines, _encode(end), b"\n"])

    # ---- parts

    def _encode_message(
        self, text: str, thoughts: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        more = {"thinking": thoughts} if thoughts else {}
        head = {"model": self._model, "created_at": format_now()}
        if not self._chat:
            return head | {"response": text} | more
        called = {"tool_calls": calls} if calls else {}
        return head | {"message": {"role": "assistant", "content": text} | more | called}

    def _encode_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [logprob_of(one) for one in logprobs]} if self._logprobs else {}

    def _end(self, generation: Generation, finish: str | None) -> dict[str, Any]:
        counts = {
            "prompt_eval_count": generation.prompt_tokens,
            "eval_count": generation.completion_tokens,
        }
        reason = "length" if finish == "length" else "stop"
        return {"done": True, "done_reason": reason} | _durations(generation.first) | counts

    def loaded(self, *, goes: bool = False) -> bytes:
        """Return the answer to a request that only loads the model, or with `goes` unloads it."""
        reason = "unload" if goes else "load"
        return _encode(self._encode_message("") | {"done": True, "done_reason": reason})


def _durations(call: InflightRequest) -> dict[str, int]:
    """Return the durations of a finished request in ns, as the gateway measured them.

    The wait for a worker counts as Ollama's load duration.
    """
    done_s = time.monotonic()
    started_s = call.started_s or done_s
    first_s = call.first_s or done_s
    spans = {
        "total_duration": done_s - call.created_s,
        "load_duration": started_s - call.created_s,
        "prompt_eval_duration": first_s - started_s,
        "eval_duration": done_s - first_s,
    }
    return {name: round(span_s * 1e9) for name, span_s in spans.items()}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call.arguments)}
    return {"id": call.id, "function": function}
