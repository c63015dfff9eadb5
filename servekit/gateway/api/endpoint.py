"""POST endpoints off the fast path: read a body, write an answer or an error of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.api.responder import DisconnectWatcher, ResponseEncoder, respond
from servekit.gateway.generation.generation import GenerationRequest, open_turn
from servekit.gateway.http.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    api_key,
    read_body,
    send_json,
    session_of,
)
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import Delta

Refuse = Callable[[Send, ServekitError], Awaitable[None]]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Parses a body and the client's key into a request and its answer format, or into the answer.
ParseTurn = Callable[[bytes, str], tuple[GenerationRequest, ResponseEncoder] | bytes]
ParseCalls = Callable[[bytes, str], tuple["Calls", Callable[[list[Delta]], bytes]]]
ParsePlain = Callable[[bytes], bytes]


class Calls(Protocol):
    """The calls of one HTTP request, which succeed or fail together."""

    def cancel(self) -> None: ...

    async def answers(self) -> list[Delta]: ...


class EndpointFactory:
    """Makes the endpoints of one API. `refuse` writes an error in that API's format."""

    def __init__(self, router: Router, max_body_bytes: int, refuse: Refuse) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes
        self._refuse = refuse

    def turn(self, parse: ParseTurn) -> Endpoint:
        """Return an endpoint whose answer is a generation, streamed or whole."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                body = await read_body(scope, receive, self._max_body_bytes)
                parsed = parse(body, api_key(scope))
                del body  # otherwise the body stays in memory while the answer is generated
                if isinstance(parsed, bytes):
                    turn = None
                else:
                    parsed[0].session = session_of(scope) or parsed[0].session
                    turn = await open_turn(self._router, parsed[0])
            except ClientGone:
                return
            except ServekitError as error:
                await self._refuse(send, error)
                return
            if isinstance(parsed, bytes):
                await send_json(send, parsed)
            elif turn is not None:
                await respond(turn, parsed[1], receive, send)

        return endpoint

    def calls(self, parse: ParseCalls) -> Endpoint:
        """Return an endpoint whose answer combines several calls, none of them streamed."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                body = await read_body(scope, receive, self._max_body_bytes)
                asked, write = parse(body, api_key(scope))
                del body
            except ClientGone:
                return
            except ServekitError as error:
                await self._refuse(send, error)
                return
            watch = DisconnectWatcher(asked, receive)
            try:
                answers = await asked.answers()
                # writing thousands of vectors would block the event loop, and with it all streams
                await send_json(send, await asyncio.to_thread(write, answers))
            except ClientClosed:
                return
            except RequestError as error:
                await self._refuse(send, error)
            finally:
                watch.end()
                asked.cancel()

        return endpoint

    def plain(self, parse: ParsePlain) -> Endpoint:
        """Return an endpoint that the gateway answers by itself, without a worker."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                answer = parse(await read_body(scope, receive, self._max_body_bytes))
            except ClientGone:
                return
            except ServekitError as error:
                await self._refuse(send, error)
                return
            await send_json(send, answer)

        return endpoint
