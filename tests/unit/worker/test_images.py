"""Conversations with images in a worker, over a real socket."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.protocol.messages import (
    ChatMessage,
    Continuation,
    Delta,
    Grammar,
    Media,
    SamplingParams,
)
from servekit.worker.preparation.request_preparation import pack_ids
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.seeing_model import TOKENS_PER_IMAGE, write_seeing_model
from tests.unit.engines.transformers.vision.pictures import BLUE, HISTORY, NONE, ONE, RED, say
from tests.unit.gateway.conftest import DEADLINE_S, until
from tests.unit.worker.serving import Client, serving, spec

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return write_seeing_model(tmp_path_factory.mktemp("eyes"), tokenizer)


@pytest.fixture
async def eyes(tmp_path: Path, folder: Path) -> AsyncIterator[Client]:
    async with serving(spec(tmp_path, "transformers", str(folder), threads=1)) as client:
        yield client


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_images_count_as_prompt(eyes: Client) -> None:
    without = (await eyes.answer(eyes.send(GREEDY, messages=NONE)))[-1].prompt_tokens
    for messages, images in ((ONE, 1), ([say("user", RED, BLUE, "What is this?")], 2)):
        last = (await eyes.answer(eyes.send(GREEDY, messages=messages)))[-1]
        assert last.prompt_tokens == without + images * TOKENS_PER_IMAGE
        (told,) = await eyes.answer(eyes.send(task="tokenize", messages=messages))
        assert told.prompt_tokens == last.prompt_tokens


async def test_a_worker_goes_on_with_the_prompt_of_another(eyes: Client) -> None:
    """A template may tell the time: what the first worker has read stays the prompt."""
    whole = await eyes.answer(eyes.send(GREEDY, messages=HISTORY))
    ids = [token for delta in whole for token in delta.token_ids]
    (prompt,) = await eyes.answer(eyes.send(task="tokenize", messages=HISTORY))
    later = [*HISTORY[:2], say("user", "And cow?", BLUE)]
    (other,) = await eyes.answer(eyes.send(task="tokenize", messages=later))
    assert prompt.token_ids != other.token_ids and len(prompt.token_ids) == len(other.token_ids)
    began = Continuation("", 12, pack_ids(prompt.token_ids))
    begun: dict[str, Any] = {"emitted": ids[:5], "continuation": began}
    again = await eyes.answer(eyes.send(GREEDY, messages=later, **begun))
    assert [token for delta in again for token in delta.token_ids] == ids[5:]
    assert text_of(again) == text_of(whole)


async def test_images_are_read_off_the_loop(eyes: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are answered meanwhile, also where a grammar is to be compiled after it."""
    encode = eyes.engine.encode_media
    entered, go = threading.Event(), threading.Event()
    threads: list[str] = []

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        entered.set()
        assert go.wait(DEADLINE_S)
        return encode(*args)

    monkeypatch.setattr(eyes.engine, "encode_media", watched)
    grammar = Grammar("regex", "(ja|nein)")
    bound = SamplingParams(max_tokens=12, temperature=0.0, grammar=grammar)
    slow = [eyes.send(GREEDY, messages=ONE), eyes.send(bound, messages=ONE)]
    gone = eyes.send(GREEDY, messages=ONE)
    try:
        await until(entered.is_set)
        await eyes.answer(eyes.send(GREEDY, messages=NONE))
        eyes.cancel(gone)
        await until(lambda: sum(len(peer.jobs) for peer in eyes.runner.peers) == len(slow))
    finally:
        go.set()
    assert len((await eyes.answer(slow[0]))[-1:]) == 1
    assert text_of(await eyes.answer(slow[1])) in ("ja", "nein")
    assert len(threads) == 2 and all(name.startswith("prompt") for name in threads)


async def test_bad_words_hold_beside_a_grammar(eyes: Client) -> None:
    bound = SamplingParams(max_tokens=12, temperature=0.0, grammar=Grammar("regex", "[ab]"))
    for bad, good in (("a", "b"), ("b", "a")):
        params = replace(bound, bad_words=(bad,))
        assert text_of(await eyes.answer(eyes.send(params, messages=ONE))) == good


@pytest.mark.parametrize(
    ("messages", "params", "words"),
    [
        ([say("user", Media(RED.data[:50], RED.kind), "?")], GREEDY, "image 1 cannot be decoded"),
        (
            ONE,
            SamplingParams(max_tokens=3, truncate_prompt=4),
            "with images or recordings cannot be cut",
        ),
        ([say("user", *[RED] * 200)], GREEDY, "this model's maximum context length is 2048 tokens"),
        ([ChatMessage("user", "<image>", media=(RED,))], GREEDY, "a text has <image>"),
    ],
)
async def test_refusals(
    eyes: Client, messages: list[ChatMessage], params: SamplingParams, words: str
) -> None:
    beside = eyes.send(GREEDY, messages=ONE)
    failure = await eyes.failure(eyes.send(params, messages=messages))
    assert words in failure.message, failure
    codes = ("invalid_request", "unsupported_parameter", "context_length_exceeded")
    assert failure.code in codes
    assert len(await eyes.answer(beside)) > 0
