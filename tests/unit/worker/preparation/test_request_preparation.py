"""The tasks of a worker, over a real socket: what is answered at once, and what is refused how."""

from __future__ import annotations

import asyncio
import re
import struct
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.echo.engine import EchoEngine
from servekit.engines.text import grammar_trial
from servekit.errors import RequestError
from servekit.protocol.messages import (
    ChatMessage,
    Generate,
    Grammar,
    SamplingParams,
    ToolCall,
)
from servekit.protocol.transport.connection import dial_address
from servekit.worker.preparation.request_preparation import (
    LONG_PROMPT_CHARS,
    QUICK_CHARS,
    completion_limit,
)
from servekit.worker.worker import warm_up
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.transformers.pooling_models.test_embedding import bert
from tests.unit.gateway.conftest import DEADLINE_S, until
from tests.unit.worker.serving import Client, serving, spec

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
LONG = "\U0001f600" * 100_000


def bound(text: str, kind: Any = "regex", **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar(kind, text), **params)


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(spec(tmp_path, max_context=60_000)) as client:
        yield client


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
async def tiny(tmp_path: Path, tiny_folder: Path) -> AsyncIterator[Client]:
    async with serving(spec(tmp_path, "transformers", str(tiny_folder), threads=1)) as client:
        yield client


# ---------------------------------------------------------------- tokens and text


@pytest.mark.parametrize("text", ["héllo 🙂", "x" * (LONG_PROMPT_CHARS + 1)])
async def test_text_to_tokens_and_back(echo: Client, text: str) -> None:
    (tokens,) = await echo.answer(echo.send(task="tokenize", prompt=text))
    assert tokens.token_ids == [*map(ord, text)]
    assert (tokens.finish, tokens.prompt_tokens, tokens.text) == ("stop", len(text), "")
    (back,) = await echo.answer(echo.send(task="detokenize", prompt=tokens.token_ids))
    assert (back.text, back.token_ids, back.finish) == (text, [], "stop")
    assert not echo.runner.busy


async def test_nothing_is_no_tokens(echo: Client) -> None:
    (tokens,) = await echo.answer(echo.send(task="tokenize", prompt=""))
    assert (tokens.token_ids, tokens.prompt_tokens) == ([], 0)
    (text,) = await echo.answer(echo.send(task="detokenize", prompt=[]))
    assert text.text == ""


async def test_a_chat_is_tokenised_as_its_template_has_it(tiny: Client) -> None:
    messages = [ChatMessage("user", "Größe")]
    (tokens,) = await tiny.answer(tiny.send(task="tokenize", messages=messages))
    assert tokens.token_ids == tiny.engine.codec.render_chat(messages)
    (answer,) = (await tiny.answer(tiny.send(GREEDY, messages=messages)))[-1:]
    assert answer.prompt_tokens == tokens.prompt_tokens


async def test_a_text_of_too_many_tokens_to_tell_is_refused(echo: Client) -> None:
    failure = await echo.failure(echo.send(task="tokenize", prompt="x" * (2**20 + 1)))
    assert (failure.code, failure.param) == ("invalid_request", "prompt")
    assert "the text has 1048577 tokens" in failure.message


@pytest.mark.parametrize("ids", [[-1], [10**7], [2**63], [5, 0x110000]])
async def test_ids_out_of_range_are_refused(echo: Client, ids: list[int]) -> None:
    failure = await echo.failure(echo.send(task="detokenize", prompt=ids))
    assert (failure.code, failure.param) == ("invalid_request", "tokens")
    failure = await echo.failure(echo.send(task="embed", inputs=[[5], ids]))
    assert (failure.code, failure.param) == ("invalid_request", "input")


async def test_half_characters_become_replacements(echo: Client) -> None:
    (text,) = await echo.answer(echo.send(task="detokenize", prompt=[0x61, 0xD800, 0x62]))
    assert text.text == "a\ufffdb"


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize("size", [1, 16, 100])
async def test_echos_vectors_are_points_on_a_sphere(tmp_path: Path, size: int) -> None:
    async with serving(spec(tmp_path, embedding_size=size)) as echo:
        assert echo.info.embedding_size == size
        texts = ["a", "b", [ord("a")], "long " * 500]
        (delta,) = await echo.answer(echo.send(task="embed", inputs=texts))
        found = [struct.unpack(f"<{size}f", vector) for vector in delta.vectors]
        assert found[0] == found[2] and (size == 1 or found[0] != found[1])
        assert all(sum(x * x for x in vector) == pytest.approx(1, abs=1e-5) for vector in found)
        assert delta.prompt_tokens == 1 + 1 + 1 + 2500


@pytest.mark.parametrize(
    ("inputs", "code", "sentence"),
    [
        ([], "invalid_request", "there is no input"),
        ([""], "invalid_request", "input is empty"),
        (["a", []], "invalid_request", r"input\[1\] is empty"),
        (["a", "b" * 60_001], "context_length_exceeded", r"input\[1\] has 60001 tokens.* 60000"),
        (["b" * 60_001], "context_length_exceeded", "input has 60001 tokens"),
    ],
)
async def test_inputs_that_cannot_be_embedded_are_named(
    echo: Client, inputs: list[Any], code: str, sentence: str
) -> None:
    failure = await echo.failure(echo.send(task="embed", inputs=inputs))
    assert (failure.code, failure.param) == (code, "input")
    assert re.match(sentence, failure.message)
    assert not echo.runner.busy


async def test_an_embedding_model_warms_up_and_embeds(tmp_path: Path, bert_folder: Path) -> None:
    wanted = spec(tmp_path, "transformers", str(bert_folder), threads=1)
    async with serving(wanted) as client:
        await warm_up(partial(dial_address, wanted.socket), client.info)
        requests = [client.send(task="embed", inputs=["a", "b" * number]) for number in range(1, 9)]
        first = [(await client.answer(request))[0].vectors for request in requests]
        assert all(len(vectors) == 2 and len(vectors[0]) == 4 * 32 for vectors in first)
        assert len({vectors[1] for vectors in first}) == 8
        refused = await client.failure(client.send(GREEDY, prompt="Hello"))
        assert (refused.code, refused.param) == ("unsupported_parameter", "model")
        assert "/v1/embeddings" in refused.message


# ---------------------------------------------------------------- prompts that are too long


@pytest.mark.lane("long")
@pytest.mark.parametrize("asked", [{"prompt": LONG}, {"messages": [ChatMessage("user", LONG)]}])
@pytest.mark.parametrize(("limit", "clamp"), [(None, False), (3, False), (3, True)])
async def test_a_prompt_far_too_long_is_refused_in_the_words_of_all_others(
    tiny: Client, asked: dict[str, Any], limit: int | None, clamp: bool
) -> None:
    failure = await tiny.failure(tiny.send(SamplingParams(limit, clamp=clamp), **asked))
    assert failure.code == "context_length_exceeded"
    assert failure.param == ("messages" if limit is None else "max_tokens")
    assert re.fullmatch(
        rf"this model's maximum context length is {tiny.info.max_context} tokens;"
        r" the prompt has more than "
        rf"[0-9]{{4,}}{'' if limit is None else ' and max_tokens is 3'}\. "
        r"Shorten the prompt or ask for fewer tokens",
        failure.message,
    )
    assert not tiny.runner.busy


async def test_an_input_far_too_long_is_refused_by_its_beginning(
    tmp_path: Path, bert_folder: Path
) -> None:
    async with serving(spec(tmp_path, "transformers", str(bert_folder), threads=1)) as client:
        failure = await client.failure(client.send(task="embed", inputs=["a", "b " * 50_000]))
        assert (failure.code, failure.param) == ("context_length_exceeded", "input")
        assert re.match(r"input\[1\] has more than \d+ tokens, and this model", failure.message)


async def test_long_prompts_are_read_one_after_the_other_and_not_for_who_is_gone(
    tiny: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first holds the thread until all others are cancelled; they are never tokenised."""
    encode = tiny.engine.codec.encode
    seen: list[str] = []
    entered, go = threading.Event(), threading.Event()

    def watched(text: str, limit: int | None = None) -> list[int]:
        seen.append(text[0])
        entered.set()
        assert go.wait(DEADLINE_S)
        return encode(text, limit)

    monkeypatch.setattr(tiny.engine.codec, "encode", watched)
    requests = [tiny.send(GREEDY, prompt=letter + LONG) for letter in "abcdef"]
    try:
        await until(entered.is_set)
        await until(lambda: len(tiny.runner._encoding) == len(requests))
        for request in requests[1:-1]:
            tiny.cancel(request)
        await until(lambda: sum(len(peer.jobs) for peer in tiny.runner.peers) == 2)
    finally:
        go.set()
    for request in (requests[0], requests[-1]):
        assert (await tiny.failure(request)).code == "context_length_exceeded"
    await until(lambda: not tiny.runner._encoding)
    assert seen == ["a", "f"]
    assert tiny.failures.keys() == {requests[0], requests[-1]} and not tiny.deltas


async def test_counting_tokens_does_not_keep_prompts_waiting(
    tiny: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tiny.engine.codec.encode
    entered, go = threading.Event(), threading.Event()

    def watched(text: str, limit: int | None = None) -> list[int]:
        if text[0] == "t":
            entered.set()
            assert go.wait(DEADLINE_S)
        return encode(text, limit)

    monkeypatch.setattr(tiny.engine.codec, "encode", watched)
    counting = tiny.send(task="tokenize", prompt="t" * (LONG_PROMPT_CHARS + 1))
    try:
        await until(entered.is_set)
        failure = await tiny.failure(tiny.send(GREEDY, prompt=LONG))
        assert failure.code == "context_length_exceeded"
    finally:
        go.set()
    (counted,) = await tiny.answer(counting)
    assert counted.token_ids == encode("t" * (LONG_PROMPT_CHARS + 1))


async def test_a_text_of_some_length_keeps_no_ping_waiting(
    tiny: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec: Any = tiny.engine.codec
    text = "t" * (max(QUICK_CHARS, codec.quick_chars) + 1)
    encode, threads = codec.encode, []

    def watched(text: str, limit: int | None = None) -> list[int]:
        threads.append(threading.current_thread().name)
        return list(encode(text, limit))

    monkeypatch.setattr(codec, "encode", watched)
    await tiny.answer(tiny.send(task="tokenize", prompt=text))
    await tiny.answer(tiny.send(task="tokenize", prompt="t"))
    assert threads[0].startswith("text"), "off the event loop"
    assert threads[1] == threading.current_thread().name, "a thread would take longer"


async def test_all_that_a_template_renders_counts_as_prompt(tiny: Client) -> None:
    call = ToolCall("a", "f", "x" * LONG_PROMPT_CHARS)
    turn = ChatMessage("assistant", "x", reasoning="y" * LONG_PROMPT_CHARS)
    short, intake = ChatMessage("user", "x"), tiny.runner._intake
    assert not intake.takes_long(Generate(1, GREEDY, messages=[short]))
    for long in (turn, ChatMessage("assistant", "x", tool_calls=(call,))):
        assert intake.takes_long(Generate(1, GREEDY, messages=[short, long]))


# ---------------------------------------------------------------- what is not served


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(logit_bias=((97, 1.0),)), "logit_bias"),
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(presence_penalty=-0.5), "presence_penalty"),
        (SamplingParams(frequency_penalty=0.5), "frequency_penalty"),
        (SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (bound("[0-9]"), "response_format"),
    ],
)
async def test_what_an_engine_does_not_take_is_refused_by_name(
    echo: Client, params: SamplingParams, param: str
) -> None:
    failure = await echo.failure(echo.send(params, prompt="hello"))
    assert (failure.code, failure.param) == ("unsupported_parameter", param)
    assert failure.message == f"{param}: the echo engine of 'm' does not take it"


async def test_what_asks_for_nothing_is_always_taken(echo: Client) -> None:
    neutral = SamplingParams(
        max_tokens=5,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=-0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        top_p=0.5,
        top_k=1,
        min_tokens=5,
        ignore_eos=True,
    )
    deltas = await echo.answer(echo.send(neutral, prompt="hello"))
    assert "".join(delta.text for delta in deltas) == "hello"


async def test_tools_and_tasks_are_refused_by_name_too(echo: Client, tiny: Client) -> None:
    asked = echo.send(GREEDY, messages=[ChatMessage("user", "x")], tools=[{"type": "function"}])
    assert (await echo.failure(asked)).message == "tools: the echo engine of 'm' does not take it"
    failure = await tiny.failure(tiny.send(task="embed", inputs=["a"]))
    assert (failure.code, failure.param) == ("unsupported_parameter", "model")
    assert failure.message.startswith(
        "model: the transformers engine of 'm' does not make embeddings"
    )


async def test_echo_is_certain_of_what_it_says(echo: Client) -> None:
    for best, expected in ((0, ()), (2, ((b"h", 0.0),))):
        params = SamplingParams(max_tokens=2, logprobs=best)
        deltas = await echo.answer(echo.send(params, prompt="hé"))
        noted = [one for delta in deltas for one in delta.logprobs]
        assert [one.token for one in noted] == [b"h", "é".encode()]
        assert [one.logprob for one in noted] == [0.0, 0.0]
        assert noted[0].best == expected


# ---------------------------------------------------------------- grammars


async def test_a_grammar_over_the_wire(tiny: Client) -> None:
    deltas = await tiny.answer(tiny.send(bound("[0-9]{3}", logprobs=1), prompt="Hello"))
    text = "".join(delta.text for delta in deltas)
    assert text.isdigit() and len(text) == 3
    assert deltas[-1].finish == "stop"
    noted = [one for delta in deltas for one in delta.logprobs]
    assert b"".join(one.token for one in noted) == text.encode()


async def test_a_stop_string_ends_a_bound_text_too(tiny: Client) -> None:
    deltas = await tiny.answer(tiny.send(bound('abc"def', stop=('c"',)), prompt="Hello"))
    assert "".join(delta.text for delta in deltas) == "ab"
    assert deltas[-1].finish == "stop"
    await until(lambda: not tiny.engine.load_now().running)


async def test_a_bound_text_is_continued(tiny: Client) -> None:
    whole = await tiny.answer(tiny.send(bound("[a-f]{12}"), prompt="Hello"))
    ids = [token for delta in whole for token in delta.token_ids]
    text = "".join(delta.text for delta in whole)
    for cut in range(len(ids) + 1):
        sent = len(tiny.engine.codec.decoder().push(ids[:cut]))
        request = tiny.send(bound("[a-f]{12}"), prompt="Hello", emitted=ids[:cut], sent_chars=sent)
        rest = await tiny.answer(request)
        assert "".join(delta.text for delta in rest) == text[sent:]
        assert (rest[-1].finish, rest[-1].completion_tokens) == ("stop", len(ids))


async def test_what_cannot_be_compiled_is_answered(tiny: Client) -> None:
    failure = await tiny.failure(tiny.send(bound("(a"), prompt="Hello"))
    assert (failure.code, failure.param) == ("invalid_request", "response_format")
    assert "unclosed group" in failure.message
    tools = SamplingParams(grammar=Grammar("lark", 'start: %json {"type": 5}', "tools"))
    failure = await tiny.failure(tiny.send(tools, prompt="Hello"))
    assert (failure.code, failure.param) == ("invalid_request", "tools")
    assert failure.message.startswith("The grammar of the tools cannot be used: ")
    assert not tiny.runner.busy


async def test_explosive_grammars_stall_neither_the_loop_nor_the_others(tiny: Client) -> None:
    lag_s = 0.0

    async def watch() -> None:
        nonlocal lag_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            lag_s = max(lag_s, time.monotonic() - before)

    watching = asyncio.create_task(watch())
    texts = [f"a{{1000}}{{1000}}{{{n}}}" for n in range(1000, 1004)]
    bad = [tiny.send(bound(text), prompt="Hello") for text in texts]
    good = [tiny.send(GREEDY, prompt="Hello") for _ in range(3)]
    for request in good:
        await tiny.answer(request)
    for request in bad:
        assert (await tiny.failure(request)).param == "response_format"
    watching.cancel()
    assert lag_s < 1.0
    assert not tiny.runner.busy


async def test_a_request_that_is_cancelled_while_it_is_compiled_never_starts(tiny: Client) -> None:
    request = tiny.send(bound("a{1000}{1000}{999}"), prompt="Hello")
    await until(lambda: bool(tiny.runner._encoding))
    tiny.cancel(request)
    await until(lambda: not tiny.runner.busy)
    await until(lambda: not tiny.runner._encoding)
    await tiny.answer(tiny.send(GREEDY, prompt="Hello"))
    assert request not in tiny.deltas and request not in tiny.failures


@pytest.mark.parametrize(
    ("prompt", "asked", "limits", "expected"),
    [(10, None, (100, None), 90), (10, None, (100, 20), 20), (10, 50, (100, 20), 50)],
)
def test_how_long_an_answer_may_be(
    prompt: int, asked: int | None, limits: tuple[int, int | None], expected: int
) -> None:
    assert completion_limit(prompt, asked, limits) == expected


@pytest.mark.parametrize(
    ("prompt", "asked", "param"),
    [(0, None, "prompt"), (100, None, "messages"), (60, 41, "max_tokens")],
)
def test_what_does_not_fit_is_refused(prompt: int, asked: int | None, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion_limit(prompt, asked, (100, None))
    assert caught.value.param == param


@pytest.mark.parametrize("fills", [True, False])
async def test_no_tokens_are_asked_for_of_a_prompt_that_fills_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fills: bool
) -> None:
    monkeypatch.setattr(EchoEngine, "fills_context", fills)
    async with serving(spec(tmp_path, max_context=60)) as echo:
        params = SamplingParams(max_tokens=0, echo=True, prompt_logprobs=1)
        for length in (59, 60) if fills else (59,):
            (answer,) = await echo.answer(echo.send(params, prompt="x" * length))
            assert (answer.text, answer.token_ids, answer.finish) == ("", [], "length")
            assert answer.completion_tokens == 0 and answer.prompt is not None
            assert len(answer.prompt.tokens) == answer.prompt_tokens == length
        cut = SamplingParams(max_tokens=0, truncate_prompt=-1)
        (answer,) = await echo.answer(echo.send(cut, prompt="x" * 90))
        assert answer.prompt_tokens == (60 if fills else 59)
        failure = await echo.failure(echo.send(params, prompt="x" * (61 if fills else 60)))
        assert failure.code == "context_length_exceeded" and failure.param == "prompt"
        assert ("room for one more" in failure.message) != fills


@pytest.mark.parametrize(
    ("asked", "clamp", "allowed"),
    [(5, False, 5), (5, True, 5), (90, True, 60), (None, True, 60)],
)
def test_a_limit_beyond_the_context_is_lowered_only_where_that_is_wished(
    asked: int | None, clamp: bool, allowed: int
) -> None:
    assert completion_limit(40, asked, (100, None), clamp=clamp) == allowed
    with pytest.raises(RequestError):
        completion_limit(40, 90, (100, None))
    with pytest.raises(RequestError) as caught:
        completion_limit(100, asked, (100, None), clamp=clamp)
    assert ("max_tokens" in caught.value.message) == (asked is not None)
    assert asked is None or f"the prompt has 100 and max_tokens is {asked}." in caught.value.message


@pytest.mark.lane("long")
async def test_a_known_grammar_waits_for_long_prompts_as_long_as_they_take(
    tiny: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request was refused for the time in which others' prompts were read."""
    schema = bound('{"type": "object"}', "json_schema")
    await tiny.answer(tiny.send(schema, prompt="Hello"))
    encode = tiny.engine.codec.encode

    def slowly(text: str, limit: int | None = None) -> list[int]:
        time.sleep(0.25)  # what a long one takes
        return encode("Hello", limit)

    monkeypatch.setattr(tiny.engine.codec, "encode", slowly)
    requests = [tiny.send(schema, prompt="x" * (LONG_PROMPT_CHARS + 1)) for _ in range(28)]
    for request in requests:
        assert await tiny.answer(request)
    assert not tiny.failures


async def test_explosive_schemas_do_not_hold_up_streams(
    tiny: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty at once; the gap between two steps of others stays short, and the worker whole."""
    # second turns come one after the other, behind all else that the machine does: few, and short
    monkeypatch.setattr(grammar_trial, "TURNS_S", (0.06, 0.1))
    monkeypatch.setattr(grammar_trial, "MOST_WAITING", 2)
    texts = [f'{{"type": "integer", "multipleOf": {33_333_343 + 2 * n}}}' for n in range(50)]
    bad = [tiny.send(bound(text, "json_schema"), prompt="Hello") for text in texts]
    for _ in range(3):
        await tiny.answer(tiny.send(GREEDY, prompt="Hello"))
    await tiny.answer(tiny.send(bound("[0-9]{3}"), prompt="Hello"))
    codes = {(await tiny.failure(request)).code for request in bad}
    assert codes <= {"invalid_request", "model_unavailable"}
    assert not tiny.runner.busy
