"""The page as an application in this process: on which loop it runs, and how it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.ui.app import UI, build_app, calm_gradio, find_redirect
from servekit.gateway.ui.lean_gradio import import_gradio
from tests.polling import poll_async
from tests.unit.gateway.conftest import Service


async def client(ui: UI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(ui.app)
    return httpx.AsyncClient(transport=transport, base_url="http://test/ui", timeout=30)


@pytest.mark.lane("long")
async def test_questions_reach_the_router_on_its_own_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.up()
    loops: list[asyncio.AbstractEventLoop] = []
    opened = service.router.queue_call

    def watched(call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
        loops.append(asyncio.get_running_loop())  # raises in a thread of Gradio's
        return opened(call, timeout_s)

    monkeypatch.setattr(service.router, "queue_call", watched)
    supervisor = Supervisor(None, service.router.access)
    ui = await asyncio.to_thread(build_app, service.router, supervisor, 2**20)
    await ui.startup()
    try:
        async with await client(ui) as http:
            end = await ask(http, "hello", max_tokens=5)
    finally:
        await ui.shutdown()
    assert end["success"] is True
    assert loops == [asyncio.get_running_loop()]
    assert service.router.in_flight == 0


async def ask(http: httpx.AsyncClient, text: str, max_tokens: int) -> dict[str, Any]:
    """Submit a question as the page does; returns Gradio's last word."""
    dependencies = (await http.get("/config", params={"page": ""})).json()["dependencies"]
    [submit] = [d for d in dependencies if any(t[1] == "submit" for t in d["targets"])]
    data: list[Any] = [text, "", "m", [], "", None, None, None, max_tokens, None]
    body = {"data": data, "fn_index": submit["id"], "session_hash": "s", "trigger_id": 1}
    (await http.post("/gradio_api/queue/join", json=body)).raise_for_status()
    events = (await http.get("/gradio_api/queue/data", params={"session_hash": "s"})).text
    messages = [json.loads(line[5:]) for line in events.splitlines() if line.startswith("data:")]
    return next(m for m in messages if m["msg"] == "process_completed")


@pytest.mark.parametrize(
    ("path", "language", "there"),
    [
        ("/ui/", "en", None),
        ("/ui", "en", "/ui/"),
        ("/ui/zh", "en", "/ui/zh/"),
        ("/ui/", "zh-CN,zh;q=0.9", "/ui/zh/"),
        ("/ui/compare", "zh", "/ui/zh/compare"),
        ("/ui/zh/compare", "en", None),
        ("/ui/zh/", "en", None),
        ("/ui/compare/", "en", "/ui/compare"),
        ("/ui/zh/operate/", "en", "/ui/zh/operate"),
        ("/ui/theme.css", "zh", None),
        ("/ui/gradio_api/queue/data", "zh", None),
    ],
)
def test_who_is_led_to_which_page(path: str, language: str, there: str | None) -> None:
    headers = [(b"accept-language", language.encode())]
    assert find_redirect({"method": "GET", "path": path, "headers": headers}) == there
    assert find_redirect({"method": "POST", "path": path, "headers": headers}) is None


async def test_a_queue_does_not_poll_while_it_is_paused_and_answers_afterwards() -> None:
    import_gradio()
    from fastapi import FastAPI
    from gradio import Blocks, Textbox, mount_gradio_app

    let_go = asyncio.Event()

    async def reverse(text: str) -> str:
        await let_go.wait()
        return text[::-1]

    with Blocks() as blocks:
        box = Textbox()
        box.submit(reverse, box, box)
    paused = calm_gradio(blocks)
    outer = FastAPI()
    mount_gradio_app(outer, blocks, path="/ui")
    transport = httpx.ASGITransport(outer)
    queue: Any = blocks._queue
    async with (
        outer.router.lifespan_context(outer),
        httpx.AsyncClient(transport=transport, base_url="http://test/ui", timeout=30) as http,
    ):
        await asyncio.sleep(0)  # a task that returns at once has ended
        coroutines: Any = [task.get_coro() for task in asyncio.all_tasks()]
        assert "_delete_state" not in {one.__name__ for one in coroutines}, (
            "it wakes up each second"
        )
        for text, answer in (("abc", "cba"), ("once more", "erom ecno")):
            body = {"data": [text], "fn_index": 0, "session_hash": "s", "trigger_id": 1}
            (await http.post("/gradio_api/queue/join", json=body)).raise_for_status()
            assert not paused.pause(), "an event waits"
            paused.resume()
            await poll_async("it runs", lambda: any(queue.active_jobs))
            assert not paused.pause(), "an event runs"
            let_go.set()
            streamed = await http.get("/gradio_api/queue/data", params={"session_hash": "s"})
            assert f'"data":["{answer}"]' in streamed.text
            await poll_async("it has ended", paused.pause)
            await poll_async("it does not poll", lambda: not paused.polls)
            assert not queue.stopped, "Gradio refuses events of stopped queues"
            let_go.clear()
