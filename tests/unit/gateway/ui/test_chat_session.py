"""Conversations of the page, through a real router to a real engine; no browser, no Gradio."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.ui.chat_session import Chats, View
from servekit.gateway.ui.conversation import (
    THOUGHTS,
    Settings,
    StoredMessage,
    make_messages,
)
from servekit.gateway.ui.widgets.request_runner import Runs, Visit
from servekit.protocol.messages import ChatMessage, Preset, Topology
from tests.unit.gateway.conftest import DEADLINE_S, ENDLESS, ENDLESS_TOKENS, Service, until


def asked(text: str = "hello ") -> list[StoredMessage]:
    return [StoredMessage(role="user", content=text)]


def open_chats(service: Service) -> Chats:
    return Chats(service.router, Runs(service.router))


async def views(
    chats: Chats, *, session: str = "s", tokens: int = 24, event: int = 0
) -> list[View]:
    visit, settings = Visit(session, "ui"), Settings(max_tokens=tokens)
    async with asyncio.timeout(DEADLINE_S):
        answer = chats.answer_turn(visit, "m", asked(), settings, event=event)
        return [view async for view in answer]


async def test_an_answer_grows_and_ends_saved_with_its_figures(service: Service) -> None:
    await service.up(step_s=0.01)
    seen = await views(open_chats(service), tokens=40)
    texts = [view.turns[1]["content"] for view in seen if len(view.turns) > 1]
    assert len(texts) > 2
    assert texts == sorted(texts, key=len)
    assert texts[-1] == ("hello " * 7)[:40]
    last = seen[-1]
    assert (last.busy, last.save, last.error) == (False, True, "")
    assert (last.progress.tokens, last.progress.finish) == (40, "length")
    assert last.progress.first_s is not None
    assert last.progress.rate == pytest.approx(100, rel=0.6)


async def test_an_answer_that_comes_at_once_has_no_rate(service: Service) -> None:
    await service.up()
    last = (await views(open_chats(service), tokens=8))[-1]
    assert last.progress.tokens == 8
    assert last.progress.rate is None


async def test_stop_keeps_what_there_is_and_frees_the_engine(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    chats = open_chats(service)
    task = asyncio.create_task(views(chats, tokens=ENDLESS_TOKENS))
    await until(lambda: len(worker.steps) > 20)
    chats.stop_answer("other")
    assert worker.running == 1
    chats.stop_answer("s")
    last = (await task)[-1]
    await until(lambda: worker.running == 0)
    assert last.progress.finish == "cancelled"
    assert last.turns[1]["content"].startswith("hello hello")
    assert (last.save, last.busy, last.error) == (True, False, "")
    assert service.router.in_flight == 0


async def test_a_late_stop_ends_no_later_answer(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    chats = open_chats(service)
    task = asyncio.create_task(views(chats, tokens=ENDLESS_TOKENS, event=2))
    await until(lambda: len(worker.steps) > 20)
    chats.stop_answer("s", 1)
    assert worker.running == 1
    chats.stop_answer("s", 2)
    assert (await task)[-1].progress.finish == "cancelled"


async def test_a_dropped_answer_says_no_more(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    chats = open_chats(service)
    task = asyncio.create_task(views(chats, tokens=ENDLESS_TOKENS))
    await until(lambda: len(worker.steps) > 20)
    chats.drop_answer("s")
    assert all(view.busy for view in await task)
    await until(lambda: worker.running == 0)


async def test_a_new_question_replaces_the_one_under_way(service: Service) -> None:
    [worker] = await service.up(step_s=0.01)
    chats = open_chats(service)
    first = asyncio.create_task(views(chats, tokens=4000))
    await until(lambda: worker.running == 1)
    assert (await views(chats, tokens=5))[-1].turns[1]["content"] == "hello"
    assert all(view.busy for view in await first)
    assert service.router.in_flight == 0


async def test_a_reader_who_leaves_cancels(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    settings = Settings(max_tokens=ENDLESS_TOKENS)
    answer = open_chats(service).answer_turn(Visit("s", "ui"), "m", asked(), settings)
    async for view in answer:
        if view.progress.tokens:
            break
    await answer.aclose()
    await until(lambda: worker.running == 0)
    assert service.router.in_flight == 0


async def test_who_waits_is_told_the_position(service: Service) -> None:
    await service.up(step_s=0.01, slots=1)
    chats = open_chats(service)
    tasks = [asyncio.create_task(views(chats, session=f"s{at}", tokens=20)) for at in range(3)]
    all_views = [await task for task in tasks]
    waited = [{view.progress.waiting for view in seen} - {None} for seen in all_views]
    assert waited == [set(), {0}, {1, 0}]
    assert {seen[-1].progress.tokens for seen in all_views} == {20}


async def test_errors_end_an_answer_with_their_sentence(service: Service) -> None:
    [worker] = await service.up(step_s=0.01)
    chats = open_chats(service)
    answer = chats.answer_turn(Visit("s", "ui"), "nobody", asked(), Settings())
    last = [view async for view in answer][-1]
    assert "'nobody' is not served here" in last.error
    assert (last.turns, last.busy) == (asked(), False)
    task = asyncio.create_task(views(chats, tokens=4000))
    await until(lambda: len(worker.steps) > 20)
    service.tell(worker.status("failed", "out of memory"))
    worker.kill()
    last = (await task)[-1]
    assert "out of memory" in last.error
    assert last.turns[1]["content"].startswith("hello")


async def test_thoughts_are_shown_apart_and_not_sent_again(service: Service) -> None:
    [worker] = await service.up(said={"reasoning_parser": "think"}, step_s=0.005)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    chats = open_chats(service)
    text = "<think>why</think>so"
    settings = Settings(max_tokens=len(text))
    answer = chats.answer_turn(Visit("s", "ui"), "m", asked(text), settings)
    seen = [view async for view in answer]
    said = [view.turns[-1]["content"] for view in seen if len(view.turns) == 2]
    assert said[-1] == f"{THOUGHTS[0]}why{THOUGHTS[1]}so"
    assert any(content.startswith(THOUGHTS[0]) and THOUGHTS[1] not in content for content in said)
    turns = seen[-1].turns
    again = make_messages([*turns, StoredMessage(role="user", content="and?")], {})
    assert [message["content"] for message in again] == [text, "so", "and?"]


async def test_a_preset_is_asked_as_over_http(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its switch off, what an answer of a model that thinks at once begins with is text."""
    [worker] = await service.up(said={"reasoning_parser": "think"})
    info = worker.runner.info
    off_at = (("enable_thinking", False),)
    dialect = replace(info.dialect, thinks_at_once=True, thinking_switches=off_at)
    info = replace(info, dialect=dialect)
    off = {"enable_thinking": False, "thinking": False}
    presets = Preset("fast", {"top_k": 3}, "Be short.", off), Preset("same", {})
    status = replace(service.router.routes["m"].status, info=info, presets=presets)
    service.router.apply_topology(Topology((status,)))
    calls: list[InflightRequest] = []
    take = service.router.queue_call

    def open(call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
        calls.append(call)
        return take(call, timeout_s)

    monkeypatch.setattr(service.router, "queue_call", open)
    said = {}
    for model in ("fast", "same"):
        settings = Settings(max_tokens=3)
        answer = open_chats(service).answer_turn(Visit("s", "ui"), model, asked("abc"), settings)
        said[model] = [view async for view in answer][-1].turns[-1]["content"]
    assert said == {"fast": "abc", "same": f"{THOUGHTS[0]}abc{THOUGHTS[1]}"}
    fast, same = calls
    assert (fast.params.top_k, fast.params.max_tokens) == (3, 3)
    assert fast.messages is not None and fast.messages[0] == ChatMessage("system", "Be short.")
    assert (fast.more, same.more) == ({"template": off}, {})
