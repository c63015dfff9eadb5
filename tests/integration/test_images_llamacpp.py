"""Images through `servekit up` to the llama.cpp engine."""

from __future__ import annotations

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

from servekit.protocol.messages import Media
from tests.integration.instance import Instance
from tests.integration.test_images_transformers import answer, ask, body_of, settle, stream
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.llamacpp.seeing_gguf import convert_model
from tests.unit.engines.origins import write_tiny_gguf
from tests.unit.engines.seeing_model import write_gemma3, write_qwen2_vl
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

#: Tokens of an answer that a worker's death interrupts.
LONG = 1500
#: Of sides that Qwen2-VL leaves as they are.
EXACT = [say("user", paint("red", (112, 84)), "What is this?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-VL and a Gemma 3, and the GGUF files of both."""
    made = tmp_path_factory.mktemp("models")
    tokenizer = write_tiny_llama(made / "tiny")
    convert_model(write_qwen2_vl(made / "qwen", tokenizer), made / "qwen-gguf")
    convert_model(write_gemma3(made / "gemma", tokenizer), made / "gemma-gguf")
    return made


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Instance]:
    common: dict[str, Any] = {"engine": "llamacpp", "device": "cpu"}
    options: dict[str, Any] = {"threads": 1, "cache_type": "f32", "flash_attention": "off"}
    paths = {"qwen": "qwen-gguf/model.gguf", "gemma": "gemma-gguf/model.gguf"}
    paths["blind"] = write_tiny_gguf(folder / "blind.gguf", context=2048).name
    models = [
        common | {"name": name, "path": str(folder / path), "options": options}
        for name, path in paths.items()
    ]
    models[0] |= {"options": options | {"mmproj": f"{folder}/qwen-gguf/mmproj.gguf"}}
    models[1] |= {"replicas": 2}
    with Instance.up(
        tmp_path_factory.mktemp("up"), models, server={"limits": {"images": 12}}
    ) as instance:
        instance.until_settled()
        yield instance


def test_answers_of_transformers(instance: Instance, folder: Path) -> None:
    reference = Reference(folder / "qwen")
    prompt, ids = reference.ask(EXACT, 24)
    decode = reference.processor.tokenizer.decode
    due = settle(decode(ids, skip_special_tokens=True)), len(prompt)
    text, tokens = answer(instance, "qwen", EXACT)
    assert (settle(text), tokens) == due
    assert settle("".join(stream(instance, "qwen", EXACT))) == due[0]


@pytest.mark.parametrize("model", ["qwen", "gemma"])
def test_many_at_once(instance: Instance, model: str) -> None:
    asked = [ONE, OTHER, HISTORY, NONE] * 3
    due = [answer(instance, model, messages) for messages in asked[:4]] * 3
    assert len({text for text, _ in due}) == 4
    with ThreadPoolExecutor(len(asked)) as clients:
        found = list(clients.map(lambda messages: answer(instance, model, messages), asked))
    assert found == due


def test_an_answer_outlives_its_workers(instance: Instance) -> None:
    """Both replicas are killed, as an answer is too short for the status to show which one runs."""
    due, _ = answer(instance, "gemma", HISTORY, max_tokens=LONG)
    before = instance.model("gemma").replicas
    coming = stream(instance, "gemma", HISTORY, max_tokens=LONG)
    begun = [next(coming) for _ in range(5)]
    for replica in before:
        os.kill(replica.pid, signal.SIGKILL)
    assert "".join([*begun, *coming]) == due
    poll(
        "both are replaced",
        lambda: all(instance.replica(one.name).restarts > 0 for one in before),
    )
    instance.until_settled()


def test_clients_see_who_has_eyes(instance: Instance) -> None:
    shown = {
        name: httpx.post(f"{instance.url}/api/show", json={"model": name}).json()["capabilities"]
        for name in ("qwen", "gemma", "blind")
    }
    assert [name for name, able in shown.items() if "vision" in able] == ["qwen", "gemma"]
    refused = ask(instance, "blind", ONE)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "messages: the llamacpp engine of 'blind' takes no images; models that do: 'qwen', 'gemma'",
    )


def test_tokens_are_counted(instance: Instance) -> None:
    told = httpx.post(f"{instance.url}/tokenize", json=body_of("qwen", EXACT)).json()["count"]
    assert answer(instance, "qwen", EXACT)[1] == told
    large = [say("user", paint("red", (2000, 1500)), "?")]
    refused = ask(instance, "qwen", large)  # some 3,900 tokens
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([say("user", Media(RED.data[:60], RED.kind), "?")], "image 1 cannot be decoded"),
        ([say("user", RED, "?"), say("user", Media(BLUE.data[:400], BLUE.kind))], "image 2 cannot"),
        ([say("user", *[RED, BLUE, WIDE] * 4, RED)], "13 images are over the limit of 12"),
    ],
)
def test_what_is_refused(instance: Instance, messages: list[object], words: str) -> None:
    beside = stream(instance, "qwen", ONE, max_tokens=100)
    begun = next(beside)
    restarts = [one.restarts for one in instance.model("qwen").replicas]
    refused = ask(instance, "qwen", messages)  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert words in refused.text
    assert begun + "".join(beside) == answer(instance, "qwen", ONE, max_tokens=100)[0]
    assert [one.restarts for one in instance.model("qwen").replicas] == restarts


def test_a_schema(instance: Instance) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none")
    asked = body_of("gemma", ONE, max_tokens=300)
    del asked["ignore_eos"]
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    kept = client.chat.completions.create(
        **asked,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
        },
    )
    assert set(json.loads(kept.choices[0].message.content or "")) == {"red"}


def test_a_client_that_leaves(instance: Instance) -> None:
    """A request whose client is gone leaves the engine to others."""
    for _ in range(10):
        coming = stream(instance, "gemma", HISTORY, max_tokens=400)
        next(coming)
        coming.close()  # type: ignore[attr-defined]
    assert answer(instance, "gemma", ONE) == answer(instance, "gemma", ONE)
    poll("nothing runs", lambda: not any(one.running for one in instance.model("gemma").replicas))


def test_a_projector_that_kills_its_worker_is_named(folder: Path, tmp_path: Path) -> None:
    """It says that it is of another kind, which no check of its header finds."""
    whole = (folder / "qwen-gguf" / "mmproj.gguf").read_bytes()
    wrong = tmp_path / "mmproj.gguf"
    wrong.write_bytes(whole.replace(b"qwen2vl_merger", b"qwen3vl_merger"))
    model: dict[str, Any] = {"name": "m", "engine": "llamacpp", "device": "cpu"}
    model |= {"path": f"{folder}/qwen-gguf/model.gguf", "options": {"mmproj": str(wrong)}}
    with Instance.up(tmp_path, [model]) as instance:
        said = poll("it died", lambda: instance.model("m").replicas[0].reason)
    assert f"killed by SIGABRT before it was ready, while it loaded {wrong}" in said
