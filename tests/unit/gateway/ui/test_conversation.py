"""Conversations as browsers store them, as requests have them, and their places in the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from servekit.errors import ModelUnavailable, RequestError
from servekit.gateway.api.openai.request import chat_messages, sampling
from servekit.gateway.api.openai.schema import ChatRequest, decode
from servekit.gateway.ui.chat_turns import show_turns
from servekit.gateway.ui.conversation import (
    THOUGHTS,
    Conversation,
    Settings,
    StoredImage,
    StoredMessage,
    is_answered,
    make_body,
    make_question,
    mark_cut,
    parse_conversation,
    parse_turns,
    store_turns,
    turn_at,
)
from servekit.gateway.ui.pages.language import SAY_ENGLISH


def asked(text: str = "hello ") -> list[StoredMessage]:
    return [StoredMessage(role="user", content=text)]


def make_request(
    model: str,
    turns: Sequence[StoredMessage],
    settings: Settings,
    files: Mapping[str, str] | None = None,
) -> ChatRequest:
    return decode(ChatRequest, msgspec.json.encode(make_body(model, turns, settings, files or {})))


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
        params = sampling(make_request("m", asked(), settings))
    except RequestError as error:
        assert error.param == field
    else:
        assert getattr(params, field) is None  # JSON has no NaN: it is the model's default


def test_a_question_before_the_page_is_restored_has_no_settings() -> None:
    """Gradio sends 0 for each empty number then; later a 0 is the visitor's."""
    assert Settings.from_fields("", 0, 0, 0, 0, 0) == Settings("")
    greedy = Settings.from_fields("Be brief.", 0, None, None, 64, None)
    assert greedy == Settings("Be brief.", temperature=0, max_tokens=64)


def test_a_request_of_the_page() -> None:
    settings = Settings("Be brief.", temperature=0.5, top_k=40.0, max_tokens=7.0, seed=3.0)
    request = make_request("m", asked("hi"), settings)
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
    ]
    params = sampling(request)
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 40, 7, 3)
    assert len(make_request("m", asked(), Settings(system="")).messages) == 1
    with pytest.raises(ModelUnavailable):
        make_request("", asked(), Settings())


@pytest.mark.parametrize(
    "stored",
    [None, "text", {"role": "user"}, [1, None, {"role": "user"}, {"role": "root", "content": ""}],
     [{"role": "user", "content": ["parts"]}]],
)  # fmt: skip
def test_what_is_no_conversation_is_left_out(stored: Any) -> None:
    assert parse_turns(stored) == []
    assert parse_turns([*asked(), {"role": "user"}]) == asked()


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
    kept = store_turns(Conversation([], "c", 7), turns)
    assert parse_conversation(kept) == Conversation(turns, "c", 7)
    for malformed in (None, "", "{", "[1]", '{"id": 1, "turns": 2, "files": []}'):
        assert parse_conversation(malformed) == Conversation([])
    by_model = [{**turns[1], "images": [IMAGE]}]
    assert parse_turns(by_model) == turns[1:]  # the user's messages only have images


def test_an_answer_is_stored_as_cut_until_its_end() -> None:
    question, answer = make_question("q"), StoredMessage(role="assistant", content="a")
    stored = store_turns(Conversation([], "c"), mark_cut([question, answer]))
    turns = parse_conversation(stored).turns
    assert turns == [question, {**answer, "cut": True}]
    assert not is_answered(turns)
    assert is_answered([question, answer])
    assert mark_cut([question]) == [question]
    assert parse_turns([{**question, "cut": True}, {**answer, "cut": "?"}]) == [question, answer]


def test_images_are_sent_before_their_text() -> None:
    turns = [make_question("what?", [IMAGE]), make_question("", [IMAGE]), make_question("and?")]
    request = make_request("m", turns, Settings(), {IMAGE["id"]: URI})
    first, second, third = [message.content for message in chat_messages(request.messages)]
    assert (first, second, third) == ("what?", "", "and?")
    images = [message.media for message in chat_messages(request.messages)]
    assert [[(one.kind, one.at) for one in group] for group in images] == [
        [("image/png", 0)],
        [("image/png", 0)],
        [],
    ]
    without = make_request("m", turns, Settings())
    assert [message.content for message in without.messages] == ["what?", "", "and?"]


def test_images_have_a_place_of_their_own_in_the_page() -> None:
    answer = StoredMessage(role="assistant", content="red")
    turns = [make_question("what?", [IMAGE]), answer, make_question("", [IMAGE]), answer]
    assert [turn_at(turns, shown) for shown in range(6)] == [0, 0, 1, 2, 3, 4]
    shown = [
        (one["role"], isinstance(one["content"], str)) for one in show_turns(turns, SAY_ENGLISH)
    ]
    assert shown == [
        ("user", False),
        ("user", True),
        ("assistant", True),
        ("user", False),
        ("assistant", True),
    ]
    named = show_turns(
        [make_question("", [StoredImage(id="1" * 32, name='"><script>')])], SAY_ENGLISH
    )
    assert "<script>" not in str(named)


def test_thoughts_have_a_place_of_their_own_in_the_page() -> None:
    user = StoredMessage(role="user", content="a")
    thought = StoredMessage(role="assistant", content=f"{THOUGHTS[0]}why{THOUGHTS[1]}so")
    only = StoredMessage(role="assistant", content=f"{THOUGHTS[0]}why")
    turns = [user, thought, user, only, user]
    assert [turn_at(turns, shown) for shown in range(8)] == [0, 1, 1, 2, 3, 4, 5, 5]
