"""Images through `servekit up` to the transformers engine: the answers of the library alone."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from servekit.engines.text.tokenizer import REPLACEMENT
from servekit.protocol.messages import ChatMessage, Media, ReplicaStatus
from tests.integration.instance import Instance, echo
from tests.integration.test_remote import far
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.seeing_model import TOKENS_PER_IMAGE, write_idefics3, write_seeing_model
from tests.unit.engines.transformers.vision.media_adapters import AdapterFolders
from tests.unit.engines.transformers.vision.pictures import (
    BLUE,
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    WIDE,
    Reference,
    paint,
    say,
)

MODELS = ("llava", "idefics3")
#: Of LLaVA, that change its eyes, too: in the base's steps, and in steps of its own.
ADAPTERS = ("all", "dora")
#: Tokens of an answer that a worker's death interrupts: some seconds, so that the status shows it.
LONG = 1800


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    made = {}
    for name, write in zip(MODELS, (write_seeing_model, write_idefics3), strict=True):
        made[name] = write(tmp_path_factory.mktemp(name), tokenizer)
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> AdapterFolders:
    return AdapterFolders(folders["llava"], tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def instance(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path], adapters: AdapterFolders
) -> Iterator[Instance]:
    models: list[dict[str, Any]] = [
        {
            "name": name,
            "engine": "transformers",
            "path": str(folder),
            "device": "cpu",
            "replicas": 2 if name == "llava" else 1,
            "options": {"threads": 1},
        }
        for name, folder in folders.items()
    ]
    models[0]["adapters"] = [{"name": name, "path": str(adapters[name])} for name in ADAPTERS]
    limits = {"limits": {"images": 20}}
    with Instance.up(
        tmp_path_factory.mktemp("up"), [*models, echo("a")], server=limits
    ) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(folders[name]) for name in MODELS}


def part_of(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = base64.b64encode(part.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{part.kind};base64,{data}"}}


def body_of(model: str, messages: list[ChatMessage], **more: Any) -> dict[str, Any]:
    turns = [
        {"role": one.role, "content": [part_of(part) for part in one.parts]} for one in messages
    ]
    plain = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return {"model": model, "messages": turns} | plain | more


def ask(instance: Instance, model: str, messages: list[ChatMessage], **more: Any) -> httpx.Response:
    body = body_of(model, messages, **more)
    return httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=120)


def answer(
    instance: Instance, model: str, messages: list[ChatMessage], **more: Any
) -> tuple[str, int]:
    """The text of an answer, and the tokens of its prompt."""
    told = ask(instance, model, messages, **more)
    assert told.status_code == 200, told.text
    choice, usage = told.json()["choices"][0], told.json()["usage"]
    return choice["message"]["content"], usage["prompt_tokens"]


def stream(
    instance: Instance, model: str, messages: list[ChatMessage], **more: Any
) -> Iterator[str]:
    body = body_of(model, messages, stream=True, **more)
    url = f"{instance.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as coming:
        assert coming.status_code == 200, coming.read()
        for line in coming.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice["delta"].get("content") or ""


def settle(text: str) -> str:
    """A text without half a character at its end, which servekit leaves out."""
    return text.rstrip(REPLACEMENT)


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_the_library_s(
    instance: Instance, references: dict[str, Reference], model: str
) -> None:
    """Whole and streamed, each alone and all at once."""
    reference = references[model]
    decode = reference.processor.tokenizer.decode
    asked = [ONE, OTHER, HISTORY, NONE]
    due = []
    for messages in asked:
        prompt, ids = reference.ask(messages, 24)
        due.append((settle(decode(ids, skip_special_tokens=True)), len(prompt)))
    assert len({text for text, _ in due}) == len(asked)

    def answered(messages: list[ChatMessage]) -> tuple[str, int]:
        text, tokens = answer(instance, model, messages)
        return settle(text), tokens

    assert [answered(messages) for messages in asked] == due
    texts = [text for text, _ in due]
    assert [settle("".join(stream(instance, model, messages))) for messages in asked] == texts
    with ThreadPoolExecutor(len(asked)) as clients:
        assert list(clients.map(answered, asked)) == due


def test_adapters_see(
    instance: Instance, references: dict[str, Reference], adapters: AdapterFolders
) -> None:
    """The answers of plain PEFT, streamed and whole, of two adapters and the base at once."""
    decode = references["llava"].processor.tokenizer.decode
    asked = [(name, messages) for messages in (ONE, HISTORY) for name in ("llava", *ADAPTERS)]
    due = []
    for name, messages in asked:
        ids = adapters.due(name if name in ADAPTERS else "", messages)
        due.append(settle(decode(ids, skip_special_tokens=True)))
    assert len(set(due)) == len(asked)
    with ThreadPoolExecutor(2 * len(asked)) as clients:
        streams = [
            clients.submit(lambda one: "".join(stream(instance, *one)), one) for one in asked
        ]
        whole = [clients.submit(answer, instance, *one) for one in asked]
        assert [settle(one.result()) for one in streams] == due
        assert [settle(one.result()[0]) for one in whole] == due


@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(one, marks=pytest.mark.lane("adapters")) for one in ADAPTERS)]
)
def test_an_answer_outlives_its_worker(instance: Instance, name: str) -> None:
    due, _ = answer(instance, name, HISTORY, max_tokens=LONG)
    poll("nothing is seen to run", lambda: not _list_running(instance))
    coming = stream(instance, name, HISTORY, max_tokens=LONG)
    begun = [next(coming) for _ in range(5)]
    (busy,) = poll("it is seen to run", lambda: _list_running(instance))
    os.kill(busy.pid, signal.SIGKILL)
    assert "".join([*begun, *coming]) == due
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)
    instance.until_settled()


def _list_running(instance: Instance) -> list[ReplicaStatus]:
    return [replica for replica in instance.model("llava").replicas if replica.running]


def test_clients_see_who_has_eyes(instance: Instance) -> None:
    shown = {
        name: httpx.post(f"{instance.url}/api/show", json={"model": name}).json()["capabilities"]
        for name in ("llava", "idefics3", "a")
    }
    assert [name for name, able in shown.items() if "vision" in able] == ["llava", "idefics3"]
    refused = ask(instance, "a", ONE)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "messages: the echo engine of 'a' takes no images; models that do:"
        " 'llava', 'all', 'dora', 'idefics3'",
    )


def test_tokens_are_counted(instance: Instance) -> None:
    counts = [
        httpx.post(f"{instance.url}/tokenize", json=body_of("llava", messages)).json()["count"]
        for messages in (NONE, ONE)
    ]
    assert counts[1] - counts[0] == TOKENS_PER_IMAGE
    assert answer(instance, "llava", ONE)[1] == counts[1]


def test_twenty_images_and_no_more(instance: Instance) -> None:
    many = say("user", *[RED, BLUE, WIDE, paint("grey")] * 5, "How many?")
    _, tokens = answer(instance, "llava", [many])
    assert tokens > 20 * TOKENS_PER_IMAGE
    refused = ask(instance, "llava", [many, *ONE])
    assert refused.status_code == 400 and "21 images are over the limit of 20" in refused.text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([say("user", Media(RED.data[:60], RED.kind), "?")], "image 1 cannot be decoded"),
        ([say("user", RED, "?"), say("user", Media(BLUE.data[:400], BLUE.kind))], "image 2 cannot"),
        ([say("user", "an <image>", RED)], "a text has <image>, which stands for an image"),
    ],
)
def test_what_is_refused(instance: Instance, messages: list[ChatMessage], words: str) -> None:
    beside = stream(instance, "llava", ONE, max_tokens=100)
    begun = next(beside)
    restarts = [one.restarts for one in instance.model("llava").replicas]
    refused = ask(instance, "llava", messages)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert words in refused.text
    assert begun + "".join(beside) == answer(instance, "llava", ONE, max_tokens=100)[0]
    assert [one.restarts for one in instance.model("llava").replicas] == restarts


def test_tools_and_schemas(instance: Instance) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none")
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    asked: Any = body_of("llava", ONE)
    del asked["ignore_eos"]
    kept = client.chat.completions.create(
        **asked,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
        },
    )
    assert set(json.loads(kept.choices[0].message.content or "")) == {"red"}
    function = {"name": "look", "parameters": schema | {"additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    called = client.chat.completions.create(**asked, tools=tools, tool_choice="required")
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "look"
    turns = [
        *asked["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": [part_of("Here"), part_of(BLUE)]},
    ]
    final = client.chat.completions.create(**asked | {"messages": turns})
    assert final.usage is not None and final.usage.prompt_tokens > 2 * TOKENS_PER_IMAGE


def test_a_remote_endpoint_sees(instance: Instance, tmp_path: Path) -> None:
    """Another servekit asks this one: an image arrives in each API's form."""
    due, tokens = answer(instance, "llava", ONE, ignore_eos=False)
    data, url = base64.b64encode(RED.data).decode(), part_of(RED)["image_url"]["url"]
    told, kind = "What is this?", RED.kind
    block = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    forms: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "/v1/responses": (
            [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": told}],
            {"max_output_tokens": 24, "temperature": 0},
        ),
        "/v1/messages": ([block, part_of(told)], {"max_tokens": 24, "temperature": 0}),
    }
    with Instance.up(tmp_path, [far("far", f"{instance.url}/v1", "llava")]) as near:
        near.until_settled()
        assert answer(near, "far", ONE, ignore_eos=False) == (due, tokens)
        assert "".join(stream(near, "far", ONE, ignore_eos=False)) == due
        for path, (content, sampling) in forms.items():
            turns = [{"role": "user", "content": content}]
            body = {"model": "far", "input" if "resp" in path else "messages": turns} | sampling
            said = httpx.post(near.url + path, json=body, timeout=120).json()
            parts = said["output"][0]["content"] if "output" in said else said["content"]
            usage = said["usage"]  # Anthropic's tells tokens from a cache apart
            read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
            assert (parts[0]["text"], read) == (due, tokens)
        turn = {"role": "user", "content": told, "images": [data]}
        options = {"temperature": 0, "num_predict": 24}
        body = {"model": "far", "messages": [turn], "stream": False, "options": options}
        said = httpx.post(f"{near.url}/api/chat", json=body, timeout=120).json()
        assert (said["message"]["content"], said["prompt_eval_count"]) == (due, tokens)
        refused = ask(near, "far", [say("user", Media(RED.data[:60], RED.kind), "?")])
        assert refused.status_code == 400 and "image 1 cannot be decoded" in refused.text


def test_parameters_as_without_images(instance: Instance) -> None:
    wild = {"temperature": 1.3, "seed": 5}
    drawn, _ = answer(instance, "llava", ONE, **wild)
    assert (drawn, True) == (answer(instance, "llava", ONE, **wild)[0], drawn != "")
    plain, _ = answer(instance, "llava", ONE)
    stopped, _ = answer(instance, "llava", ONE, stop=[plain[4:7]])
    assert stopped == plain[: plain.index(plain[4:7])]
    told = ask(instance, "llava", ONE, logprobs=True, top_logprobs=2, max_tokens=5).json()
    assert len(told["choices"][0]["logprobs"]["content"]) == 5
    two = ask(instance, "llava", ONE, n=2, **wild).json()
    assert two["choices"][0]["message"]["content"] == drawn


def test_a_client_that_leaves_makes_room(instance: Instance) -> None:
    coming = stream(instance, "idefics3", ONE, max_tokens=1500)
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    poll("the request is cancelled", lambda: not instance.replica("idefics3/0").running)
    assert answer(instance, "idefics3", ONE)[0]
