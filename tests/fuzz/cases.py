"""What is sent: the case of a seed and a number, always the same one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

from tests.fuzz import hostile, mutate
from tests.fuzz.bodies import BODIES, GETS, METHODS, ODD


class Manner(Enum):
    WHOLE = "whole"  # valid HTTP: an answer is due for each request
    CUT = "cut"  # the client leaves in the middle of the answer
    BROKEN = "broken"  # no valid HTTP, or not all of it: refused, or nothing


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as far as its answer is judged by it."""

    method: str
    path: str  # decoded, without a query
    may_time_out: bool = False  # it names a timeout of its own


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    endpoint: str  # its row in the table
    pieces: tuple[bytes, ...]  # each sent in a segment of its own
    asked: tuple[Asked, ...]
    manner: Manner = Manner.WHOLE
    leave_after_bytes: int = 0
    reset: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces))


#: How often what comes; huge bodies, deep in megabytes, are few.
ODDS = {
    "body": 760, "get": 50, "odd": 60, "pipelined": 30, "cut": 40, "broken": 50, "chunked": 40,
    "headers": 40, "slow": 20,
}  # fmt: skip
HUGE_EVERY = 2000
#: Early on many come at once: allocators keep what their process has needed at its peak, and what
#: grows after that is a leak.
HUGE_AT_ONCE = range(100, 124)
PATHS = tuple(BODIES)
#: As often as their variety asks for.
WEIGHTS = tuple(max(2, len(bodies)) for bodies in BODIES.values())


class Maker:
    """Makes cases. `models` are the names that a body's model becomes, in `share` of them."""

    def __init__(
        self, seed: int, models: Sequence[str], legacy: bool = True, share: float = 0.15
    ) -> None:
        self._seed = seed
        self._share = share
        self._models = tuple(models)
        self._paths = tuple(p for p in PATHS if legacy or p not in ("/inference", "/stream"))
        self._weights = tuple(WEIGHTS[PATHS.index(path)] for path in self._paths)

    def case(self, number: int) -> Case:
        rng = random.Random(f"{self._seed}:{number}")
        if number % HUGE_EVERY == HUGE_EVERY - 1 or number in HUGE_AT_ONCE:
            path = rng.choice(("/v1/chat/completions", "/v1/completions", "/v1/embeddings"))
            return self._whole(number, path, hostile.huge(rng))
        kind = rng.choices(tuple(ODDS), tuple(ODDS.values()))[0]
        made: Case = getattr(self, f"_{kind}")(rng, number)
        return made

    # ---- kinds

    def _body(self, rng: random.Random, number: int) -> Case:
        path = self._path(rng)
        return self._whole(number, path, self._made(rng, path))

    def _get(self, rng: random.Random, number: int) -> Case:
        path = rng.choice(GETS)
        method = rng.choice(("GET", "GET", "GET", "HEAD"))
        return Case(number, path, (head(method, path),), (asked(method, path),))

    def _odd(self, rng: random.Random, number: int) -> Case:
        path = rng.choice((*ODD, *self._paths, *GETS))
        method = rng.choice(METHODS)
        body = rng.choice((b"", b"{}", b"x" * 50))
        data = head(method, path, f"content-length: {len(body)}") + body
        return Case(number, "unknown paths, methods", (data,), (asked(method, path, odd=True),))

    def _pipelined(self, rng: random.Random, number: int) -> Case:
        data, due = b"", []
        for _ in range(rng.randrange(2, 6)):
            path = self._path(rng)
            body = self._made(rng, path)
            data += post(path, body)
            due.append(asked("POST", path, body))
        at = rng.randrange(len(data))
        pieces = (data,) if rng.random() < 0.5 else (data[:at], data[at:])
        return Case(number, "pipelined", pieces, tuple(due))

    def _cut(self, rng: random.Random, number: int) -> Case:
        path = rng.choice(
            ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
             "/api/chat", "/api/generate", "/stream")
        )  # fmt: skip
        if path not in self._paths:
            path = "/v1/completions"
        body = json.dumps(_long_stream(rng, path)).encode()
        return Case(
            number, "streams cut by the client", (post(path, body),), (asked("POST", path, body),),
            Manner.CUT, rng.choice((0, 1, 50, 400, 3000)), rng.random() < 0.5,
        )  # fmt: skip

    def _broken(self, rng: random.Random, number: int) -> Case:
        path = self._path(rng)
        body = self._made(rng, path)
        data = _break(rng, path, body)
        return Case(number, "broken HTTP", (data,), (asked("POST", ""),), Manner.BROKEN)

    def _chunked(self, rng: random.Random, number: int) -> Case:
        path = self._path(rng)
        body = self._made(rng, path)
        data = head("POST", path, "transfer-encoding: chunked") + chunks(rng, body)
        return Case(number, path, (data,), (asked("POST", path, body),))

    def _headers(self, rng: random.Random, number: int) -> Case:
        path = self._path(rng)
        body = self._made(rng, path)
        return self._whole(number, path, body, *rng.sample(HEADERS, rng.randrange(1, 4)))

    def _slow(self, rng: random.Random, number: int) -> Case:
        path = self._path(rng)
        body = self._made(rng, path)
        data = post(path, body)
        ends = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(1, 8)))
        pieces = tuple(data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True))
        return Case(number, path, pieces, (asked("POST", path, body),))

    # ---- parts

    def _path(self, rng: random.Random) -> str:
        return rng.choices(self._paths, self._weights)[0]

    def _made(self, rng: random.Random, path: str) -> bytes:
        valid = rng.choice(BODIES[path])
        if rng.random() < self._share and "model" in valid:
            valid = {**valid, "model": rng.choice(self._models)}
        return mutate.body(rng, valid)

    def _whole(self, number: int, path: str, body: bytes, *headers: str) -> Case:
        return Case(number, path, (post(path, body, *headers),), (asked("POST", path, body),))


# ---------------------------------------------------------------- bytes


def asked(method: str, path: str, body: bytes = b"", *, odd: bool = False) -> Asked:
    plain = unquote(path.partition("?")[0], "latin-1")
    return Asked(method, "" if odd and plain not in BODIES else plain, b"timeout_s" in body)


def head(method: str, path: str, *headers: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "host: localhost", *headers)
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    if not any(header.startswith("content-type") for header in headers):
        headers = ("content-type: application/json", *headers)
    return head("POST", path, f"content-length: {len(body)}", *headers) + body


def chunks(rng: random.Random, body: bytes) -> bytes:
    """A body in chunks of whatever size, with extensions and trailers now and then."""
    size = rng.choice((1, 7, 100, 5000))
    if len(body) > 2000:
        size = max(size, len(body) // 20)
    more = rng.choice((b"", b"", b";a=b", b';x="y"'))
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    data = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), more, piece) for piece in pieces)
    return data + b"0\r\n" + rng.choice((b"", b"", b"x-trailer: 1\r\n")) + b"\r\n"


HEADERS = (
    "content-type: text/plain", "content-type: multipart/form-data; boundary=x", "content-type: ",
    "content-encoding: gzip", "expect: 100-continue", "accept: text/html;q=0", "x-a: \xff\xfe",
    "authorization: Bearer \xe9", "authorization: Basic !!!", "x-api-key: " + "k" * 3000,
    "cookie: " + "a=b; " * 500, "origin: null", "accept-encoding: gzip, br", "range: bytes=0-5",
    "if-none-match: *", "x-forwarded-for: ::1", "connection: close", "te: trailers",
    "anthropic-version: 1", "upgrade: websocket", "x-empty:", "openai-organization: \t",
    "content-type: application/json; charset=utf-16", "connection: upgrade", "host: y",
)  # fmt: skip


def _long_stream(rng: random.Random, path: str) -> dict[str, Any]:
    """A body whose answer takes long enough to be left: the slow model's."""
    tokens, text = rng.choice((50, 400, 1500)), "abc " * rng.choice((1, 100))
    talk = [{"role": "user", "content": text}]
    stream = rng.random() < 0.8
    common: dict[str, Any] = {"model": "slow", "stream": stream}
    match path:
        case "/v1/chat/completions":
            return common | {"messages": talk, "max_tokens": tokens, "n": rng.choice((1, 1, 3))}
        case "/v1/completions":
            return common | {"prompt": text, "max_tokens": tokens, "n": rng.choice((1, 1, 3))}
        case "/v1/responses":
            return common | {"input": text, "max_output_tokens": tokens}
        case "/v1/messages":
            return common | {"messages": talk, "max_tokens": tokens}
        case "/api/chat":
            return common | {"messages": talk, "options": {"num_predict": tokens}}
        case "/api/generate":
            return common | {"prompt": text, "options": {"num_predict": tokens}}
        case _:
            return {"prompt": text * 4, "backend": "slow"}


def _break(rng: random.Random, path: str, body: bytes) -> bytes:
    """A request that is no HTTP, or that does not end."""
    length = len(body)
    whole = post(path, body)
    match rng.randrange(12):
        case 0:
            return whole[: rng.randrange(len(whole))]
        case 1:
            return head("POST", path, f"content-length: {length + 50}") + body
        case 2:
            return head("POST", path, f"content-length: {length // 2}") + body
        case 3:
            wrong = rng.choice(("-1", "1e3", "0x5", "", "5, 5", "9" * 30, "+3", "\u00b2"))
            return head("POST", path, f"content-length: {wrong}") + body
        case 4:
            return head("POST", path, f"content-length: {length}", "content-length: 1") + body
        case 5:
            both = (f"content-length: {length}", "transfer-encoding: chunked")
            return head("POST", path, *both) + body
        case 6:
            sizes = (
                b"zz\r\n",
                b"-5\r\n",
                b"fffffffffffffffff\r\n",
                b"5\r\nab\r\n",
                b"3\r\nabcd\r\n",
            )
            return head("POST", path, "transfer-encoding: chunked") + rng.choice(sizes)
        case 7:
            return head("POST", path, "transfer-encoding: gzip, identity") + body
        case 8:
            lines = (b"no colon", b": empty", b"a b: c", b"x: \0", b"\xff: a", b" folded: 1")
            return b"GET / HTTP/1.1\r\nhost: localhost\r\n" + rng.choice(lines) + b"\r\n\r\n"
        case 9:
            firsts = (b"GET", b"GET /", b"GET / HTTP/9.9", b"get / http/1.1", b"GET  / HTTP/1.1")
            more = (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM", b"/ GET HTTP/1.1")
            return rng.choice((*firsts, *more)) + b"\r\nhost: localhost\r\n\r\n"
        case 10:
            return head("GET", "/livez", "x: " + "y" * rng.choice((60_000, 70_000, 400_000)))
        case _:
            return rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n"
