"""The lines of a batch's file: which are requests, which file has none, and what they become."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from servekit.gateway.http.asgi import ASGIApp
from servekit.gateway.routing.router import Router
from servekit.gateway.storage import batch_runner, batch_store, leases
from servekit.gateway.storage.batch_runner import (
    BatchRunner,
    LineError,
    parse_line,
    read_lines,
    validate_file,
)
from servekit.gateway.storage.batch_store import Batch, BatchStore, StoredFile
from servekit.protocol.access import AccessRules, BatchRules
from servekit.protocol.messages import ModelStatus, Topology

RULES = BatchRules(max_bytes=10**6, max_files=9, max_batches=9, concurrent=1)
CHAT = "/v1/chat/completions"


def line(**changed: object) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    return json.dumps(whole | changed).encode()


def test_long_lines_are_passed_over_and_blank_ones_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"\n".join((b"x" * 10, b"", b"y" * 11, b"z" * 35, b"last")))
    assert list(read_lines(file, 10)) == [(1, b"x" * 10), (3, None), (4, None), (5, b"last")]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"\xef\xbb\xbf{}\r\n{}\r\n")
    assert [text for _, text in read_lines(file, 10)] == [b"{}", b"{}"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"[1]\n2\n", "invalid_json_line"), (b"[" * 9000, "invalid_json_line"),
     (line() + b"\n" + b"{}\n" * 50_000, "too_many_requests")],
)  # fmt: skip
def test_a_file_without_requests(tmp_path: Path, content: bytes, code: str) -> None:
    file = tmp_path / "in"
    file.write_bytes(content)
    _, [error] = validate_file(file, 10**6)
    assert error["code"] == code


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    _, [error] = validate_file(tmp_path / "none", 10**6)
    assert error["code"] == "invalid_file"


@pytest.mark.parametrize(
    ("text", "code", "id"),
    [(None, "body_too_large", None), (b"[]", "invalid_line", None),
     (b'{"custom_id": 1}', "invalid_line", None), (b'{"custom_id": "a"}', "invalid_line", "a"),
     (line(custom_id=""), "invalid_custom_id", ""), (line(method="GET"), "invalid_method", "a"),
     (line(url="/v1/embeddings"), "mismatched_endpoint", "a"),
     (line(body=1), "invalid_body", "a"), (line(body={"model": 1}), "invalid_body", "a"),
     (b"\xff", "invalid_line", None), (line(body={"stream": True}), "unsupported_parameter", "a"),
     (line(body={"background": True}), "unsupported_parameter", "a")],
)  # fmt: skip
def test_a_line_that_is_no_request(text: bytes | None, code: str, id: str | None) -> None:
    with pytest.raises(LineError) as found:
        parse_line(text, CHAT)
    assert (found.value.code, found.value.custom_id) == (code, id)


def test_a_line_that_is_one() -> None:
    assert json.loads(bytes(parse_line(line(), CHAT).body)) == {"model": "m"}


async def add_batch(store: BatchStore, id: str, **changed: object) -> None:
    """Add a batch of the lines a, b and c."""
    written, now_s = store.make_path(), time.time()
    written.write_bytes(b"\n".join(line(custom_id=name, **changed) for name in "abc"))
    file = StoredFile(f"file-{id}", "", "batch", "", 9, now_s, now_s + 60)
    await store.add_file(written, file, RULES)
    record = {"input_file_id": file.id, "endpoint": CHAT}
    batch = Batch(id, "", now_s, now_s + 60, "validating", record, 0, 0, 0, 0)
    await store.add_batch(batch, RULES)


async def run_batch(store: BatchStore, router: Router, app: ASGIApp) -> Batch:
    """Run a batch of three lines, whose model is not served, and return it."""
    router.access.apply_rules(AccessRules(batches=RULES))
    await add_batch(store, "batch_1")
    runner = BatchRunner(router, lambda: store, app, 10**6)
    for held in await runner.claim() or ():
        await runner.work(held)
    return await store.find_batch("batch_1", "")


async def test_each_result_is_a_line_of_json_whatever_server_answered(tmp_path: Path) -> None:
    """Some endpoints may be forwarded to any server."""
    answers = [
        (200, b'{\n  "a": [1, "\xff"]\n}\n'),
        (500, b"Internal\nServer Error"),
        (200, b"\xff{"),
    ]
    store = BatchStore(tmp_path / "files")

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        status, body = answers.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    done = await run_batch(store, Router("gateway/test"), answer)
    assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
    files = [store.path(done.record[f"{kind}_file_id"]) for kind in ("output", "error")]
    results = [json.loads(text) for file in files for text in file.read_bytes().splitlines()]
    bodies = {one["custom_id"]: one["response"]["body"] for one in results}
    assert bodies == {"a": {"a": [1, "\ufffd"]}, "b": "Internal\nServer Error", "c": "\ufffd{"}
    store.close()


async def test_a_gateway_that_drains_ends_once_each_answer_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, router = BatchStore(tmp_path / "files"), Router("gateway/test")
    idle, save = [], store.save_result

    async def note(*args: Any, **more: Any) -> int:
        router.drain()  # no call is left
        size = await save(*args, **more)
        idle.append(router.idle.is_set())
        router.draining = False
        router.idle.clear()
        return size

    monkeypatch.setattr(store, "save_result", note)
    done = await run_batch(store, router, send_nothing)
    assert (done.failed, idle) == (3, [False] * 3)
    store.close()


async def test_batches_of_a_model_that_is_down_keep_no_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MOST_HELD", 1)
    monkeypatch.setattr(batch_runner, "MOST_HELD", 1)
    monkeypatch.setattr(batch_runner, "_STUCK_S", 0.2)
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 0.05)
    store, router = BatchStore(tmp_path / "files"), Router("gateway/test")
    down = ModelStatus("down", "echo", "-", 7, ())
    router.apply_topology(Topology((down,), False, 1, access=AccessRules(batches=RULES)))
    await add_batch(store, "batch_down", body={"model": "down"})
    await add_batch(store, "batch_1")
    runner = BatchRunner(router, lambda: store, send_nothing, 10**6)
    running = asyncio.create_task(runner.run_held_rows())
    async with asyncio.timeout(60):
        while (await store.find_batch("batch_1", "")).status != "completed":  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.02)
    assert (await store.find_batch("batch_down", "")).status == "in_progress"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    store.close()


async def send_nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


@pytest.mark.parametrize("left_s", [60.0, -1.0])
async def test_a_batch_whose_file_is_gone_fails_with_a_reason(
    tmp_path: Path, left_s: float
) -> None:
    store, router = BatchStore(tmp_path / "files"), Router("gateway/test")
    router.access.apply_rules(AccessRules(batches=RULES))
    await add_batch(store, "batch_1")
    runner = BatchRunner(router, lambda: store, send_nothing, 10**6)
    [held] = await store.claim_batches()
    assert await store.begin(held, 3, [])
    await store.save_result("batch_1", 1, good=True, result=b"{}")
    store.path("file-batch_1").unlink()
    [held] = await store.claim_batches()
    held.expires = time.time() + left_s
    await runner.work(held)
    done = await store.find_batch("batch_1", "")
    [error] = done.record["errors"]["data"]
    assert (done.status, error["code"]) == ("failed", "invalid_file")
    assert store.path(done.record["output_file_id"]).read_bytes() == b"{}\n"
    store.close()
