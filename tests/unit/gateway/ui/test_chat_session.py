"""Conversations of the page, through a real router to a real engine; no browser, no Gradio."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import ModelUnavailable, RequestError
from servekit.gateway.api.openai.request import chat_messages, sampling
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.ui.chat_images import show_turns
from servekit.gateway.ui.chat_session import (
    THOUGHTS,
    Chats,
    Conversation,
    Settings,
    StoredImage,
    StoredMessage,
    View,
    Visit,
    make_question,
    parse_conversation,
    parse_turns,
    request_of,
    store_turns,
    turn_at,
)
from servekit.protocol.messages import ChatMessage, Preset, Topology
from tests.unit.gateway.conftest import DEADLINE_S, ENDLESS, ENDLESS_TOKENS, Service, until


def asked(text: str = "hello ") -> list[StoredMessage]:
    return [StoredMessage(role="user", content=text)]


async def views(chats: Chats, *, session: str = "s", tokens: int = 24) -> list[View]:
    settings = Settings(max_tokens=tokens)
    async with asyncio.timeout(DEADLINE_S):
        return [
            view async for view in chats.answer_turn(Visit(session, "ui"), "m", asked(), settings)
        ]


async def test_an_answer_grows_and_ends_saved_with_its_figures(service: Service) -> None:
    await service.up(step_s=0.01)
    seen = await views(Chats(service.router), tokens=40)
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
    last = (await views(Chats(service.router), tokens=8))[-1]
    assert last.progress.tokens == 8
    assert last.progress.rate is None


async def test_stop_keeps_what_there_is_and_frees_the_engine(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    chats = Chats(service.router)
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


async def test_a_dropped_answer_says_no_more(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    chats = Chats(service.router)
    task = asyncio.create_task(views(chats, tokens=ENDLESS_TOKENS))
    await until(lambda: len(worker.steps) > 20)
    chats.drop_answer("s")
    assert all(view.busy for view in await task)
    await until(lambda: worker.running == 0)


async def test_a_new_question_replaces_the_one_under_way(service: Service) -> None:
    [worker] = await service.up(step_s=0.01)
    chats = Chats(service.router)
    first = asyncio.create_task(views(chats, tokens=4000))
    await until(lambda: worker.running == 1)
    assert (await views(chats, tokens=5))[-1].turns[1]["content"] == "hello"
    assert all(view.busy for view in await first)
    assert service.router.in_flight == 0


async def test_a_reader_who_leaves_cancels(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    settings = Settings(max_tokens=ENDLESS_TOKENS)
    answer = Chats(service.router).answer_turn(Visit("s", "ui"), "m", asked(), settings)
    async for view in answer:
        if view.progress.tokens:
            break
    await answer.aclose()
    await until(lambda: worker.running == 0)
    assert service.router.in_flight == 0


async def test_who_waits_is_told_the_position(service: Service) -> None:
    await service.up(step_s=0.01, slots=1)
    chats = Chats(service.router)
    tasks = [asyncio.create_task(views(chats, session=f"s{at}", tokens=20)) for at in range(3)]
    all_views = [await task for task in tasks]
    waited = [{view.progress.waiting for view in seen} - {None} for seen in all_views]
    assert waited == [set(), {0}, {1, 0}]
    assert {seen[-1].progress.tokens for seen in all_views} == {20}


async def test_errors_end_an_answer_with_their_sentence(service: Service) -> None:
    [worker] = await service.up(step_s=0.01)
    chats = Chats(service.router)
    async for view in chats.answer_turn(Visit("s", "ui"), "nobody", asked(), Settings()):
        assert "'nobody' is not served here" in view.error
        assert (view.turns, view.busy) == (asked(), False)
    task = asyncio.create_task(views(chats, tokens=4000))
    await until(lambda: len(worker.steps) > 20)
    service.tell(worker.status("failed", "out of memory"))
    worker.kill()
    last = (await task)[-1]
    assert "out of memory" in last.error
    assert last.turns[1]["content"].startswith("hello")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (Settings(temperature=9), "temperature"),
        (Settings(top_p=0), "top_p"),
        (Settings(top_k=1.5), "top_k"),
        (Settings(max_tokens=0), "max_tokens"),
        (Settings(seed=2.0**64), "seed"),
        (Settings(temperature=float("nan")), "temperature"),
    ],
)
def test_settings_are_judged_as_http_bodies_are(settings: Settings, field: str) -> None:
    try:
        params = sampling(request_of("m", asked(), settings))
    except RequestError as error:
        assert error.param == field
    else:
        assert getattr(params, field) is None  # JSON has no NaN: it is the model's default


def test_a_request_of_the_page() -> None:
    settings = Settings("Be brief.", temperature=0.5, top_k=40.0, max_tokens=7.0, seed=3.0)
    request = request_of("m", asked("hi"), settings)
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    params = sampling(request)
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 40, 7, 3)
    assert len(request_of("m", asked(), Settings(system="")).messages) == 1
    with pytest.raises(ModelUnavailable):
        request_of("", asked(), Settings())


@pytest.mark.parametrize(
    "stored",
    [None, "text", {"role": "user"}, [1, None, {"role": "user"}, {"role": "root", "content": ""}],
     [{"role": "user", "content": ["parts"]}]],
)  # fmt: skip
def test_what_is_no_conversation_is_left_out(stored: Any) -> None:
    assert parse_turns(stored) == []
    assert parse_turns([*asked(), {"role": "user"}]) == asked()


async def test_thoughts_are_shown_apart_and_not_sent_again(service: Service) -> None:
    [worker] = await service.up(said={"reasoning_parser": "think"}, step_s=0.005)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))
    chats = Chats(service.router)
    text = "<think>why</think>so"
    settings = Settings(max_tokens=len(text))
    answer = chats.answer_turn(Visit("s", "ui"), "m", asked(text), settings)
    seen = [view async for view in answer]
    said = [view.turns[-1]["content"] for view in seen if len(view.turns) == 2]
    assert said[-1] == f"{THOUGHTS[0]}why{THOUGHTS[1]}so"
    assert any(content.startswith(THOUGHTS[0]) and THOUGHTS[1] not in content for content in said)
    turns = seen[-1].turns
    again = request_of("m", [*turns, StoredMessage(role="user", content="and?")], Settings())
    assert [message.content for message in again.messages] == [text, "so", "and?"]


IMAGE = StoredImage(id="0" * 32, name="a.png")
URI = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    "images",
    ["x", [], [None], [{"id": "0" * 32}], [{"id": "../x", "name": "a"}], [{"id": 1, "name": "a"}]],
)
def test_malformed_images_are_left_out(images: Any) -> None:
    turn = {"role": "user", "content": "hello ", "images": images}
    assert parse_turns([turn]) == asked()
    sent = json.dumps({"turns": [], "picked": images, "files": [URI]})
    assert parse_conversation(sent).picked == []


def test_what_a_page_sends_with_a_question() -> None:
    turns = [make_question("what?", [IMAGE]), StoredMessage(role="assistant", content="red")]
    files = {IMAGE["id"]: URI, "a number": 1, "an address": "http://192.0.2.1/a.png"}
    sent = {"id": "c", "turns": turns, "picked": [IMAGE], "files": files}
    conversation = parse_conversation(json.dumps(sent))
    assert (conversation.id, conversation.turns) == ("c", turns)
    assert (conversation.picked, conversation.files) == ([IMAGE], {IMAGE["id"]: URI})
    assert parse_conversation(store_turns("c", turns)) == Conversation(turns, "c")
    for malformed in (None, "", "{", "[1]", '{"id": 1, "turns": 2, "files": []}'):
        assert parse_conversation(malformed) == Conversation([])
    by_model = [{**turns[1], "images": [IMAGE]}]
    assert parse_turns(by_model) == turns[1:]  # the user's messages only have images


def test_images_are_sent_before_their_text() -> None:
    turns = [make_question("what?", [IMAGE]), make_question("", [IMAGE]), make_question("and?")]
    request = request_of("m", turns, Settings(), {IMAGE["id"]: URI})
    first, second, third = [message.content for message in chat_messages(request.messages)]
    assert (first, second, third) == ("what?", "", "and?")
    images = [message.media for message in chat_messages(request.messages)]
    assert [[(one.kind, one.at) for one in group] for group in images] == [
        [("image/png", 0)],
        [("image/png", 0)],
        [],
    ]
    without = request_of("m", turns, Settings())
    assert [message.content for message in without.messages] == ["what?", "", "and?"]


def test_images_have_a_place_of_their_own_in_the_page() -> None:
    answer = StoredMessage(role="assistant", content="red")
    turns = [make_question("what?", [IMAGE]), answer, make_question("", [IMAGE]), answer]
    assert [turn_at(turns, shown) for shown in range(6)] == [0, 0, 1, 2, 3, 4]
    shown = [(one["role"], isinstance(one["content"], str)) for one in show_turns(turns)]
    assert shown == [
        ("user", False),
        ("user", True),
        ("assistant", True),
        ("user", False),
        ("assistant", True),
    ]
    named = show_turns([make_question("", [StoredImage(id="1" * 32, name='"><script>')])])
    assert "<script>" not in str(named)


async def test_a_preset_is_asked_as_over_http(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its switch off, what an answer of a model that thinks at once begins with is text."""
    [worker] = await service.up(said={"reasoning_parser": "think"})
    info = worker.runner.info
    info = replace(info, dialect=replace(info.dialect, thinks_at_once=True))
    off = {"enable_thinking": False, "thinking": False}
    presets = Preset("fast", {"top_k": 3}, "Be short.", off), Preset("same", {})
    status = replace(service.router.routes["m"].status, info=info, presets=presets)
    service.router.apply_topology(Topology((status,)))
    calls: list[InflightRequest] = []
    take = service.router.open

    def open(call: InflightRequest) -> InflightRequest:
        calls.append(call)
        return take(call)

    monkeypatch.setattr(service.router, "open", open)
    said = {}
    for model in ("fast", "same"):
        settings = Settings(max_tokens=3)
        answer = Chats(service.router).answer_turn(Visit("s", "ui"), model, asked("abc"), settings)
        said[model] = [view async for view in answer][-1].turns[-1]["content"]
    assert said == {"fast": "abc", "same": f"{THOUGHTS[0]}abc{THOUGHTS[1]}"}
    fast, same = calls
    assert (fast.params.top_k, fast.params.max_tokens) == (3, 3)
    assert fast.messages is not None and fast.messages[0] == ChatMessage("system", "Be short.")
    assert (fast.more, same.more) == ({"template": off}, {})


def test_thoughts_have_a_place_of_their_own_in_the_page() -> None:
    user = StoredMessage(role="user", content="a")
    thought = StoredMessage(role="assistant", content=f"{THOUGHTS[0]}why{THOUGHTS[1]}so")
    only = StoredMessage(role="assistant", content=f"{THOUGHTS[0]}why")
    turns = [user, thought, user, only, user]
    assert [turn_at(turns, shown) for shown in range(8)] == [0, 1, 1, 2, 3, 4, 5, 5]
