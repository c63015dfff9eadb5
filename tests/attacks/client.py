"""A client of HTTP/1.1 and server-sent events, written for this purpose: it takes nothing on trust.

Framing, headers, event syntax, ids, finish reasons, usage and the closing event are checked as well
as the text; every fault is a sentence in `Answer.faults`.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

#: No answer takes longer than this, whatever happens to the service, unless the client says so.
DEADLINE_S = 90.0


@dataclass
class Answer:
    """All that came back for one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    text: str = ""
    finish: str = ""
    error: str = ""  # code of an error body or error event, or why no answer came
    faults: list[str] = field(default_factory=list)  # breaches of HTTP, SSE or the API's form
    took_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the client did not get an answer that came to its end."""
        return self.status != 200 or bool(self.error) or not self.finish


class Broken(Exception):
    """The bytes are not an answer of HTTP/1.1."""


@dataclass(frozen=True)
class Client:
    """One service, perhaps with a key. Every request has a connection of its own."""

    host: str
    port: int
    key: str = ""
    address: str = ""  # of the client, if it is not to be the system's choice
    deadline_s: float = DEADLINE_S

    async def complete(
        self, model: str, prompt: str, tokens: int, *, stream: bool, **fields: Any
    ) -> Answer:
        """Ask /v1/completions; `fields` are further fields of the body."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return await self.post("/v1/completions", body | fields, stream=stream)

    async def chat(
        self, model: str, content: str, tokens: int, *, stream: bool, **fields: Any
    ) -> Answer:
        """Ask /v1/chat/completions."""
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        return await self.post("/v1/chat/completions", body | fields, stream=stream)

    async def post(self, path: str, body: dict[str, Any], *, stream: bool) -> Answer:
        """Send a body and read its whole answer; failures are in it, never raised."""
        if stream:
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        return await self.exchange(self.request("POST", path, json.dumps(body).encode()), stream)

    async def get(self, path: str) -> Answer:
        """Read a page."""
        return await self.exchange(self.request("GET", path), stream=False)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request that closes its connection."""
        head = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        if method == "POST":
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    async def exchange(self, request: bytes, stream: bool) -> Answer:
        """Send bytes and read an answer up to the end of its connection."""
        answer, began_s = Answer(), time.monotonic()
        try:
            async with asyncio.timeout(self.deadline_s):
                local = (self.address, 0) if self.address else None
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, local_addr=local
                )
                try:
                    writer.write(request)
                    await read_answer(reader, answer, stream=stream)
                finally:
                    writer.close()
        except TimeoutError:
            answer.error = f"no end within {self.deadline_s:g} s"
        except (OSError, Broken, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.took_s = time.monotonic() - began_s
        return answer


async def read_answer(reader: asyncio.StreamReader, answer: Answer, *, stream: bool) -> None:
    """Read head and body, and what they say, into `answer`."""
    await read_head(reader, answer)
    answer.body = await read_body(reader, answer.headers)
    if await reader.read(1):
        answer.faults.append("bytes after the end of the answer")
    if answer.status != 200:
        read_error(answer)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        read_events(answer)
    elif answer.headers.get("content-type") == "application/json":
        if stream:
            answer.faults.append("a stream was asked for, and is not one")
        read_whole(answer)
    else:
        answer.finish = "page"


async def read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Read the status line and the headers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    version, status, _ = head[0].split(" ", 2)
    if version != "HTTP/1.1" or not (status.isdecimal() and len(status) == 3):
        raise Broken(f"status line {head[0]!r}")
    answer.status = int(status)
    for line in head[1:]:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip() or name.lower() in answer.headers:
            raise Broken(f"header {line!r}")
        answer.headers[name.lower()] = value.strip()


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """Read a body by its length or by its chunks."""
    if headers.get("transfer-encoding") == "chunked":
        if "content-length" in headers:
            raise Broken("both a length and chunks")
        parts = []
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            parts.append(await reader.readexactly(size))
            if await reader.readexactly(2) != b"\r\n":
                raise Broken("a chunk that is longer than it says")
        if await reader.readexactly(2) != b"\r\n":
            raise Broken("no end of the last chunk")
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()


def read_error(answer: Answer) -> None:
    """Read an error in the envelope of OpenAI's API."""
    try:
        error = json.loads(answer.body)["error"]
        answer.error = error["code"] or error["type"]
        if not error["message"]:
            answer.faults.append("an error without a message")
    except (ValueError, KeyError, TypeError):
        answer.error = "no envelope"
        answer.faults.append(f"status {answer.status} without an error body: {answer.body[:80]!r}")
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        answer.faults.append(f"status {answer.status} without Retry-After")


def read_whole(answer: Answer) -> None:
    """Read an answer that was not streamed."""
    found = json.loads(answer.body)
    if "choices" not in found:
        answer.finish = "other"
        return
    [choice] = found["choices"]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer.finish = choice["finish_reason"]
    usage = found["usage"]
    if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
        answer.faults.append(f"usage does not add up: {usage}")


def read_events(answer: Answer) -> None:
    """Read a stream: syntax of its events, one id, finish reason and usage, the closing event."""
    *events, rest = answer.body.split(b"\n\n")
    if rest:
        answer.faults.append(f"half an event: {rest[:80]!r}")
    ids, usages, texts = set(), 0, []
    for at, event in enumerate(events):
        if event.startswith(b":"):
            continue
        if not event.startswith(b"data: ") or b"\n" in event:
            answer.faults.append(f"no event: {event[:80]!r}")
            continue
        if event == b"data: [DONE]":
            if at != len(events) - 1:
                answer.faults.append("events after [DONE]")
            continue
        found = json.loads(event[6:])
        if "error" in found:
            answer.error = found["error"]["code"] or found["error"]["type"]
            continue
        ids.add(found["id"])
        usages += found.get("usage") is not None
        for choice in found["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text and answer.finish:
                answer.faults.append("text after the finish reason")
            texts.append(text or "")
            if choice["finish_reason"]:
                if answer.finish:
                    answer.faults.append("two finish reasons")
                answer.finish = choice["finish_reason"]
    answer.text = "".join(texts)
    if not answer.error:
        if len(ids) != 1:
            answer.faults.append(f"{len(ids)} ids")
        if usages != 1:
            answer.faults.append(f"{usages} usages")
        if not events or events[-1] != b"data: [DONE]":
            answer.faults.append("no [DONE]")
