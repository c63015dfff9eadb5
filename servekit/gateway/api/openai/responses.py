"""OpenAI's POST /v1/responses, whole and as its streamed events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from servekit.errors import ServekitError
from servekit.gateway.api.endpoint import Endpoint, EndpointFactory
from servekit.gateway.api.openai.response import logprob_of, new_id
from servekit.gateway.api.openai.responses_events import EVENTS, Response
from servekit.gateway.api.openai.responses_schema import ResponsesRequest, ask_of
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.responder import ResponseEncoder
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.http.asgi import send_error
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import TokenLogprob

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class Responses:
    """The endpoint of responses, as an ASGI route by path."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        door = EndpointFactory(router, max_body_bytes, send_error)
        self.routes: dict[str, Endpoint] = {"/v1/responses": door.turn(_asked)}


def _asked(body: bytes, key: str) -> tuple[GenerationRequest, ResponseEncoder]:
    request = decode(ResponsesRequest, body)
    return ask_of(request, key), ResponsesForm(request)


class ResponsesForm(ResponseEncoder):
    """The answer to POST /v1/responses: output items, each with its events."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = False  # the last item is still being written
        self._events = 0

    # ---- whole

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        [choice] = choices
        if choice.reasoning:
            self._begin(_reasoning())
            self._output[-1]["content"][0]["text"] = choice.reasoning
        if choice.text or not choice.calls:
            self._begin(_message())
            part = self._output[-1]["content"][0]
            part["text"], part["logprobs"] = choice.text, _logprobs(choice.logprobs)
        for call in choice.calls:
            self._begin(_function_call(call.id, call.name))
            self._output[-1]["arguments"] = call.arguments
        self._end(choice.finish)
        return _encode(self._response(turn, _status(choice.finish)))

    def _begin(self, item: Json) -> None:
        if self._output:
            self._output[-1]["status"] = "completed"
        self._output.append(item)

    def _end(self, finish: str | None) -> None:
        if self._output:
            self._output[-1]["status"] = _status(finish)

    def _response(self, turn: Generation, status: str, error: ServekitError | None = None) -> Json:
        request, params = self._request, turn.ask.params
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None if error is None else {"code": error.code, "message": error.message},
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": turn.model,
            "output": self._output if status != "in_progress" else [],
            "parallel_tool_calls": turn.ask.parallel,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning and request.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format(request)},
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.tools or []),
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": _usage(turn) if status in ("completed", "incomplete") else None,
            "user": request.user,
        }

    # ---- streamed

    def opening(self, turn: Generation) -> bytes:
        response = self._response(turn, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        return b"".join(data for piece in pieces for data in self._of_piece(turn, piece))

    def _of_piece(self, turn: Generation, piece: GenerationChunk) -> Iterator[bytes]:
        logprobs = piece.logprobs
        for event in piece.events:
            yield from self._of_event(event, logprobs)
            logprobs = []  # log probabilities go with the first event of their tokens
        if piece.finish is not None:
            yield from self._last(turn, piece.finish)

    def _of_event(self, event: Event, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._turn_to("message")
                part = self._item["content"][0]
                told = _logprobs(logprobs)
                part["text"] += text
                part["logprobs"] += told
                yield self._of_item(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=told
                )
            case Reasoning(text):
                yield from self._turn_to("reasoning")
                self._item["content"][0]["text"] += text
                yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
            case ToolCallStart(_, id, name):
                yield from self._close("completed")
                yield from self._add(_function_call(id, name))
            case CallArguments(_, text):
                self._item["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _last(self, turn: Generation, finish: str) -> Iterator[bytes]:
        status = _status(finish)
        if not self._output:
            yield from self._turn_to("message")
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(turn, status))

    def _turn_to(self, kind: str) -> Iterator[bytes]:
        """Open an item of this kind, closing the item before."""
        if self._open and self._item["type"] == kind:
            return
        yield from self._close("completed")
        yield from self._add(_message() if kind == "message" else _reasoning())
        yield self._of_item(
            "response.content_part.added", content_index=0, part=self._item["content"][0]
        )

    def _add(self, item: Json) -> Iterator[bytes]:
        self._output.append(item)
        self._open = True
        shown = item | {"content": []} if "content" in item else item
        yield self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=shown
        )

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        item, self._open = self._item, False
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=arguments
            )
        else:
            yield from self._close_part(item)
        yield self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _close_part(self, item: Json) -> Iterator[bytes]:
        part = item["content"][0]
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        more = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        yield self._of_item(f"response.{kind}.done", content_index=0, text=part["text"], **more)
        yield self._of_item("response.content_part.done", content_index=0, part=part)

    def late_error(self, error: ServekitError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=None)

    @property
    def _item(self) -> Json:
        return self._output[-1]

    def _of_item(self, type: str, **fields: Any) -> bytes:
        where = {"item_id": self._item["id"], "output_index": len(self._output) - 1}
        return self._event(type, **where, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        data = _encode({"type": type, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)


def _message() -> Json:
    part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": new_id("msg_"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _reasoning() -> Json:
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }


def _function_call(call_id: str, name: str) -> Json:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": "",
    }


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _logprobs(logprobs: list[TokenLogprob]) -> list[Json]:
    return [logprob_of(one) for one in logprobs]


def _format(request: ResponsesRequest) -> Any:
    format = request.text.format if request.text else None
    return {"type": "text"} if format is None else msgspec.to_builtins(format)


def _usage(turn: Generation) -> Json:
    prompt, completion = turn.prompt_tokens, turn.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


OPERATIONS = (
    Operation("/v1/responses", "A response; none is stored", ResponsesRequest, Response, EVENTS),
)
