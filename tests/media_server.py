"""`python -m tests.media_server --port N`: a server of recordings, images and scores.

It has one answer to all chats. It answers in forms, server-sent events and bytes, and
misbehaves when the `prompt` of a request says so:

    DIE        it kills itself once it has the whole request
    DIE_EARLY  it kills itself once the body has begun
    BREAK=N    it hangs up after N bytes of a stream          DIE=N    it kills itself there
    CLOSE      it hangs up without an answer, the first time
    STATUS=N   it answers with this status
    GARBAGE    it answers with what is no HTTP
    BYTES=N    its answer has so many bytes, and no length before
    SLOW       it takes a second              SLEEP=N   it takes N seconds
    ECHO       it answers with what it was sent: headers, query, fields and the size of each file
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import signal
from typing import Any

from aiohttp import BodyPartReader, web

NAME = "the-servers-own-name"
_NUMBER = re.compile(r"(BREAK|DIE|STATUS|BYTES|SLEEP)=(\d+)")
_PIECE = b"0123456789abcdef" * 1024


class Media:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.closed = False
        self.read_bytes = self.sent_bytes = self.requests = self.cancelled = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/figures", self.figures)
        app.router.add_post("/{path:.*}", self.answer)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def models(self, request: web.Request) -> web.Response:
        self.check_key(request)
        return web.json_response({"data": [{"id": NAME}]})

    async def figures(self, request: web.Request) -> web.Response:
        names = ("read_bytes", "sent_bytes", "requests", "cancelled")
        return web.json_response({name: getattr(self, name) for name in names})

    def check_key(self, request: web.Request) -> None:
        key = os.environ.get(self.args.key_variable or "", "")
        if self.args.key_variable and request.headers.get("authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized(text="wrong key")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.check_key(request)
        self.requests += 1
        try:
            fields = await self.read(request)
            return await self.respond(request, fields, str(fields.get("prompt", "")))
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise

    async def read(self, request: web.Request) -> dict[str, Any]:
        if not (request.content_type or "").startswith("multipart/"):
            body = await request.read()
            self.read_bytes += len(body)
            return await request.json() if body[:1] == b"{" else {"body": len(body)}
        fields: dict[str, Any] = {}
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            digest, size = hashlib.sha256(), 0
            text = b""
            while piece := await part.read_chunk(2**16):
                digest.update(piece)
                size += len(piece)
                self.read_bytes += len(piece)
                text = (text + piece)[:4096]
                if fields.get("prompt") == "DIE_EARLY" and part.filename:
                    os.kill(os.getpid(), signal.SIGKILL)
            name = str(part.name)
            fields[name] = [size, digest.hexdigest()] if part.filename else text.decode()
        return fields

    async def respond(
        self, request: web.Request, fields: dict[str, Any], prompt: str
    ) -> web.StreamResponse:
        if fields.get("model", NAME) != NAME:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        assert request.transport is not None
        match prompt:
            case "DIE":
                os.kill(os.getpid(), signal.SIGKILL)
            case "CLOSE" if not self.closed:
                self.closed = True
                request.transport.abort()
            case "GARBAGE":
                request.transport.write(b"\x16\x03\x01 what is this?\r\n\r\n")
                request.transport.close()
            case "SLOW":
                await asyncio.sleep(1)
            case "ECHO":
                headers = {name.lower(): value for name, value in request.headers.items()}
                told = {"headers": headers, "query": request.query_string, "path": request.path}
                return web.json_response({**told, "fields": fields, "pid": os.getpid()})
        numbers = {name: int(number) for name, number in _NUMBER.findall(prompt)}
        await asyncio.sleep(numbers.get("SLEEP", 0))
        if "STATUS" in numbers:
            told = {"error": {"message": "told to"}, "secret": "kept"}
            return web.json_response(told, status=numbers["STATUS"], headers={"set-cookie": "a=b"})
        if request.path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": "hello"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})
        if request.path.endswith("/speech"):
            return await self.stream(request, numbers)
        if fields.get("stream"):
            return await self.events(request, numbers)
        if request.path.endswith("/generations"):
            return web.json_response({"created": 1, "data": [{"b64_json": "aGVsbG8="}]})
        if request.path.endswith("/rerank"):
            found = [{"index": 0, "relevance_score": 0.5}]
            return web.json_response({"results": found, "usage": {"total_tokens": 7}})
        if request.path.endswith("/transcriptions"):
            return web.json_response({"text": "hello", "file": fields.get("file")})
        return web.json_response({"error": {"message": f"no {request.path}"}}, status=404)

    async def stream(self, request: web.Request, numbers: dict[str, int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "audio/mpeg", "x-secret": "1"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        left = numbers.get("BYTES", 100_000)
        for at in range(0, left, len(_PIECE)):
            await response.write(_PIECE[: left - at])
            self.sent_bytes += len(_PIECE[: left - at])
            await self.trouble(request, numbers, at + len(_PIECE))
        await response.write_eof()
        return response

    async def events(self, request: web.Request, numbers: dict[str, int]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(20):
            await response.write(
                b'data: {"type":"transcript.text.delta","delta":" %d"}\n\n' % number
            )
            await self.trouble(request, numbers, number + 1)
            await asyncio.sleep(0.01)
        await response.write(b'data: {"type":"transcript.text.done","text":"all"}\n\n')
        await response.write_eof()
        return response

    async def trouble(self, request: web.Request, numbers: dict[str, int], sent: int) -> None:
        assert request.transport is not None
        if 0 < numbers.get("BREAK", 0) <= sent:
            request.transport.abort()
        if 0 < numbers.get("DIE", 0) <= sent:
            await asyncio.sleep(0.05)  # so that the bytes are on their way
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.media_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-variable", help="the environment variable with the key it wants")
    parser.add_argument("--key", help="the key it wants")
    args = parser.parse_args()
    if args.key:
        args.key_variable = "MEDIA_KEY"
        os.environ["MEDIA_KEY"] = args.key
    print("media server", flush=True)
    app = Media(args).application()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
