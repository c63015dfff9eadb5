"""The answer to POST /v1/responses: a response with its output items, or its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from servekit.errors import ServekitError
from servekit.gateway.api.openai.response import logprob_of, new_id
from servekit.gateway.api.openai.responses_schema import (
    ResponsesRequest,
    items_of,
)
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import TokenLogprob

if TYPE_CHECKING:
    from servekit.gateway.storage.response_store import StreamPart

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]
_TEXT_EVENT = (
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":'
)


#: The beginnings of the ids of items.
ITEM_IDS = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}


def item_id(response: str, kind: str, place: int) -> str:
    """Return the id of an output item, from which `response_of` finds the response."""
    return f"{ITEM_IDS[kind]}{response.removeprefix('resp_')}_{place:x}"


def response_of(item: str) -> str:
    """Return the id of the response that has an output item of this id."""
    return f"resp_{item.partition('_')[2].rpartition('_')[0]}"


class ResponsesEncoder(ResponseEncoder):
    """The answer to POST /v1/responses: output items, each with its events.

    `keep`, if set, is called with the whole response at its end. `items` are the items that the
    model was asked with, of `size_bytes` in JSON.
    """

    def __init__(self, request: ResponsesRequest, size_bytes: int) -> None:
        self._request = request
        self.id = new_id("resp_")
        self.items = items_of(request)
        self.size_bytes = size_bytes
        self.keep: Callable[[bytes], None] | None = None
        options = request.reasoning
        self._summary = options.summary if options and options.summary != "none" else None
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = False  # the last item is still being written
        self._texts: list[str] = []  # of that item
        self._before_text = b""  # its events of new text between their number and the text
        self._events = 0

    # ---- whole

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        [choice] = choices
        if choice.reasoning:
            self._begin(self._reasoning())
            _part(self._output[-1])["text"] = choice.reasoning
        if choice.text or not choice.calls:
            self._begin(_message())
            part = self._output[-1]["content"][0]
            part["text"], part["logprobs"] = choice.text, _logprobs(choice.logprobs)
        for call in choice.calls:
            self._begin(_function_call(call.id, call.name))
            self._output[-1]["arguments"] = call.arguments
        self._end(choice.finish)
        response = _encode(self._response(generation, _status(choice.finish)))
        if self.keep is not None:
            self.keep(response)
        return response

    def _begin(self, item: Json) -> None:
        if self._output:
            self._output[-1]["status"] = "completed"
        self._append(item)

    def _append(self, item: Json) -> None:
        item["id"] = item["id"] or item_id(self.id, item["type"], len(self._output))
        self._output.append(item)

    def _end(self, finish: str | None) -> None:
        if self._output:
            self._output[-1]["status"] = _status(finish)

    def encode_queue_events(self, shown: bytes) -> StreamPart:
        """Return the begin of the stream of a response that runs in the background."""
        from servekit.gateway.storage.response_store import StreamPart

        response = msgspec.Raw(shown)
        events = [
            self._event(f"response.{name}", response=response) for name in ("created", "queued")
        ]
        return StreamPart(0, self._events - 1, b"".join(events))

    def encode_queued(self, asked: GenerationRequest, model: str) -> bytes:
        """Return the response before it runs in the background."""
        shown = self._describe(asked, model, "queued")
        return _encode(shown | {"background": True, "store": True})

    def _response(self, generation: Generation, status: str) -> Json:
        shown = self._describe(generation.request, generation.model, status)
        if status != "in_progress":
            shown |= {"output": self._output, "usage": _usage(generation)}
        return shown

    def _describe(self, asked: GenerationRequest, model: str, status: str) -> Json:
        """Return a response without its output."""
        request, params = self._request, asked.params
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": asked.parallel,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": request.reasoning and request.reasoning.effort,
                "summary": self._summary,
            },
            "store": self.keep is not None,
            "temperature": params.temperature,
            "text": {"format": _format(request)},
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.tools or []),
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    # ---- streamed

    def encode_start(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def encode_text(self, generation: Generation, text: str) -> bytes:
        if not self._before_text:
            return super().encode_text(generation, text)
        self._texts.append(text)
        number = self._events
        self._events += 1
        parts = _TEXT_EVENT, number, self._before_text, _encode(text)
        return b'%b%d%b%b,"logprobs":[]}\n\n' % parts

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        return b"".join([data for chunk in chunks for data in self._of_chunk(generation, chunk)])

    def _of_chunk(self, generation: Generation, chunk: GenerationChunk) -> Iterator[bytes]:
        logprobs = chunk.logprobs
        for event in chunk.events:
            if type(event) is Text and self._before_text and not logprobs:
                yield self.encode_text(generation, event.text)
            else:
                yield from self._of_event(event, logprobs)
            logprobs = []  # log probabilities go with the first event of their tokens
        if chunk.finish is not None:
            yield from self._last(generation, chunk.finish)

    def _of_event(self, event: Event, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._turn_to("message")
                told = _logprobs(logprobs)
                self._texts.append(text)
                self._item["content"][0]["logprobs"] += told
                yield self._of_item(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=told
                )
            case Reasoning(text):
                yield from self._turn_to("reasoning")
                self._texts.append(text)
                kind, index = self._thoughts
                yield self._of_item(f"response.{kind}_text.delta", **index, delta=text)
            case ToolCallStart(_, id, name):
                yield from self._close("completed")
                yield from self._add(_function_call(id, name))
            case CallArguments(_, text):
                self._item["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _last(self, generation: Generation, finish: str) -> Iterator[bytes]:
        status = _status(finish)
        if not self._output:
            yield from self._turn_to("message")
        yield from self._close(status)
        response = self._response(generation, status)
        if self.keep is not None:
            self.keep(_encode(response))
        yield self._event(f"response.{status}", response=response)

    def _turn_to(self, kind: str) -> Iterator[bytes]:
        """Open an item of this kind, closing the item before."""
        if self._open and self._item["type"] == kind:
            return
        yield from self._close("completed")
        yield from self._add(_message() if kind == "message" else self._reasoning())
        item = self._item
        yield self._of_part("added", item)
        if kind == "message":
            where = item["id"].encode(), len(self._output) - 1
            self._before_text = (
                b',"item_id":"%b","output_index":%d,"content_index":0,"delta":' % where
            )

    def _add(self, item: Json) -> Iterator[bytes]:
        self._append(item)
        self._open = True
        shown = item | {name: [] for name in ("summary", "content") if name in item}
        yield self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=shown
        )

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        item, self._open, self._before_text = self._item, False, b""
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
        part = _part(item)
        part["text"], self._texts = "".join(self._texts), []
        kind, index = self._thoughts
        more: Json = {}
        if item["type"] == "message":
            kind, index, more = "output", {"content_index": 0}, {"logprobs": part["logprobs"]}
        yield self._of_item(f"response.{kind}_text.done", **index, text=part["text"], **more)
        yield self._of_part("done", item)

    def _of_part(self, change: str, item: Json) -> bytes:
        if item.get("summary"):
            name = f"response.reasoning_summary_part.{change}"
            return self._of_item(name, summary_index=0, part=_part(item))
        return self._of_item(f"response.content_part.{change}", content_index=0, part=_part(item))

    @property
    def _thoughts(self) -> tuple[str, Json]:
        """The word for thoughts in the names of events, and their part's index."""
        if self._summary is None:
            return "reasoning", {"content_index": 0}
        return "reasoning_summary", {"summary_index": 0}

    def _reasoning(self) -> Json:
        """Return an item for thoughts; where a summary is requested they are that."""
        item: Json = {"id": "", "type": "reasoning", "status": "in_progress"}
        if self._summary is not None:
            return item | {"summary": [{"type": "summary_text", "text": ""}], "content": []}
        return item | {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]}

    def encode_late_error(self, error: ServekitError) -> bytes | None:
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
        "id": "",
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _part(item: Json) -> Json:
    """Return the part of a message, or of thoughts, that has the text."""
    part: Json = (item.get("summary") or item["content"])[0]
    return part


def _function_call(call_id: str, name: str) -> Json:
    return {
        "id": "",
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


def _usage(generation: Generation) -> Json:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
