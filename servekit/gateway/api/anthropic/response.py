"""Answers in the format of Anthropic's Messages API: content blocks, whole or event by event.

The order of events:

    message_start · ping · (content_block_start · content_block_delta … · content_block_stop) …
    message_delta · message_stop, or error
"""

from __future__ import annotations

from typing import Any

import msgspec

from servekit.errors import ContextLengthExceeded, ServekitError
from servekit.gateway.api.anthropic.request import ThreadUnsupported
from servekit.gateway.api.openai.response import new_id
from servekit.gateway.api.tool_arguments import arguments_of
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import ToolCall

_encode = msgspec.json.Encoder().encode
_TEXT_DELTA = (
    b"%bevent: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(error: ServekitError) -> dict[str, Any]:
    """Return `{"type": "error", "error": {"type", "message"}}`."""
    # the worker uses OpenAI's name of the parameter
    message = error.message.replace("response_format", "output_config.format")
    if error.code == ContextLengthExceeded.code:  # by these words clients shorten a conversation
        message = f"prompt is too long: {message}"
    body = error_body(error.status, message)
    if isinstance(error, ThreadUnsupported):  # by this Anthropic's SDK goes on without threads
        body["error"]["details"] = {"error_code": error.code}
    return body


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's format, whose type is that of the status."""
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def encode_error(error: ServekitError) -> tuple[int, bytes]:
    """Return the status and body of an error response in Anthropic's format."""
    return error.status, _encode(error_object(error))


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encode(data))


class MessageEncoder(ResponseEncoder):
    """The answer to POST /v1/messages; reasoning is left out unless `thoughts`."""

    def __init__(self, *, thoughts: bool, max_tokens: int) -> None:
        self._id = new_id("msg_")
        self._thoughts = thoughts
        self._max_tokens = max_tokens
        self._index = -1  # of the block that was opened last
        self._open = ""  # the type of the open block, "" if none is open
        self._space = ""  # white space held back: it is dropped if only calls surround it
        self._called = False
        self._last = GenerationChunk(0, [])

    def encode_late_error(self, error: ServekitError) -> bytes:
        return _event(error_object(error))

    def _message(self, generation: Generation, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation),
        }

    def _end(
        self, generation: Generation, finish: str | None, stop: str, called: bool
    ) -> dict[str, Any]:
        """Return the stop reason; the context's end differs from the request's max_tokens."""
        if finish == "length":
            cut = generation.completion_tokens < self._max_tokens
            return _reason("model_context_window_exceeded" if cut else "max_tokens")
        if called and not (stop and finish == "stop"):  # the stop string cut the call off
            return _reason("tool_use")
        return _reason("stop_sequence", stop) if stop else _reason("end_turn")

    # ---- whole

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        choice = choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning and self._thoughts:
            content.append(_begun("thinking") | {"thinking": choice.reasoning})
        if choice.text.strip() or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        content += [
            _tool_use(call) | {"input": arguments_of(call.arguments)} for call in choice.calls
        ]
        end = self._end(generation, choice.finish, choice.stop, bool(choice.calls))
        return _encode(self._message(generation, content) | end)

    # ---- streamed

    def encode_start(self, generation: Generation) -> bytes:
        message = self._message(generation, [])
        message["usage"]["output_tokens"] = 0  # some clients add the counts at the end to these
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def encode_text(self, generation: Generation, text: str) -> bytes:
        return self._tell_text(text)

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        self._last = chunks[-1]
        return b"".join([self._encode_event(event) for chunk in chunks for event in chunk.events])

    def _encode_event(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._tell_text(text)
            case Reasoning(text) if self._thoughts:
                begun = self._begin("thinking")
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart(_, id, name):
                self._called = True
                return self._begin("tool_use", _tool_use(ToolCall(id, name, "")))
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                return b""

    def _tell_text(self, text: str) -> bytes:
        begun = b""
        if self._open != "text":
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return b""
            begun = self._begin("text")
        return _TEXT_DELTA % (begun, self._index, _encode(text))

    def _begin(self, kind: str, block: dict[str, Any] | None = None) -> bytes:
        """Open a block, unless one of that kind is open; each call gets a block of its own."""
        if self._open == kind != "tool_use":
            return b""
        ended = self._stop()
        self._index += 1
        self._open, self._space = kind, ""
        start = {"type": "content_block_start", "index": self._index}
        return ended + _event(start | {"content_block": block or _begun(kind)})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event({"type": "content_block_stop", "index": self._index})

    def encode_end(self, generation: Generation) -> bytes:
        rest = b""
        if self._index < 0 or (self._space and not self._called):
            rest, space = b"", self._space
            rest = self._begin("text")
            rest += self._delta({"type": "text_delta", "text": space}) if space else b""
        end = self._end(generation, self._last.finish, self._last.stop, self._called)
        delta = {"type": "message_delta", "delta": end, "usage": _usage(generation)}
        return rest + self._stop() + _event(delta) + _event({"type": "message_stop"})


def _begun(kind: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _reason(reason: str, stop: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(generation: Generation) -> dict[str, int]:
    return {  # Anthropic's prompt size is the sum of new and cached tokens
        "input_tokens": generation.prompt_tokens - generation.cached_tokens,
        "output_tokens": generation.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.cached_tokens,
    }
