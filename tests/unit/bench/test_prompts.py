"""Prompts: of the wanted length, the same for the same seed, and no two alike from the start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from servekit.bench.client.client_protocol import Asking
from servekit.bench.lengths import parse_lengths
from servekit.bench.prompts import Prompts, read_dataset
from servekit.errors import ConfigError


def asking(**changes: Any) -> Asking:
    for name in ("prompt_tokens", "output_tokens", "turns"):
        changes[name] = parse_lengths(changes.get(name, "1" if name == "turns" else "32"), name)
    return Asking(**{"api": "chat", "model": "m", "stream": True, **changes})


def bodies(told: Asking, count: int, seed: int = 1) -> list[dict[str, Any]]:
    prompts = Prompts(told, seed)
    return [json.loads(prompts.conversation(number).next_body()) for number in range(count)]


def texts(told: Asking, count: int, seed: int = 1) -> list[str]:
    return [body["messages"][0]["content"] for body in bodies(told, count, seed)]


def test_a_body_is_what_openai_takes() -> None:
    (body,) = bodies(asking(ignore_eos=True, extra={"temperature": 0.7, "top_p": 0.9}), 1)
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {
        "model": "m",
        "max_tokens": 32,
        "temperature": 0.7,
        "top_p": 0.9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_and_embeddings() -> None:
    (body,) = bodies(asking(api="completions", stream=False), 1)
    assert set(body) == {"model", "prompt", "max_tokens", "temperature"}
    (body,) = bodies(asking(api="embeddings", stream=False), 1)
    assert set(body) == {"model", "input"}


def test_length_is_in_the_servers_tokens() -> None:
    for tokens in (8, 300, 400_000):
        (text,) = texts(asking(prompt_tokens=str(tokens), token_chars=4.5), 1)
        assert len(text) == pytest.approx(4.5 * tokens, abs=1)
    (text,) = texts(asking(prompt_tokens="100", token_chars=1.0, overhead_tokens=20.0), 1)
    assert len(text) == 80
    (text,) = texts(asking(prompt_tokens="1", token_chars=1.0, overhead_tokens=20.0), 1)
    assert len(text) == 1


def test_the_same_seed_gives_the_same_and_another_gives_others() -> None:
    told = asking(prompt_tokens="20..60", output_tokens="1..500")
    assert bodies(told, 20) == bodies(told, 20)
    assert not set(texts(told, 20)) & set(texts(told, 20, seed=2))
    assert len({body["max_tokens"] for body in bodies(told, 20)}) > 10


def test_no_two_are_alike_from_the_start() -> None:
    beginnings = {text[:8] for text in texts(asking(), 500)}
    assert len(beginnings) == 500


def test_a_prefix_is_shared_by_turns() -> None:
    plain = texts(asking(), 6)
    shared = texts(asking(shared_prefix_tokens=100, prefixes=2), 6)
    prefixes = [text.removesuffix(rest) for text, rest in zip(shared, plain, strict=True)]
    assert {len(prefix) for prefix in prefixes} == {401}
    assert prefixes == prefixes[:2] * 3
    assert len(set(prefixes)) == 2


def test_a_conversation_of_completions_grows() -> None:
    talk = Prompts(asking(api="completions", turns="3"), 1).conversation(0)
    first = json.loads(talk.next_body())["prompt"]
    assert json.loads(talk.next_body(" said"))["prompt"].startswith(f"{first} said\nand ")
    talk.next_body("more")
    assert talk.left == 0


def test_a_dataset_is_asked_in_its_order_and_again(tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    lines = [
        '"just a text"',
        '{"prompt": "one", "max_tokens": 7}',
        "",
        '{"messages": [{"role": "user", "content": "two"}], "id": 5}',
    ]
    file.write_text("\n".join(lines))
    found = bodies(asking(dataset=str(file)), 4)
    said = [body["messages"][0]["content"] for body in found]
    assert said == ["just a text", "one", "two", "just a text"]
    assert [body["max_tokens"] for body in found] == [32, 7, 32, 32]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no lines"),
        ('"a"\n{oops', "asks.jsonl:2: "),
        ("{}", "asks.jsonl:1: write one of"),
        ('{"prompt": "a", "messages": [{}]}', "write one of"),
        ('{"messages": []}', "empty"),
        ('{"prompt": 3}', r"\$\.prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "below 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_dataset(file, "chat")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_bytes(b'"a"\n"caf\xe9"\n')
    with pytest.raises(ConfigError, match=r"asks.jsonl:2: 'utf-8' codec"):
        read_dataset(file, "chat")


def test_a_pipe_which_clients_cannot_read_again_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "asks.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_dataset(pipe, "chat")


def test_messages_are_for_chat(tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(ConfigError, match="--api chat"):
        read_dataset(file, "completions")
    with pytest.raises(ConfigError, match="No such file"):
        read_dataset(tmp_path / "none", "chat")
