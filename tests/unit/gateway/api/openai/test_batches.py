"""Batches by their endpoints: what is taken, whose they are, and what is refused by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from servekit.errors import RequestError
from servekit.gateway.api.openai.batches import ENDPOINTS, Batches
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.http.asgi import error_object
from servekit.gateway.routing.router import Router
from servekit.protocol.access import AccessRules, BatchRules, KeyRule

CHAT = "/v1/chat/completions"
RULES = BatchRules(max_bytes=10**6, max_files=10, max_batches=3, days=1.0, concurrent=2)
KEYS = (KeyRule("ada", digest=b"a"), KeyRule("bob", digest=b"b"))
Json = dict[str, Any]


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no batch is run here")


class Scene:
    """The endpoints in an application of their own, and a client with a key."""

    def __init__(self, folder: Path | None, served: tuple[str, ...] = ENDPOINTS) -> None:
        self.router = Router("gateway/test")
        self.allow(RULES)
        self.batches = Batches(self.router, folder, nobody, 10**6)
        app = FastAPI()
        self.batches.add_routes(app, served)

        @app.exception_handler(RequestError)
        async def tell(request: Request, error: RequestError) -> JSONResponse:
            return JSONResponse({"error": error_object(error)}, error.status)

        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://servekit")

    def allow(self, rules: BatchRules) -> None:
        self.router.access.apply_rules(AccessRules(keys=KEYS, batches=rules))
        self.act("ada")

    def act(self, key: str) -> None:
        ACTING.set(self.router.access.callers[key])

    async def upload(self, content: bytes = b"{}\n", purpose: str = "batch") -> str:
        files: Json = {"file": ("in.jsonl", content), "purpose": (None, purpose)}
        answer = await self.http.post("/v1/files", files=files)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, **fields: Any) -> httpx.Response:
        known: Json = {"endpoint": CHAT, "completion_window": "24h"}
        return await self.http.post("/v1/batches", json=known | fields)

    async def made(self, **fields: Any) -> Json:
        answer = await self.create(**({"input_file_id": await self.upload()} | fields))
        assert answer.status_code == 200, answer.text
        batch: Json = answer.json()
        return batch

    async def refused(self, **fields: Any) -> Json:
        answer = await self.create(**({"input_file_id": await self.upload()} | fields))
        error: Json = answer.json()["error"]
        return error | {"status": answer.status_code}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "files")
    yield scene
    scene.batches.close()


async def test_a_batch_is_shown_as_it_was_asked_for(scene: Scene) -> None:
    file = await scene.upload()
    batch = await scene.made(input_file_id=file, metadata={"a": "b"})
    assert re.fullmatch("batch_[0-9a-f]{24}", batch["id"])
    assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "validating", CHAT)
    assert (batch["input_file_id"], batch["metadata"]) == (file, {"a": "b"})
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert (batch["errors"], batch["output_file_id"], batch["error_file_id"]) == (None,) * 3
    assert (await scene.http.get(f"/v1/batches/{batch['id']}")).json() == batch
    listed = (await scene.http.get("/v1/batches")).json()
    assert (listed["data"], listed["has_more"]) == ([batch], False)


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("1s", 1), ("90m", 5400), ("24h", 86400), ("30d", 30 * 86400), ("2592000s", None)],
)
async def test_a_batch_expires_at_the_end_of_its_window(
    scene: Scene, window: str, seconds: int | None
) -> None:
    if seconds is None:  # as long as is allowed, in more digits than are read
        assert (await scene.refused(completion_window=window))["param"] == "completion_window"
        return
    batch = await scene.made(completion_window=window)
    assert batch["completion_window"] == window
    assert batch["expires_at"] - batch["created_at"] in (seconds, seconds + 1)


@pytest.mark.parametrize("window", ["", "0h", "24", "h", "1.5h", "-1h", "31d", "721h", "24H", "1w"])
async def test_a_window_that_is_none_or_too_long_is_refused(scene: Scene, window: str) -> None:
    error = await scene.refused(completion_window=window)
    assert error["message"] == ("completion_window: expected a time such as 24h, 30 days at most")
    assert (error["status"], error["param"]) == (400, "completion_window")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"input_file_id": "file-none"}, 404, None),
        ({"input_file_id": 3}, 400, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, None),
    ],
)
async def test_a_wrong_batch_is_refused(
    scene: Scene, fields: Json, status: int, param: str | None
) -> None:
    error = await scene.refused(**fields)
    assert error["status"] == status
    assert param is None or error["param"] == param


async def test_a_batch_is_for_an_endpoint_that_this_gateway_has(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "files", (CHAT, "/v1/other"))
    error = await scene.refused(endpoint="/v1/embeddings")
    assert error["message"] == f"endpoint: expected one of {CHAT}"
    assert (await scene.made())["endpoint"] == CHAT
    scene.batches.close()


async def test_a_body_over_the_limit_is_refused(scene: Scene) -> None:
    assert (await scene.create(input_file_id="x" * 70_000)).status_code == 413


async def test_batches_are_of_their_key(scene: Scene) -> None:
    mine = await scene.made()
    scene.act("bob")
    assert (await scene.http.get("/v1/batches")).json()["data"] == []
    for path in (mine["id"], f"{mine['id']}/cancel"):
        ask = scene.http.post if "cancel" in path else scene.http.get
        assert (await ask(f"/v1/batches/{path}")).status_code == 404
    theirs = await scene.create(input_file_id=mine["input_file_id"])
    assert theirs.status_code == 404, "nor may another's file be run"
    assert (await scene.made())["id"] != mine["id"]
    scene.act("ada")
    assert (await scene.http.get(f"/v1/batches/{mine['id']}")).json() == mine


async def test_a_batch_is_cancelled(scene: Scene) -> None:
    batch = await scene.made()
    cancelled = (await scene.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert (cancelled["id"], cancelled["status"]) == (batch["id"], "cancelling")
    assert cancelled["cancelling_at"] >= batch["created_at"]


async def test_no_more_batches_are_taken_than_a_key_may_have(scene: Scene) -> None:
    for _ in range(RULES.max_batches):
        await scene.made()
    assert (await scene.refused())["status"] == 429
    newest = (await scene.http.get("/v1/batches?limit=2")).json()
    assert (len(newest["data"]), newest["has_more"]) == (2, True)
    rest = (await scene.http.get(f"/v1/batches?after={newest['last_id']}")).json()
    assert (len(rest["data"]), rest["has_more"]) == (1, False)


async def test_where_there_are_none_it_says_which_key_sets_them(tmp_path: Path) -> None:
    for scene in (Scene(None), Scene(tmp_path / "files")):
        scene.allow(BatchRules())
        answer = await scene.create(input_file_id="x")
        assert answer.status_code == 404
        assert "set server.batches" in answer.json()["error"]["message"]
        assert (await scene.http.get("/v1/batches")).status_code == 404
        scene.batches.close()
    assert not (tmp_path / "files").exists()
    await Scene(None).batches.run_batches()  # it has nothing to run


async def test_uploads_under_way_share_the_room_of_their_key(scene: Scene) -> None:
    """Else a key with many slow uploads would fill the disk, and each be refused at its end."""
    go_on = asyncio.Event()
    kind = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'

    async def form(size_bytes: int) -> AsyncIterator[bytes]:
        yield part % b"purpose" + b"batch\r\n" + part % b"file" + b"x" * size_bytes
        await go_on.wait()
        yield b"\r\n--b--\r\n"

    def upload(size_bytes: int) -> asyncio.Task[httpx.Response]:
        body = form(size_bytes)
        return asyncio.create_task(scene.http.post("/v1/files", content=body, headers=kind))

    first, second = upload(600_000), upload(600_000)
    done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert [one.result().status_code for one in done] == [413]
    small = upload(300_000)
    go_on.set()
    statuses = sorted([(await one).status_code for one in (first, second, small)])
    assert statuses == [200, 200, 413]
    assert (await upload(99_000)).status_code == 200, "nothing is counted any more"
