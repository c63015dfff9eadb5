"""Stored responses through the openai client: conversations by the id of the last response."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.api_keys import new_key
from tests.integration.instance import Instance
from tests.integration.test_command import numbers, odd
from tests.integration.test_images import RED, image, text, uri
from tests.polling import poll

FIVE = numbers(5)
(ADA, ADA_HASH), (BOB, BOB_HASH) = new_key("ada"), new_key("bob")


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("stored")
    server = {"store_responses": {}, "gateways": 2}
    keys = [{"name": "ada", "hash": ADA_HASH}, {"name": "bob", "hash": BOB_HASH}]
    models = [odd("m", "--images", "taken", "--step-s", "0.005")]
    with Instance.up(folder, models, server=server, sections={"keys": keys}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture
def ada(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=ADA, max_retries=0)


@pytest.fixture
def bob(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=BOB, max_retries=0)


def seen(instance: Instance) -> list[Any]:
    """The last chat, as the server got it: role and content of each message."""
    headers = {"authorization": f"Bearer {ADA}"}
    answer = httpx.post(f"{instance.url}/v1/seen", json={"model": "m"}, headers=headers)
    return [(message["role"], message["content"]) for message in answer.json()]


def test_a_conversation_by_the_ids_of_responses(instance: Instance, ada: openai.OpenAI) -> None:
    picture: Any = {"type": "input_image", "image_url": uri(RED)}
    begin: Any = [{"role": "user", "content": [{"type": "input_text", "text": "One"}, picture]}]
    first = ada.responses.create(
        model="m", input=begin, max_output_tokens=5, instructions="Be short.", metadata={"a": "b"}
    )
    assert (first.output_text, first.previous_response_id) == (FIVE, None)
    *_, last = ada.responses.create(
        model="m", input="Two", max_output_tokens=5, previous_response_id=first.id, stream=True
    )
    assert last.type == "response.incomplete"
    second = last.response
    asked = [("user", [text("One"), image(RED)]), ("assistant", FIVE), ("user", "Two")]
    assert seen(instance) == asked  # instructions are of one response
    assert (second.output_text, second.previous_response_id) == (FIVE, first.id)

    branches = []
    for said in ("Three", "Another"):
        branches.append(ada.responses.create(
            model="m", input=said, max_output_tokens=5, previous_response_id=second.id,
            instructions="Be long.",
        ))  # fmt: skip
        whole = [("system", "Be long."), *asked, ("assistant", FIVE), ("user", said)]
        assert seen(instance) == whole
    assert branches[0].id != branches[1].id

    read = ada.responses.retrieve(first.id)
    assert read == first
    items = list(ada.responses.input_items.list(branches[0].id, order="asc", limit=2))
    roles = ["user", "assistant", "user", "assistant", "user"]
    assert [getattr(item, "role", None) for item in items] == roles
    assert len({getattr(item, "id", None) for item in items}) == 5


def test_calls_of_tools_go_on(instance: Instance, ada: openai.OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    begin: Any = [{"role": "user", "content": "See"}, call]
    first = ada.responses.create(model="m", input=begin, max_output_tokens=5)
    result: Any = [{"type": "function_call_output", "call_id": "c1", "output": "a door"}]
    second = ada.responses.create(
        model="m", input=result, max_output_tokens=5, previous_response_id=first.id
    )
    assert second.output_text == FIVE
    assert ("tool", "a door") in seen(instance)
    # what the package's types say, which it does not check
    for response in (first, second):
        read = ada.responses.with_raw_response.retrieve(response.id)
        openai.types.responses.Response.model_validate_json(read.text)
        items = ada.responses.input_items.with_raw_response.list(response.id)
        openai.types.responses.ResponseItemList.model_validate_json(items.text)


def test_items_are_referred_to_by_their_ids(
    instance: Instance, ada: openai.OpenAI, bob: openai.OpenAI
) -> None:
    first = ada.responses.create(model="m", input="One", max_output_tokens=5)
    later = ada.responses.create(model="m", input="Two", max_output_tokens=5, background=True)
    done = poll("it is done", lambda: _done(ada, later.id), 60)
    answers: Any = [
        {"type": "item_reference", "id": one.output[0].id} for one in (first, done) if one
    ]
    asked: Any = [{"role": "user", "content": "Q"}, *answers, {"role": "user", "content": "Three"}]
    ada.responses.create(model="m", input=asked, max_output_tokens=5)
    said = [("user", "Q"), ("assistant", FIVE), ("assistant", FIVE), ("user", "Three")]
    assert seen(instance) == said
    with pytest.raises(openai.NotFoundError, match="send the item itself") as refused:
        bob.responses.create(model="m", input=asked)
    assert refused.value.param == "input[1]"
    other: Any = [{"type": "item_reference", "id": f"{first.output[0].id}1"}]
    with pytest.raises(openai.NotFoundError, match="no item"):
        ada.responses.create(model="m", input=other)


def _done(client: openai.OpenAI, id: str) -> openai.types.responses.Response | None:
    now = client.responses.retrieve(id)
    return now if now.status == "incomplete" else None


def test_a_response_is_of_its_key(ada: openai.OpenAI, bob: openai.OpenAI) -> None:
    first = ada.responses.create(model="m", input="Secret", max_output_tokens=5)
    attempts: list[Callable[[], object]] = [
        lambda: bob.responses.retrieve(first.id),
        lambda: bob.responses.input_items.list(first.id),
        lambda: bob.responses.delete(first.id),
        lambda: bob.responses.create(model="m", input="x", previous_response_id=first.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError, match="is kept here"):
            attempt()
    ada.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(first.id)


def test_what_is_not_to_be_stored_is_not(instance: Instance, ada: openai.OpenAI) -> None:
    first = ada.responses.create(model="m", input="One", max_output_tokens=5, store=False)
    with pytest.raises(openai.NotFoundError) as refused:
        ada.responses.create(model="m", input="Two", previous_response_id=first.id)
    assert refused.value.body == {
        "message": f"no response '{first.id}' is kept here", "type": "not_found_error",
        "param": "previous_response_id", "code": "response_not_found"}  # fmt: skip


def test_they_outlive_a_killed_gateway(instance: Instance, ada: openai.OpenAI) -> None:
    first = ada.responses.create(model="m", input="One", max_output_tokens=5)
    ada.responses.retrieve(first.id)  # it is in the file
    killed = [instance.gateway(at).pid for at in (0, 1)]
    for pid in killed:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def are_back() -> bool:
        now = [instance.gateway(at) for at in (0, 1)]
        return all(g.state == "ready" and g.pid not in killed for g in now)

    instance.until("they are back", are_back)
    second = ada.responses.create(
        model="m", input="Two", max_output_tokens=5, previous_response_id=first.id
    )
    assert second.output_text == FIVE
    assert seen(instance) == [("user", "One"), ("assistant", FIVE), ("user", "Two")]


def test_a_reload_turns_it_off_and_on(instance: Instance, ada: openai.OpenAI) -> None:
    first = ada.responses.create(model="m", input="One", max_output_tokens=5)
    file = instance.run_dir.parent / "servekit.yaml"
    before = file.read_text()
    settings = json.loads(before)
    del settings["server"]["store_responses"]
    file.write_text(json.dumps(settings))
    instance.reload()
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match=r"set server\.store_responses"):
        ada.responses.create(model="m", input="Two", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match=r"background: .* set server\.store_responses"):
        ada.responses.create(model="m", input="Two", background=True)
    assert not ada.responses.create(model="m", input="Two", max_output_tokens=5).store
    file.write_text(before)
    instance.reload()
    assert ada.responses.retrieve(first.id) == first
