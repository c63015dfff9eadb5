"""`python -m tests.odd_server --port N`: a server with OpenAI's API that misbehaves when told to.

It counts: each token of an answer is the next number, so that whoever continues an answer can be
told from who begins a new one. Words of a prompt make it misbehave once the answer has N tokens,
and never where the answer it was given has them already:

    DIE=N      it kills itself             EXIT=N     it exits with code 7
    BREAK=N    it hangs up                 STALL=N    it stops in the middle, for ever
    ERROR      500, at once                CLOSE      it hangs up after the head, the first time
    ILL=N      it says that it is broken, as vLLM does, and its health page too

With `--images taken` an image is IMAGE_TOKENS of the prompt, with `ignored` none; otherwise it is
refused. A POST to /v1/seen returns the messages of the last chat, one to /v1/asked the whole body.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

_TROUBLE = re.compile(r"(DIE|EXIT|BREAK|STALL|ILL)=(\d+)")
IMAGE_TOKENS = 7
#: A grandchild that outlives the server unless somebody ends it: the test sees that it is gone.
_SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.closed = self.asleep = self.ill = False
        self.asked: Any = {}

    async def serve(self) -> None:
        await asyncio.sleep(self.args.late_s)
        self.ready_at = time.monotonic() + self.args.load_s
        server = await asyncio.start_server(self.connection, "127.0.0.1", self.args.port)
        async with server:
            await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, page, _ = head.split(" ", 2)
                found = re.search(r"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(found[1])) if found else b""
                await self.answer(writer, method, page, json.loads(body) if body else {})
                await writer.drain()
        writer.close()

    async def answer(self, writer: asyncio.StreamWriter, method: str, page: str, body: Any) -> None:
        ready = time.monotonic() >= self.ready_at and not (self.args.never_ready or self.ill)
        match page:
            case "/health":
                whole(writer, {"ready": ready}, 200 if ready else 503)
            case "/v1/models":
                whole(writer, {"data": [{"id": "counter", "max_model_len": 4096}]})
            case "/sleep" | "/wake":
                self.asleep = page == "/sleep"
                whole(writer, {"asleep": self.asleep})
            case "/v1/embeddings":
                one = {"index": 0, "embedding": [0.5, 0.25]}
                whole(writer, {"data": [one], "usage": {"prompt_tokens": 1}})
            case "/v1/seen":
                whole(writer, self.asked["messages"])
            case "/v1/asked":
                whole(writer, self.asked)
            case "/v1/completions":
                await self.count(writer, body, str(body["prompt"]), "")
            case "/v1/chat/completions" if not self.args.no_chat:
                self.asked = body
                texts = [str(one["content"]) for one in body["messages"]]
                images = sum(text.count("'image_url': {'url'") for text in texts)
                recordings = sum(text.count("'input_audio': {'data'") for text in texts)
                blind, deaf = self.args.images == "refused", not self.args.audio
                if (images and blind) or (recordings and deaf):
                    whole(writer, {"error": {"message": "no eyes, or no ears"}}, 400)
                    return
                goes_on = body.get("continue_final_message") and not self.args.no_prefix
                begun = texts.pop() if goes_on else ""
                tokens = images * IMAGE_TOKENS if self.args.images == "taken" else 0
                tokens += recordings * IMAGE_TOKENS
                await self.count(writer, body, " ".join(texts), begun, chats=True, more=tokens)
            case _:
                whole(writer, {"error": {"message": f"no {page}"}}, 404)

    async def count(
        self,
        writer: asyncio.StreamWriter,
        body: Any,
        prompt: str,
        begun: str,
        chats: bool = False,
        more: int = 0,
    ) -> None:
        if "ERROR" in prompt:
            whole(writer, {"error": {"message": "told to fail"}}, 500)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        if "CLOSE" in prompt and not self.closed:
            self.closed = True
            raise ConnectionError
        # a plain prompt has the answer so far at its end
        before = len(re.findall(r"\d+;", begun if chats else prompt))
        trouble, at = next(iter(_TROUBLE.findall(prompt)), ("", "0"))
        most = body.get("max_tokens", 16)
        for number in range(most):
            if trouble and before + number == int(at):
                if trouble == "ILL" and not before:
                    self.ill = True
                    event(writer, {"error": {"message": "the core is dead"}})
                    return
                await misbehave(trouble, writer, begun_at=before)
            text = f" {before + number};"
            piece = {"delta": {"content": text}} if chats else {"text": text}
            event(writer, {"choices": [{"index": 0, **piece}]})
            await writer.drain()
            await asyncio.sleep(self.args.step_s)
        nothing: dict[str, Any] = {"delta": {}} if chats else {"text": ""}
        last = {"index": 0, "finish_reason": "length", **nothing}
        event(writer, {"choices": [last]})
        tokens = {"prompt_tokens": 5 + more + before, "completion_tokens": most}
        event(writer, {"choices": [], "usage": tokens})
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def misbehave(trouble: str, writer: asyncio.StreamWriter, begun_at: int) -> None:
    if begun_at:
        return  # it has happened
    match trouble:
        case "DIE":
            os.kill(os.getpid(), signal.SIGKILL)
        case "EXIT":
            print("out of luck", flush=True)
            os._exit(7)
        case "BREAK":
            writer.transport.abort()
            raise ConnectionError
        case "STALL":
            await asyncio.Event().wait()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(writer: asyncio.StreamWriter, data: Any) -> None:
    writer.write(chunk(b"data: " + json.dumps(data).encode() + b"\n\n"))


def whole(writer: asyncio.StreamWriter, data: Any, status: int = 200) -> None:
    body = json.dumps(data).encode()
    head = f"HTTP/1.1 {status} So\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.odd_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0, help="503 at first")
    parser.add_argument("--late-s", type=float, default=0.0, help="take the port later")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--no-chat", action="store_true")
    parser.add_argument("--no-prefix", action="store_true", help="begin a new answer, always")
    parser.add_argument("--images", choices=("taken", "ignored", "refused"), default="refused")
    parser.add_argument("--audio", action="store_true", help="take recordings")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--exit-code", type=int, help="exit at once")
    parser.add_argument("--prints", type=int, default=0, help="this many lines")
    parser.add_argument("--grandchildren", type=int, default=0, help="in sessions of their own")
    args = parser.parse_args()
    for number in range(args.prints):
        print(f"line {number} {'x' * 100}")
    if args.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(args.grandchildren):
        subprocess.Popen(_SLEEPER, start_new_session=True)
    print("odd server", flush=True)
    if args.exit_code is not None:
        sys.exit(args.exit_code)
    asyncio.run(Server(args).serve())


if __name__ == "__main__":
    main()
