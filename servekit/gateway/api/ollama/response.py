"""Answers in Ollama's format: one object, or a stream of lines with an object each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from servekit.errors import ServekitError
from servekit.gateway.api.openai.response import logprob_of
from servekit.gateway.api.responder import ResponseEncoder
from servekit.gateway.api.tool_arguments import arguments_of
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.http.asgi import Send, error_headers, send_json
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import Delta, Generate, TokenLogprob, ToolCall

_encode = msgspec.json.Encoder().encode

LINES = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


#: Ollama's names of parameters, by OpenAI's names, which the worker uses in its errors.
_NAMES = {"response_format": "format", "repetition_penalty": "repeat_penalty"}


def error_object(error: ServekitError) -> dict[str, str]:
    """Return `{"error": "..."}`, with Ollama's names of parameters."""
    message = error.message
    for theirs, ours in _NAMES.items():
        message = message.replace(theirs, ours)
    return {"error": message}


async def refuse(send: Send, error: ServekitError) -> None:
    """Answer with an error in Ollama's format."""
    await send_json(send, _encode(error_object(error)), error.status, error_headers(error))


def now() -> str:
    """Return the current time in Ollama's format."""
    return timestamp(time.time())


def timestamp(at: float) -> str:
    """Return a Unix time, in seconds, in Ollama's format."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


class TimedCall(InflightRequest):
    """A request that records when a worker took it, and when its first token arrived."""

    __slots__ = ("first_s", "started_s")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.started_s = self.first_s = 0.0  # time.monotonic(); 0: not yet

    def request(self, wire_id: int) -> Generate:
        self.started_s = self.started_s or time.monotonic()
        return super().request(wire_id)

    def take(self, delta: Delta) -> None:
        self.first_s = self.first_s or time.monotonic()
        super().take(delta)

    def durations(self) -> dict[str, int]:
        """Return the durations of a finished request in ns, as the gateway measured them.

        The wait for a worker counts as Ollama's load duration.
        """
        done_s = time.monotonic()
        started_s = self.started_s or done_s
        first_s = self.first_s or done_s
        spans = {
            "total_duration": done_s - self.created_s,
            "load_duration": started_s - self.created_s,
            "prompt_eval_duration": first_s - started_s,
            "eval_duration": done_s - first_s,
        }
        return {name: round(span_s * 1e9) for name, span_s in spans.items()}


class OllamaForm(ResponseEncoder):
    """The answer to POST /api/chat or /api/generate; reasoning is left out unless `thoughts`."""

    headers = LINES

    def __init__(self, model: str, *, chat: bool, thoughts: bool, logprobs: bool) -> None:
        self._model = model
        self._chat = chat
        self._thoughts = thoughts
        self._logprobs = logprobs
        self._call: ToolCall | None = None  # the call that is being written
        self._finish: str | None = None

    async def refuse(self, send: Send, error: ServekitError) -> None:
        await refuse(send, error)

    def late_error(self, error: ServekitError) -> bytes:
        return _encode(error_object(error)) + b"\n"

    # ---- whole

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        thoughts = choice.reasoning if self._thoughts else ""
        head = self._said(choice.text, thoughts, [_called(call) for call in choice.calls])
        return _encode(head | self._told(choice.logprobs) | self._end(turn, choice.finish))

    # ---- streamed

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        lines: list[dict[str, Any]] = []
        for piece in pieces:
            said = [line for event in piece.events for line in self._tell(event)]
            if piece.logprobs and self._logprobs:
                said = said or [self._said("")]
                said[0] |= self._told(piece.logprobs)
            lines += said
            self._finish = piece.finish or self._finish
        return b"".join([_encode(line | {"done": False}) + b"\n" for line in lines])

    def _tell(self, event: Event) -> Iterator[dict[str, Any]]:
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
                yield self._said(text)
            case Reasoning(text) if self._thoughts:
                yield self._said("", text)

    def _whole_call(self) -> Iterator[dict[str, Any]]:
        call, self._call = self._call, None
        if call is not None:
            yield self._said("", "", [_called(call)])

    def closing(self, turn: Generation) -> bytes:
        lines = [line | {"done": False} for line in self._whole_call()]
        lines.append(self._said("") | self._end(turn, self._finish))
        return b"".join([_encode(line) + b"\n" for line in lines])

    # ---- parts

    def _said(
        self, text: str, thoughts: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        more = {"thinking": thoughts} if thoughts else {}
        head = {"model": self._model, "created_at": now()}
        if not self._chat:
            return head | {"response": text} | more
        called = {"tool_calls": calls} if calls else {}
        return head | {"message": {"role": "assistant", "content": text} | more | called}

    def _told(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": [logprob_of(one) for one in logprobs]} if self._logprobs else {}

    def _end(self, turn: Generation, finish: str | None) -> dict[str, Any]:
        call = turn.first
        durations = call.durations() if isinstance(call, TimedCall) else {}
        counts = {
            "prompt_eval_count": turn.prompt_tokens,
            "eval_count": turn.completion_tokens,
        }
        reason = "length" if finish == "length" else "stop"
        return {"done": True, "done_reason": reason} | durations | counts

    def loaded(self, *, goes: bool = False) -> bytes:
        """Return the answer to a request that only loads the model, or with `goes` unloads it."""
        reason = "unload" if goes else "load"
        return _encode(self._said("") | {"done": True, "done_reason": reason})


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call.arguments)}
    return {"id": call.id, "function": function}
