"""Responses in the background are run through the application, tried again, and stored as they end.

The store is a real one; the application answers what a test says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servekit.errors import ModelChanged, ServekitError
from servekit.gateway.api.openai.background_stream import KEPT, BackgroundStream
from servekit.gateway.api.openai.responses import STREAMED
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.http.asgi import send_error, send_json
from servekit.gateway.routing.router import Router
from servekit.gateway.storage import background_runner, background_store
from servekit.gateway.storage.background_runner import BackgroundRunner
from servekit.gateway.storage.background_store import BackgroundResponse, BackgroundStore
from servekit.gateway.storage.leases import LEASE_S, LOOK_EVERY_S
from servekit.gateway.storage.response_store import ResponseStore, StoredResponse, StreamPart
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import AccessRules, KeyRule, ResponseStorage, SpentBudget

Json = dict[str, Any]
RULES = ResponseStorage(2**20, 30.0)
SHOWN: Json = {name: f"own {name}" for name in KEPT} | {
    "status": "queued",
    "error": None,
    "output": [],
}
ITEM = {"type": "message", "id": "msg_r1_0"}
ANSWER: Json = {name: f"other {name}" for name in KEPT} | {"status": "completed", "output": [ITEM]}
DAY_S = 86400.0


class Refused(ServekitError):
    """A refusal of any status."""

    def __init__(self, status: int, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, "refused", wait_s  # type: ignore[misc]


class Store(BackgroundStore):
    """What is put back can be claimed at once; the pauses are noted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.put_back_s: list[float] = []

    async def put_back(self, id: str, pause_s: float) -> None:
        self.put_back_s.append(pause_s)
        await super().put_back(id, -1.0)


class Scene:
    """A runner, its store, and an application that answers with the next of `answers`."""

    def __init__(self, path: Path) -> None:
        self.router = Router("gateway/test")
        self.store = Store(path)
        self.responses = ResponseStore(path)
        self.runner = BackgroundRunner(self.router, self.find_store, self.answer)
        self.answers: list[Any] = []
        self.asked: list[Json] = []
        self.callers: list[str] = []
        self.pauses: list[float] = []
        self.broken = False  # the disk, for one try
        self.breaks = False  # it breaks with the next answer
        self.allow(RULES)

    def allow(self, rules: ResponseStorage) -> None:
        keys = (KeyRule("ada", digest=b"d"),)
        self.router.access.apply_rules(AccessRules(keys=keys, store_responses=rules))

    def find_store(self) -> BackgroundStore:
        if self.broken:
            self.broken = False
            raise ResponsesUnavailable("the disk is full")
        return self.store

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        assert (scope["method"], scope["path"]) == ("POST", "/v1/responses")
        message = await receive()
        self.asked.append(msgspec.json.decode(message["body"]))
        caller = ACTING.get()
        self.callers.append("" if caller is None else caller.rule.name)
        answer = self.answers.pop(0)
        self.broken = self.breaks
        if isinstance(answer, ServekitError):
            await send_error(send, answer)
        elif isinstance(answer, dict):
            await send_json(send, msgspec.json.encode(answer))
        else:
            stream = STREAMED.get()
            assert stream is not None
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await answer(stream, send)

    async def add(self, *stream: StreamPart, created: float | None = None, id: str = "r1") -> None:
        row = BackgroundResponse(
            id,
            "ada",
            time.time() if created is None else created,
            msgspec.json.encode(SHOWN),
            b'[{"role":"user"}]',
            b'{"model":"m"}',
            list(stream),
        )
        await self.store.add(row, RULES)

    async def run(self) -> None:
        """Run what this gateway holds, once."""
        held = await self.runner.claim()
        assert held is not None
        async with asyncio.timeout(30):
            for row in held:
                await self.runner.work(row)

    async def found(self) -> Json:
        stored = await self.stored()
        assert stored.status == "", "it is not done"
        response: Json = msgspec.json.decode(stored.response)
        return response

    async def stored(self) -> StoredResponse:
        stored = await self.responses.find("r1", "ada", RULES)
        assert stored is not None
        return stored

    async def events(self) -> list[str]:
        state = await self.responses.read_stream("r1", "ada", -1)
        assert state is not None
        return [one for part in state.parts for one in part.data.decode().split("\n\n") if one]


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Its pauses are noted and take no time."""
    scene, sleep = Scene(tmp_path / "responses.db"), asyncio.sleep

    async def note(pause_s: float) -> None:
        scene.pauses.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr(background_runner, "_WRITE_EVERY_S", 0.001)
    yield scene
    scene.store.close()
    scene.responses.close()


# ---------------------------------------------------------------- whole answers


async def test_a_response_is_asked_for_in_the_name_of_its_key_and_stored(scene: Scene) -> None:
    await scene.add()
    scene.answers = [ANSWER]
    await scene.run()
    assert scene.asked == [{"model": "m", "input": [{"role": "user"}]}]
    assert scene.callers == ["ada"]
    assert await scene.found() == ANSWER | {name: SHOWN[name] for name in KEPT}
    await scene.run()
    assert len(scene.asked) == 1, "it is answered once"


async def test_a_refusal_that_stays_is_how_the_response_ends(scene: Scene) -> None:
    await scene.add()
    scene.answers = [Refused(400, "input: too long")]
    await scene.run()
    error = {"code": "refused", "message": "input: too long"}
    assert await scene.found() == SHOWN | {"status": "failed", "error": error}


async def test_a_refusal_that_passes_is_tried_again(scene: Scene) -> None:
    await scene.add()
    scene.answers = [Refused(429, "busy", 0.01), Refused(503, "loading", 7.0), ANSWER]
    for _ in range(2):
        await scene.run()
        assert (await scene.stored()).status == "in_progress"
    await scene.run()
    assert (scene.store.put_back_s, scene.pauses) == ([1.0, 7.0], [])
    assert (await scene.found())["status"] == "completed"


@pytest.mark.parametrize("stream", [(), (StreamPart(0, 0, b""),)])
async def test_a_gateway_that_drains_ends_once_the_answer_is_stored(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, stream: tuple[StreamPart, ...]
) -> None:
    await scene.add(*stream)
    scene.answers, idle, finish = [tell("c") if stream else ANSWER], [], scene.store.finish_response

    async def note(*args: Any) -> None:
        scene.router.drain()  # no call is left
        await finish(*args)
        idle.append(scene.router.idle.is_set())

    monkeypatch.setattr(scene.store, "finish_response", note)
    await scene.run()
    assert (idle, scene.router.idle.is_set()) == ([False], True)
    assert (await scene.found())["status"] == "completed"


async def test_none_is_begun_once_the_gateway_drains(scene: Scene) -> None:
    await scene.add()
    held = await scene.runner.claim()
    assert held is not None
    scene.router.drain()
    await scene.runner.work(held[0])
    assert (scene.asked, scene.pauses) == ([], [])


@pytest.mark.parametrize("stream", [(), (StreamPart(0, 0, b""),)])
async def test_one_of_a_key_without_tokens_waits_for_them(
    scene: Scene, stream: tuple[StreamPart, ...]
) -> None:
    await scene.add(*stream)
    ada = scene.router.access.callers["ada"]
    ada.spent = SpentBudget("ada", "daily", 100, time.time() + 3600)
    await scene.run()
    assert (scene.asked, scene.store.put_back_s) == ([], [30.0])
    ada.spent = None
    scene.answers = [tell("c") if stream else ANSWER]
    await scene.run()
    assert (await scene.found())["status"] == "completed"


async def test_what_a_key_has_asked_for_waits_while_the_file_lacks_it(scene: Scene) -> None:
    """As where an operator replaces a key in two steps."""
    await scene.add()
    scene.router.access.apply_rules(
        AccessRules(keys=(KeyRule("bob", digest=b"d"),), store_responses=RULES)
    )
    await scene.run()
    assert (scene.asked, len(scene.store.put_back_s)) == ([], 1)
    scene.allow(RULES)
    scene.answers = [ANSWER]
    await scene.run()
    assert (await scene.found())["status"] == "completed"
    assert scene.callers == ["ada"]


async def test_those_that_are_refused_for_now_keep_no_others_waiting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_store, "_MOST_HELD", 1)
    for at in range(3):
        await scene.add(id=f"refused{at}", created=time.time() - 60 + at)
    await scene.add()
    scene.answers = [Refused(503, "no worker", 30.0) for _ in range(3)] + [ANSWER]
    for _ in range(4):
        await scene.run()
    assert (await scene.found())["status"] == "completed"


async def test_after_a_day_a_refusal_stands(scene: Scene) -> None:
    await scene.add(created=time.time() - DAY_S)
    scene.answers = [Refused(503, "loading", 1.0)]
    await scene.run()
    assert (await scene.found())["error"]["message"] == "loading"


async def test_just_before_the_day_is_over_it_is_tried_once_more(scene: Scene) -> None:
    await scene.add(created=time.time() - DAY_S + 20)
    scene.answers = [Refused(503, "loading", 10.0), Refused(503, "still loading", 30.0)]
    for _ in range(2):
        await scene.run()
    assert scene.store.put_back_s == [10.0]
    assert (await scene.found())["error"]["message"] == "still loading"


async def test_it_is_stored_as_soon_as_the_disk_takes_it(scene: Scene) -> None:
    await scene.add()
    scene.answers, scene.breaks = [ANSWER], True
    await scene.run()
    assert scene.pauses == [LOOK_EVERY_S], "it was tried, and again after a pause"
    assert (await scene.found())["status"] == "completed"


async def test_a_disk_that_cannot_be_read_leaves_the_response_for_later(scene: Scene) -> None:
    await scene.add()
    held = await scene.runner.claim()
    assert held is not None
    scene.broken = True
    await scene.runner.work(held[0])
    assert (scene.asked, (await scene.stored()).status) == ([], "in_progress")
    assert scene.pauses == [LOOK_EVERY_S], "it is claimed again at once"


async def test_a_fault_of_our_own_leaves_the_response_for_later(scene: Scene) -> None:
    await scene.add()
    await scene.run()  # the application has no answer
    assert (await scene.stored()).status == "in_progress"
    assert scene.store.put_back_s == [LEASE_S], "others may go on meanwhile"
    scene.answers = [ANSWER]
    await scene.run()
    assert (await scene.found())["status"] == "completed"


async def test_a_response_that_was_removed_meanwhile_is_not_asked_for(scene: Scene) -> None:
    await scene.add()
    held = await scene.runner.claim()
    assert held is not None and [row.id for row in held] == ["r1"]
    await scene.responses.remove_response("r1", "ada")
    await scene.runner.work(held[0])
    assert scene.asked == []


async def test_none_is_run_where_none_is_kept_or_while_the_gateway_drains(scene: Scene) -> None:
    await scene.add()
    scene.allow(ResponseStorage(0))
    assert await scene.runner.claim() is None
    scene.allow(RULES)
    assert await scene.runner.claim() != []
    scene.router.drain()
    assert await scene.runner.claim() is None


# ---------------------------------------------------------------- streams

QUEUED = StreamPart(0, 1, b'event: a\ndata: {"type":"a"}\n\nevent: b\ndata: {"type":"b"}\n\n')


def event(name: str) -> bytes:
    return b'event: %b\ndata: {"type":"%b"}\n\n' % (name.encode(), name.encode())


def names(events: list[str]) -> list[str]:
    return [one.split("\n")[0].removeprefix("event: ") for one in events]


def tell(*parts: str, end: Json | None = ANSWER, error: Json | None = None) -> Any:
    """An answer of the application: a stream with these events."""

    async def answer(stream: BackgroundStream, send: Any) -> None:
        for name in parts:
            await send({"type": "http.response.body", "body": event(name), "more_body": True})
        stream.end, stream.error = end, error
        await send({"type": "http.response.body", "body": b""})

    return answer


async def test_a_stream_is_stored_with_its_end(scene: Scene) -> None:
    await scene.add(QUEUED)
    scene.answers = [tell("c", "d")]
    await scene.run()
    assert names(await scene.events()) == ["a", "b", "c", "d"]
    assert await scene.found() == ANSWER
    assert scene.callers == ["ada"]


async def test_events_are_stored_while_the_stream_goes_on(scene: Scene) -> None:
    await scene.add(QUEUED)
    stored: list[str] = []

    async def answer(stream: BackgroundStream, send: Any) -> None:
        await send({"type": "http.response.body", "body": event("c"), "more_body": True})
        async with asyncio.timeout(20):
            while "c" not in stored:
                stored[:] = names(await scene.events())
        stream.end = ANSWER

    scene.answers = [answer]
    await scene.run()
    assert stored == ["a", "b", "c"]
    assert names(await scene.events()) == ["a", "b", "c"]


async def test_events_are_stored_as_soon_as_the_disk_takes_them(scene: Scene) -> None:
    await scene.add(QUEUED)

    async def answer(stream: BackgroundStream, send: Any) -> None:
        scene.broken = True
        await send({"type": "http.response.body", "body": event("c"), "more_body": True})
        async with asyncio.timeout(20):
            while len(await scene.events()) < 3:
                pass
        stream.end = ANSWER

    scene.answers = [answer]
    await scene.run()
    assert names(await scene.events()) == ["a", "b", "c"]
    assert scene.pauses == [LOOK_EVERY_S]


async def test_a_stream_that_cannot_go_on_now_is_left_for_the_next_run(scene: Scene) -> None:
    await scene.add(QUEUED)
    scene.answers = [
        tell("c", end=None, error={"code": "worker_lost", "message": "it died"}),
        Refused(503, "loading", 7.0),
        tell("d"),
    ]
    for _ in range(2):
        await scene.run()
        assert (await scene.stored()).status == "in_progress"
    assert names(await scene.events()) == ["a", "b", "c"]
    assert scene.store.put_back_s == [LOOK_EVERY_S, 7.0]
    await scene.run()
    assert names(await scene.events()) == ["a", "b", "c", "d"]
    assert (await scene.found())["status"] == "completed"


async def test_a_refusal_that_stays_is_the_last_event_of_the_stream(scene: Scene) -> None:
    await scene.add(QUEUED)
    scene.answers = [Refused(400, "input: too long")]
    await scene.run()
    error = {"code": "refused", "message": "input: too long"}
    assert await scene.found() == SHOWN | {"status": "failed", "error": error}
    assert names(await scene.events()) == ["a", "b", "response.failed"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"code": "worker_lost", "message": "it died"}, "it died"),
        (None, "the stream was interrupted again and again"),
    ],
)
async def test_after_a_day_a_stream_ends_where_it_is(
    scene: Scene, error: Json | None, said: str
) -> None:
    await scene.add(QUEUED, created=time.time() - DAY_S)
    scene.answers = [tell("c", end=None, error=error)]
    await scene.run()
    assert (await scene.found())["error"]["message"] == said
    assert names(await scene.events()) == ["a", "b", "c", "response.failed"]


async def test_after_another_model_took_over_the_answer_begins_again(scene: Scene) -> None:
    """Perhaps it writes the same; after the tokens of the first it could not go on."""
    await scene.add(QUEUED)
    exact: list[bool] = []

    def noting(answer: Any) -> Any:
        async def note(stream: BackgroundStream, send: Any) -> None:
            exact.append(stream.exact)
            await answer(stream, send)

        return note

    changed = {"code": ModelChanged.code, "message": "the model was replaced"}
    other = {"code": "worker_lost", "message": "it died"}
    scene.answers = [
        noting(tell("c", end=None, error=other)),
        noting(tell(end=None, error=changed)),
        noting(tell("d")),
    ]
    for _ in range(3):
        await scene.run()
    assert exact == [True, True, False]
    assert names(await scene.events()) == ["a", "b", "c", "d"]
