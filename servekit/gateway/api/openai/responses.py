"""OpenAI's /v1/responses: answers, in the background as well, and stored ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response as Reply
from fastapi.responses import StreamingResponse

from servekit.errors import ModelUnavailable, RequestError, Unsupported
from servekit.gateway.api.endpoint import Answer, GenerationEndpoint, begin_stream, complete_request
from servekit.gateway.api.images import list_media
from servekit.gateway.api.openai.response import new_id
from servekit.gateway.api.openai.responses_encoder import (
    ITEM_IDS,
    Json,
    ResponsesEncoder,
    response_of,
)
from servekit.gateway.api.openai.responses_events import (
    EVENTS,
    InputItems,
    InputTokens,
    RemovedResponse,
    Response,
)
from servekit.gateway.api.openai.responses_schema import (
    REFERENCE,
    InputTokensRequest,
    Item,
    ResponsesRequest,
    ask_of,
    items_of,
    prompt_of,
    to_messages,
)
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.paging import query_parameters, read_limit
from servekit.gateway.api.token_count import queue_count
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.generation.generation import (
    GenerationRequest,
)
from servekit.gateway.generation.stream_writer import ResponseEncoder
from servekit.gateway.http.asgi import EVENT_STREAM, ASGIApp
from servekit.gateway.http.response import Handler
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.router import IncompleteRequest, Router
from servekit.protocol.access import ResponseStorage
from servekit.protocol.messages import SamplingParams

if TYPE_CHECKING:
    from servekit.gateway.api.openai.background_stream import BackgroundStream
    from servekit.gateway.storage.background_store import BackgroundStore
    from servekit.gateway.storage.response_store import (
        ResponseStore,
        StoredResponse,
        StreamPart,
        StreamState,
    )

_encode = msgspec.json.Encoder().encode
#: The most items of a page.
_MOST_ITEMS = 100
_PAGE_PARAMETERS = query_parameters(
    ("limit", "The most items", {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS}),
    ("after", "Only items after the one of this id", {"type": "string"}),
    ("order", "asc or desc, the default", {"enum": ["asc", "desc"]}),
)
_STREAM_PARAMETERS = query_parameters(
    (
        "stream",
        "true: the events of a response that is streamed in the background",
        {"enum": ["true", "false"]},
    ),
    (
        "starting_after",
        "Only events after the one of this sequence_number",
        {"type": "integer", "minimum": 0},
    ),
)
#: How often a stream in the background is looked for new events, and once none come.
_FOLLOW_EVERY_S = 0.1
_FOLLOW_AT_LEAST_S = 1.0
#: How long a client that waits hears nothing.
_SILENCE_S = 15.0

#: The stream in the background that a request of the gateway to itself is for.
STREAMED: ContextVar[BackgroundStream | None] = ContextVar("streamed", default=None)


class Responses:
    """The endpoints of responses, and those in the background; `handlers` by path.

    `path` is the file of stored ones.
    """

    def __init__(self, router: Router, path: Path | None = None) -> None:
        self._router = router
        self._path = path
        self.handlers: dict[str, Handler] = {
            "/v1/responses": GenerationEndpoint(router, self._parse).start_answer,
            "/v1/responses/input_tokens": GenerationEndpoint(
                router, self._parse_count
            ).start_answer,
        }
        self._wake: Callable[[], None] = lambda: None

    @property
    def _keeps(self) -> bool:
        return self._path is not None and self._rules.max_bytes > 0

    @property
    def _rules(self) -> ResponseStorage:
        return self._router.access.rules.store_responses

    @cached_property
    def _store(self) -> ResponseStore:
        from servekit.gateway.storage.response_store import ResponseStore  # SQLite, which few need

        assert self._path is not None
        return ResponseStore(self._path)

    @cached_property
    def _background(self) -> BackgroundStore:
        from servekit.gateway.storage.background_store import BackgroundStore

        assert self._path is not None
        return BackgroundStore(self._path)

    async def run_responses(self, app: ASGIApp) -> None:
        """Run responses in the background, by requests to `app`, until cancelled."""
        if self._path is not None:
            from servekit.gateway.storage.background_runner import BackgroundRunner

            runner = BackgroundRunner(self._router, lambda: self._background, app)
            self._wake = runner.woken.set
            await runner.run_held_rows()

    def close(self) -> None:
        """Write what is to be stored, and let other gateways go on with what is not done."""
        for name in ("_store", "_background"):
            if name in self.__dict__:
                getattr(self, name).close()

    def _parse(self, body: bytes, key: str) -> tuple[GenerationRequest, ResponseEncoder] | Answer:
        request = decode(ResponsesRequest, body)
        asked = ask_of(request, key)
        encoder = self._make_encoder(request, asked, len(body))
        if request.background:
            self._check_background(request, asked.params)
        if self._keeps and request.store is not False:
            encoder.keep = partial(self._keep, encoder, _owner())
        if self._refers(request):
            asked.complete = partial(self._go_on, request, encoder, _owner())
        if request.background:
            return partial(self._queue, body, request, asked, encoder, _owner())
        return asked, encoder

    def _parse_count(self, body: bytes, key: str) -> Answer:
        request = decode(InputTokensRequest, body)
        asked = prompt_of(request, key)
        if self._refers(request):
            asked.complete = partial(self._go_on, request, None, _owner())
        elif not asked.messages:
            raise RequestError("input is required", param="input")
        return partial(self._count, asked)

    async def _count(self, asked: GenerationRequest) -> bytes:
        await complete_request(self._router, asked)
        [answer] = await queue_count(self._router, asked).answers()
        return _encode(InputTokens("response.input_tokens", answer.prompt_tokens))

    def _refers(self, request: InputTokensRequest) -> bool:
        """Return whether a request goes on from what is kept here. Raises Unsupported if nothing
        is.
        """
        if request.previous_response_id:
            where, said = "previous_response_id", "the whole conversation as input"
        else:
            items = enumerate(items_of(request))
            at = next((at for at, item in items if item.type == REFERENCE), None)
            if at is None:
                return False
            where, said = f"input[{at}]", "the item itself (clients do with `store: false`)"
        if not self._keeps:
            raise Unsupported(
                f"{where}: no responses are kept here; send {said}, or set server.store_responses",
                param=where,
            )
        return True

    def _make_encoder(
        self, request: ResponsesRequest, asked: GenerationRequest, size_bytes: int
    ) -> ResponsesEncoder:
        """Return the encoder; that of a stored stream where the gateway itself asks."""
        if (stream := STREAMED.get()) is None:
            return ResponsesEncoder(request, size_bytes)
        from servekit.gateway.api.openai.background_stream import BackgroundEncoder

        asked.resume = stream.resume
        return BackgroundEncoder(request, size_bytes, stream)

    def _check_background(self, request: ResponsesRequest, params: SamplingParams) -> None:
        said = ""
        if not self._keeps:
            said = "no responses are kept here; set server.store_responses, or wait for the answer"
        elif request.store is False:
            said = "such a response is stored; leave out store: false"
        elif request.stream and params.logprobs is not None:
            said = (
                "such a response is streamed without log probabilities; leave them out, or stream"
            )
        if said:
            raise Unsupported(f"background: {said}", param="background")

    async def _queue(
        self,
        body: bytes,
        request: ResponsesRequest,
        asked: GenerationRequest,
        encoder: ResponsesEncoder,
        owner: str,
    ) -> bytes | AsyncIterator[bytes]:
        """Store a response that is to run in the background, and return what its client gets."""
        from servekit.gateway.storage.background_store import BackgroundResponse

        if asked.complete is not None:
            await asked.complete(asked)
        route = self._router.find(asked.model)
        self._router.access.require_model(route.status.name, base_of(route))
        self._router.check_media(route, list_media(asked.messages or ()))
        shown = encoder.encode_queued(asked, route.status.name)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in ("input", "previous_response_id", "background"):
            fields.pop(name, None)
        again = fields | {"store": msgspec.Raw(b"false")}
        items = await asyncio.to_thread(_encode_items, encoder.items)
        begin = [encoder.encode_queue_events(shown)] if request.stream else []
        response = BackgroundResponse(
            encoder.id, owner, time.time(), shown, items, _encode(again), begin
        )
        await self._background.add(response, self._rules)
        self._wake()
        return self._follow(encoder.id, owner, -1) if begin else shown

    async def _follow(self, id: str, owner: str, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a stream after the one of this number, as they are stored.

        Whichever gateway runs the response, and whether it still runs. Raises ResponseNotFound, and
        Unsupported for a response without a stream.
        """
        await self._find(id, owner)
        state = await self._store.read_stream(id, owner, after)
        if state is None:
            raise Unsupported(
                "stream: this response has no stream, for it was not created with background and"
                " stream; read it whole",
                param="stream",
            )
        stopping = asyncio.Event()
        held = IncompleteRequest(0, lambda _: stopping.set())
        self._router.hold_incomplete(held)
        try:
            async for part in self._stream_stored(id, owner, after, state, stopping):
                yield part
        finally:
            self._router.release_incomplete(held)

    async def _stream_stored(
        self, id: str, owner: str, after: int, state: StreamState | None, stopping: asyncio.Event
    ) -> AsyncIterator[bytes]:
        yield b""  # the client learns that it is heard
        told_s, pause_s = time.monotonic(), _FOLLOW_EVERY_S
        while state is not None:
            for part in state.parts:
                yield _events_after(part, after)
                after, told_s, pause_s = part.last, time.monotonic(), _FOLLOW_EVERY_S
            if state.done:
                return
            if stopping.is_set():
                said = f"servekit shuts down; when it is back, go on with starting_after={after}"
                yield _encode_error_event(after + 1, ModelUnavailable.code, said)
                return
            if time.monotonic() > told_s + _SILENCE_S:
                told_s = time.monotonic()
                yield b": waiting\n\n"  # proxies end a silent connection
            if not state.parts:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await stopping.wait()
                pause_s = min(pause_s * 1.2, _FOLLOW_AT_LEAST_S)
            state = await self._store.read_stream(id, owner, after)
        said = "the stream is kept no longer; read the response"
        yield _encode_error_event(after + 1, "stream_gone", said)

    def _keep(self, encoder: ResponsesEncoder, owner: str, response: bytes) -> None:
        size_bytes = len(response) + encoder.size_bytes
        asked = partial(_encode_items, encoder.items)
        self._store.save(encoder.id, owner, response, asked, size_bytes, self._rules)

    async def _go_on(
        self,
        request: InputTokensRequest,
        encoder: ResponsesEncoder | None,
        owner: str,
        asked: GenerationRequest,
    ) -> None:
        """Put the conversation of the previous response before the input, and items in the place
        of their references.
        """
        earlier: list[Item] = []
        size_bytes = 0
        if request.previous_response_id is not None:
            stored = await self._find_done(
                request.previous_response_id, owner, "previous_response_id"
            )
            earlier = await asyncio.to_thread(_decode_conversation, stored)
            size_bytes = len(stored.input) + len(stored.response)
        items, more_bytes = await self._replace_references(items_of(request), owner)
        items = [*earlier, *items]
        if encoder is not None:
            encoder.items = items
            encoder.size_bytes += size_bytes + more_bytes
        asked.messages = to_messages(request.instructions, items, len(earlier))
        most = self._router.access.rules.limits.messages
        if len(asked.messages) > most:
            raise RequestError(
                f"previous_response_id: the conversation has {len(asked.messages)} messages, over"
                f" the limit of {most}; see server.limits.messages",
                param="previous_response_id",
            )

    async def _replace_references(self, items: list[Item], owner: str) -> tuple[list[Item], int]:
        """Return the items with those of this owner that are referred to by their ids, and the
        bytes of what was read for it.
        """
        found: dict[str, Item] = {}
        read: set[str] = set()
        size_bytes = 0
        replaced: list[Item] = []
        for at, item in enumerate(items):
            if item.type != REFERENCE:
                replaced.append(item)
                continue
            where = f"input[{at}]"
            id = item.id or ""
            if (response := response_of(id)) not in read:
                read.add(response)
                with contextlib.suppress(ResponseNotFound):  # it is the item that the client knows
                    stored = await self._find_done(response, owner, where)
                    size_bytes += len(stored.response)
                    output = await asyncio.to_thread(_decode_output, stored)
                    found |= {one.id: one for one in output if one.id is not None}
            if id not in found:
                raise ResponseNotFound(
                    f"{where}: no item {id[:100]!r} is kept here; send the item itself",
                    param=where,
                )
            replaced.append(found[id])
        return replaced, size_bytes

    async def _find_done(self, id: str, owner: str, param: str) -> StoredResponse:
        stored = await self._find(id, owner, param)
        if stored.status:
            raise NotDone(f"{param}: this response is not done; wait for it", param=param)
        return stored

    async def _find(self, id: str, owner: str, param: str | None = None) -> StoredResponse:
        stored: StoredResponse | None = None
        if self._keeps:
            stored = await self._store.find(id, owner, self._rules)
        if stored is None:
            raise _not_found(id, param)
        return stored

    def add_reads(self, app: FastAPI) -> None:
        """Add the endpoints of stored responses."""

        @app.get(
            "/v1/responses/{id}",
            tags=["OpenAI"],
            summary="A stored response",
            openapi_extra={"parameters": _STREAM_PARAMETERS},
        )
        async def read(id: str, request: Request) -> Reply:
            if request.query_params.get("stream", "false").lower() != "true":
                return _reply(await self._read(id))
            after = _read_after(request.query_params)
            events = await begin_stream(self._follow(id, _owner(), after))
            headers = {name.decode(): value.decode() for name, value in EVENT_STREAM}
            return StreamingResponse(events, headers=headers)

        @app.get(
            "/v1/responses/{id}/input_items",
            tags=["OpenAI"],
            summary="The items that the model was asked with",
            openapi_extra={"parameters": _PAGE_PARAMETERS},
        )
        async def read_items(id: str, request: Request) -> Reply:
            stored = await self._find(id, _owner())
            items = await asyncio.to_thread(msgspec.json.decode, stored.input)
            return _reply(_encode(_page(items, request.query_params)))

        @app.delete("/v1/responses/{id}", tags=["OpenAI"], summary="Forget a stored response")
        async def remove(id: str) -> Reply:
            await self._find(id, _owner())
            if not await self._store.remove_response(id, _owner()):
                raise _not_found(id)
            self._wake()
            return _reply(_encode(RemovedResponse(id, "response", True)))

        @app.post(
            "/v1/responses/{id}/cancel", tags=["OpenAI"], summary="Cancel one in the background"
        )
        async def cancel(id: str) -> Reply:
            from servekit.gateway.storage.background_store import NotInBackground

            stored = await self._find(id, _owner())
            if not stored.status and not msgspec.json.decode(stored.response)["background"]:
                raise NotInBackground(f"{id[:100]!r} is not in the background")
            await self._background.cancel(id, _owner(), self._rules)
            self._wake()
            return _reply(await self._read(id))

    async def _read(self, id: str) -> bytes:
        """Return a response as its client gets it."""
        stored = await self._find(id, _owner())
        if not stored.status:
            return stored.response
        return _encode(msgspec.json.decode(stored.response) | {"status": stored.status})


class ResponseNotFound(RequestError):
    """No response of this id is kept for the key: it was not to be stored, or is too old. Send the
    whole conversation.
    """

    status = 404
    code = "response_not_found"


class NotDone(RequestError):
    """The response that is named runs in the background. Wait until it is done."""

    code = "response_not_done"


class _Answered(msgspec.Struct):
    """The part of a response that the conversation goes on from."""

    output: list[Item]


def _not_found(id: str, param: str | None = None) -> ResponseNotFound:
    return ResponseNotFound(f"no response {id[:100]!r} is kept here", param=param)


def _owner() -> str:
    """Return the name of the current caller's key; "" without keys."""
    caller = ACTING.get()
    return "" if caller is None else caller.rule.name


def _read_after(query: Mapping[str, str]) -> int:
    """Return the number of the last event that a client has. Raises RequestError."""
    given = query.get("starting_after")
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise RequestError(
            "starting_after: expected the sequence_number of an event, 0 or more",
            param="starting_after",
        )
    return int(given)


def _events_after(part: StreamPart, after: int) -> bytes:
    """Return the events of a part after the one of this number."""
    if part.first > after:
        return part.data
    events = part.data.split(b"\n\n")[after + 1 - part.first : -1]
    return b"".join([b"%b\n\n" % event for event in events])


def _encode_error_event(number: int, code: str, message: str) -> bytes:
    error = {"type": "error", "sequence_number": number, "code": code, "message": message}
    return b"event: error\ndata: %b\n\n" % _encode(error | {"param": None})


def _reply(body: bytes) -> Reply:
    return Reply(body, media_type="application/json")


def _decode_conversation(stored: StoredResponse) -> list[Item]:
    """Return the items that led to a response, and its own."""
    return [*msgspec.json.decode(stored.input, type=list[Item]), *_decode_output(stored)]


def _decode_output(stored: StoredResponse) -> list[Item]:
    return msgspec.json.decode(stored.response, type=_Answered).output


def _encode_items(items: list[Item]) -> bytes:
    """Return items as OpenAI has them, each with an id of its own."""
    found: list[Json] = []
    taken: set[str] = set()
    for item in items:
        made = _to_json(item)
        if item.id is None or item.id in taken:
            made["id"] = new_id(ITEM_IDS.get(item.type, "item_"))
        taken.add(made["id"])
        found.append(made)
    return _encode(found)


def _to_json(item: Item) -> Json:
    """Return an item without its empty fields, and with those that clients rely on."""
    found: Json = msgspec.to_builtins(item)
    found = {name: value for name, value in found.items() if value is not None}
    speaks = item.type == "message" and item.role == "assistant"
    if isinstance(item.content, str) and item.type == "message":
        found["content"] = [{"type": "output_text" if speaks else "input_text"}]
        found["content"][0]["text"] = item.content
    if item.type == "reasoning":
        found.setdefault("summary", [])
    if speaks or item.type != "message":
        found["status"] = "completed"
    if speaks:
        for part in found["content"]:
            part.setdefault("annotations", [])
    return found


def _page(items: list[Json], query: Mapping[str, str]) -> InputItems:
    """Return the items that `order`, `after` and `limit` ask for. Raises RequestError."""
    order, limit = query.get("order", "desc"), read_limit(query, 20, _MOST_ITEMS)
    if order not in ("asc", "desc"):
        raise RequestError("order: expected asc or desc", param="order")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        at = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise RequestError("after: there is no such item", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItems("list", page, first, last, len(page) < len(items))


OPERATIONS = (
    Operation("/v1/responses", "A response", ResponsesRequest, Response, EVENTS),
    Operation(
        "/v1/responses/input_tokens",
        "The number of tokens of a prompt",
        InputTokensRequest,
        InputTokens,
    ),
)
