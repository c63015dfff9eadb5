"""Attacks of one client on all the others: grammars, huge bodies, readers that never read,
malformed HTTP, and what a key may see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servekit.config.load import load_config
from tests.attacks.client import Answer, Client, read_answer
from tests.attacks.scene import MIB, Attack, Scene, resident_mib
from tests.integration.instance import echo

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
#: Schemas that are small, and take minutes or gigabytes to compile or to follow.
BOMBS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "multipleOf": 99999989},
    {"type": "number", "multipleOf": 1e-30},
    {"type": "integer", "multipleOf": 2**61 - 1},
    {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
    {"type": "integer", "minimum": 1, "maximum": 10**300},
    {"enum": [f"{n:032d}" for n in range(20000)]},
)


# ---------------------------------------------------------------- grammars


def smollm2(folder: Path) -> list[dict[str, Any]]:
    path = load_config(DEMO).models[0].path
    options = {"threads": 1, "kv_cache_bytes": 256 * MIB}
    one = {"name": "m", "path": path, "device": "cpu", "max_context": 2048, "options": options}
    return [one]


async def send_schema_bombs(scene: Scene) -> None:
    """Schemas that explode, beside streams that must not notice."""
    due = (await scene.client.chat("m", "Count to ten.", 24, stream=False)).text
    [worker] = await scene.workers()
    before_mib = resident_mib(worker)

    async def ask(number: int) -> tuple[Answer, str]:
        answer = await scene.client.chat("m", "Count to ten.", 24, stream=number % 2 == 0)
        return answer, due

    async def drop(schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await scene.client.chat("m", "Hi", 8, stream=False, response_format=form)
        scene.account.check_form(answer)
        settled = answer.status in (200, 400, 429, 503)
        scene.account.expect(settled, f"{str(schema)[:60]} was answered {answer.status}")
        scene.account.expect(answer.took_s < 30, f"{str(schema)[:60]} took {answer.took_s:.0f} s")

    async with scene.bystanders(2, ask):
        for schema in BOMBS:
            await asyncio.gather(*(drop(schema) for _ in range(2)))
    await scene.expect_deaths(0, "schemas")
    [after] = await scene.workers()
    scene.account.expect(after == worker, "the worker was replaced")
    grown = resident_mib(after) - before_mib
    scene.account.expect(grown < 300, f"the worker has grown by {grown:.0f} MiB")


async def ask_many_grammars(scene: Scene) -> None:
    """Long prompts at once that all keep to one grammar, which is compiled already."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 10

    async def ask(number: int) -> None:
        answer = await scene.client.chat(
            "m", f"{number} {prompt}", 2, stream=False, response_format={"type": "json_object"}
        )
        scene.account.requests += 1
        scene.account.check_form(answer)
        busy = answer.status == 503 and "retry-after" in answer.headers
        scene.account.expect(answer.status == 200 or busy, f"{answer.status} {answer.error}")

    await ask(0)
    await asyncio.gather(*(ask(number) for number in range(1, 33)))


async def send_odd_tokens(scene: Scene) -> None:
    """Token ids at and beyond the edge of the vocabulary, where they can be put."""
    edge = 49152
    bodies: list[dict[str, Any]] = [
        {"prompt": [edge - 1, 5, 6], "repetition_penalty": 1.3},
        *({"prompt": [token], "repetition_penalty": 1.3} for token in (edge, edge + 7, -1, 2**31)),
        *({"prompt": "a", "logit_bias": {str(t): 5}} for t in (edge - 1, edge, -1, 2**31, 2**63)),
        {"prompt": "a", "stop_token_ids": [edge]},
        {"prompt": "a", "stop_token_ids": [-1, 2**40]},
    ]
    for body in bodies:
        body = {"model": "m", "max_tokens": 2, "presence_penalty": 0.5} | body
        answer = await scene.client.post("/v1/completions", body, stream=False)
        scene.account.requests += 1
        scene.account.check_form(answer)
        scene.account.expect(answer.status in (200, 400), f"{body} was answered {answer.status}")
    await scene.expect_deaths(0, "token ids")


# ---------------------------------------------------------------- queues and memory


def few_slots(folder: Path) -> list[dict[str, Any]]:
    return [echo("m", step_s=0.02, slots=8) | {"max_queue": 4}]


async def crowd_one_gateway(scene: Scene) -> None:
    """Eight connections on one gateway of two, and a worker with eight slots: all are served."""
    pids = await scene.gateways()
    connections: list[socket.socket] = []
    mine: list[socket.socket] = []
    while len(mine) < 8 and len(connections) < 200:
        one = socket.create_connection((scene.client.host, scene.client.port))
        connections.append(one)
        await asyncio.sleep(0.02)
        if gateway_of(one, pids) == pids[0]:
            mine.append(one)

    async def ask(one: socket.socket, number: int) -> tuple[Answer, str]:
        answer, text, began_s = Answer(), f"question {number}!" * 8, time.monotonic()
        body = {"model": "m", "prompt": text, "max_tokens": len(text), "temperature": 0}
        one.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=one)
        writer.write(scene.client.request("POST", "/v1/completions", json.dumps(body).encode()))
        async with asyncio.timeout(60):
            await read_answer(reader, answer, stream=False)
        answer.took_s = time.monotonic() - began_s
        writer.close()
        return answer, text

    answers = await scene.ask_all([ask(one, number) for number, one in enumerate(mine)])
    took_s = [answer.took_s for answer in answers]
    both = f"one answer took {max(took_s):.1f} s beside another's {min(took_s):.1f} s"
    scene.account.expect(max(took_s) < 1.6 * min(took_s), both)
    for one in connections:
        one.close()


def gateway_of(connection: socket.socket, pids: list[int]) -> int | None:
    """Return the process that has accepted a connection of ours."""
    port = f":{connection.getsockname()[1]:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {fields[9] for line in lines if (fields := line.split())[2].endswith(port)}
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).removeprefix("socket:[").rstrip("]") in inodes:
                        return pid
    return None


def one_slow_slot(folder: Path) -> list[dict[str, Any]]:
    return [echo("m", step_s=0.05, slots=1, max_context=2**24) | {"timeout_s": 20}]


async def queue_huge_bodies(scene: Scene) -> None:
    """200 bodies of 7 MiB wait behind a busy slot: the gateway's memory stays bounded."""
    [gateway] = await scene.gateways()
    busy = asyncio.ensure_future(scene.client.complete("m", "x" * 300, 300, stream=False))
    body = json.dumps({"model": "m", "prompt": "y" * (7 * MIB), "max_tokens": 1}).encode()
    request = scene.client.request("POST", "/v1/completions", body)
    peak_mib = 0.0
    writers: list[asyncio.StreamWriter] = []
    for number in range(200):
        _, writer = await asyncio.open_connection(scene.client.host, scene.client.port)
        writers.append(writer)
        writer.write(request)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.drain()
        if number % 10 == 0:
            peak_mib = max(peak_mib, resident_mib(gateway))
    scene.account.requests += 200
    scene.account.expect(peak_mib < 900, f"the gateway took {peak_mib:.0f} MiB for queued bodies")
    answer = await scene.client.get("/livez")
    scene.account.check(answer, None)
    for writer in writers:
        writer.transport.abort()
    scene.account.check(await busy, "x" * 300)

    async def has_shrunk() -> bool:
        return resident_mib(gateway) < scene.account.before_mib + 150

    await scene.until("the gateway gives the bodies back", has_shrunk, 30.0)


def endless(folder: Path) -> list[dict[str, Any]]:
    return [echo("m", max_context=2**24, slots=64, step_s=0.001)]


async def never_read(scene: Scene) -> None:
    """30 clients ask for endless streams and never read: their connections are ended."""
    body = json.dumps(
        {"model": "m", "prompt": "z" * 1000, "max_tokens": 2**23, "stream": True}
    ).encode()
    idle = []
    for _ in range(30):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect((scene.client.host, scene.client.port))
        one.sendall(scene.client.request("POST", "/v1/completions", body))
        idle.append(one)

    async def are_gone() -> bool:
        models = (await scene.status()).models
        return not any(replica.running for model in models for replica in model.replicas)

    await asyncio.sleep(2)
    await scene.until("requests of clients that never read are ended", are_gone, 60.0)
    scene.account.requests += len(idle)
    scene.account.check(await scene.client.complete("m", "abc", 3, stream=True), "abc")
    for one in idle:
        one.close()


# ---------------------------------------------------------------- HTTP


@dataclass(frozen=True)
class Exchange:
    """Bytes to send, and the answer that is due."""

    name: str
    request: bytes
    due: Callable[[bytes], bool]
    half_close: bool = False


def status(*allowed: int) -> Callable[[bytes], bool]:
    """Accept an answer of one of these statuses."""
    return lambda answer: answer[9:12] in {str(code).encode() for code in allowed}


COMPLETION = b'{"model": "m", "prompt": "abc", "max_tokens": 3, "temperature": 0}'
STREAM = b'{"model": "m", "prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": true}'


def post(
    body: bytes, *headers: bytes, version: bytes = b"1.1", host: bytes = b"localhost"
) -> bytes:
    lines = [b"POST /v1/completions HTTP/" + version, b"Content-Type: application/json"]
    lines += [b"Host: " + host] if host else []
    lines += [b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


EXCHANGES = (
    Exchange(
        "HTTP/1.0 stream",
        post(STREAM, version=b"1.0"),
        lambda got: (
            got[9:12] == b"200" and b"chunked" not in got and b"\n\ndata: [DONE]\n\n" in got
        ),
    ),
    Exchange(
        "HTTP/1.0 whole",
        post(COMPLETION, version=b"1.0"),
        lambda got: got[9:12] == b"200" and b"chunked" not in got and b'"abc"' in got,
    ),
    Exchange("half-close", post(COMPLETION), lambda got: b'"abc"' in got, half_close=True),
    Exchange("half-close, stream", post(STREAM), lambda got: b"[DONE]" in got, half_close=True),
    Exchange("no Host", post(COMPLETION, host=b""), status(400)),
    Exchange("two Hosts", post(COMPLETION, b"Host: other"), status(400)),
    Exchange("foreign Host", post(COMPLETION, host=b"rebound.example"), status(400, 403, 421)),
    Exchange("Host .local", post(COMPLETION, host=b"printer.local"), status(400, 403, 421)),
    Exchange("single-label Host", post(COMPLETION, host=b"intranet"), status(400, 403, 421)),
    Exchange("two lengths", post(COMPLETION, b"Content-Length: 5"), status(400)),
    Exchange("length and chunks", post(COMPLETION, b"Transfer-Encoding: chunked"), status(400)),
    Exchange(
        "chunk extension without end",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;" + b"x" * MIB,
        status(400, 413, 431),
    ),
)


def plain(folder: Path) -> list[dict[str, Any]]:
    return [echo("m")]


async def send_odd_http(scene: Scene) -> None:
    """Requests at the edge of HTTP, each with the one right answer."""
    for one in EXCHANGES:
        scene.account.requests += 1
        got = await send_raw(scene.client, one)
        scene.account.expect(one.due(got), f"{one.name}: {got[:60]!r}")
    await send_after_413(scene)


async def send_raw(client: Client, one: Exchange) -> bytes:
    """Send bytes and return all that comes until the end, or for three seconds."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(one.request)
    if one.half_close:
        writer.write_eof()
    got = b""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(3.0):
            while data := await reader.read(65536):
                got += data
    writer.close()
    return got


async def send_after_413(scene: Scene) -> None:
    """A body of a gigabyte is refused, and not read to its end."""
    _, writer = await asyncio.open_connection(scene.client.host, scene.client.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
    writer.write(head)
    sent = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(10.0):
            while sent < 1024:
                writer.write(b" " * MIB)
                await writer.drain()
                sent += 1
    writer.transport.abort()
    scene.account.requests += 1
    scene.account.expect(sent < 256, f"{sent} MiB of a refused body were read")


# ---------------------------------------------------------------- keys


KEYS = [
    {"name": "alice", "environment": "ALICE_KEY", "models": ["m"]},
    {"name": "bob", "environment": "BOB_KEY", "models": ["classified"]},
    {"name": "root", "environment": "ROOT_KEY", "admin": True},
]


def a_secret_model(folder: Path) -> list[dict[str, Any]]:
    broken = echo("classified", load_error="no such file: /srv/secret-plans/weights")
    return [echo("m"), broken]


async def look_around(scene: Scene) -> None:
    """A key with one model reads every page; the other model's name is on none of them."""
    alice = Client(scene.client.host, scene.client.port, "alice-key-0123456789")
    pages = ["/v1/models", "/readyz", "/health", "/metrics", "/ui/", "/ui", "/ui/status"]
    pages += ["/openapi.json", "/api/tags", "/api/ps", "/ui/dashboard", "/ui/operate", "/ui/keys"]
    pages += ["/ui/config", "/ui/compare", "/ui/models", "/ui/events", "/ui/embeddings"]
    for client, who in ((alice, "a key without the model"), (scene.client, "no key")):
        for page in pages:
            answer = await client.get(page)
            scene.account.requests += 1
            told = b"classified" in answer.body or b"secret-plans" in answer.body
            scene.account.expect(not told, f"{page} tells {who} of another's model")


ATTACKS = [
    Attack("schema-bombs", "schemas that explode", smollm2, send_schema_bombs, needs_model=True),
    Attack(
        "many-grammars",
        "33 long prompts with a grammar",
        smollm2,
        ask_many_grammars,
        needs_model=True,
    ),
    Attack("odd-tokens", "token ids at the edge", smollm2, send_odd_tokens, needs_model=True),
    Attack(
        "one-gateway",
        "all connections on one of two gateways",
        few_slots,
        crowd_one_gateway,
        server={"gateways": 2},
    ),
    Attack("huge-bodies", "200 queued bodies of 7 MiB", one_slow_slot, queue_huge_bodies),
    Attack(
        "never-read",
        "30 endless streams that nobody reads",
        endless,
        never_read,
        server={"write_timeout_s": 5},
    ),
    Attack("odd-http", "HTTP at its edges", plain, send_odd_http),
    Attack(
        "keys-look-around",
        "pages read with a key for one model",
        a_secret_model,
        look_around,
        server={"ui": True},
        sections={"keys": KEYS},
        env={
            "ALICE_KEY": "alice-key-0123456789",
            "BOB_KEY": "bob-key-0123456789",
            "ROOT_KEY": "root-key-0123456789",
        },
    ),
]
