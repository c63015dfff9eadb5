"""A remote endpoint behind a worker: requests as a gateway sends them, and what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.engines import create_engine
from servekit.engines.remote import client as endpoint
from servekit.engines.remote import health, rate_limiter
from servekit.engines.remote.engine import OpenAIEngine
from servekit.errors import LoadError
from servekit.gateway.tool_parsing import parser
from servekit.protocol.messages import ChatMessage, Delta, Grammar, SamplingParams
from tests.polling import poll_async
from tests.unit.engines.remote.liar import (
    DONE,
    Liar,
    delta,
    dropped,
    event,
    listing,
    lying,
    said,
    silent,
    status,
    stream,
    usage,
    whole,
)
from tests.unit.gateway.tool_parsing.reading import feed, joined
from tests.unit.worker.serving import Client, serving, spec

USER = [ChatMessage("user", "Hi")]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("KIMI_KEY", KEY)


@contextlib.asynccontextmanager
async def reached(folder: Path, **options: Any) -> AsyncIterator[tuple[Liar, Client]]:
    async with lying() as liar:
        known = {"url": liar.url, "key_environment": "KIMI_KEY", **options}
        async with serving(spec(folder, "openai", "kimi", **known)) as client:
            yield liar, client


def text(deltas: list[Delta]) -> str:
    return "".join(one.text for one in deltas)


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 5}, 5),
        ({"cached_tokens": 9}, 7),
        ({"cached_tokens": -1}, 0),
        ({"cached_tokens": "5"}, 0),
        (None, 0),
        ([], 0),
    ],
)
async def test_what_the_endpoint_took_from_its_cache(
    tmp_path: Path, details: Any, cached: int
) -> None:
    async with reached(tmp_path) as (liar, client):
        counts = usage(prompt_tokens_details=details)
        liar.answers += [stream(delta("Hi"), delta(None, "stop"), counts, DONE)]
        last = (await client.answer(client.send(messages=USER)))[-1]
    assert (last.prompt_tokens, last.cached_tokens) == (7, cached)


async def test_a_chat_with_the_endpoint_s_own_counts(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        deltas = await client.answer(client.send(messages=USER))
        assert text(deltas) == "Hello!"
        last = deltas[-1]
        assert (last.finish, last.prompt_tokens, last.completion_tokens) == ("stop", 7, 3)
        [asked] = liar.asked
        assert asked.body["model"] == "kimi"
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        info = client.info
        assert not info.resumes
        assert "tokenize" not in info.serves
        assert KEY not in repr(info)


async def test_the_context_is_the_file_s_else_the_endpoint_s(tmp_path: Path) -> None:
    async with lying() as liar:
        liar.models = listing({"id": "kimi", "max_model_len": 4096})
        async with serving(spec(tmp_path, "openai", "kimi", url=liar.url)) as client:
            assert client.info.max_context == 4096


async def test_thoughts_and_calls_reach_the_gateway_as_such(tmp_path: Path) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"reasoning_content": "hm"}, "<tool_call>", {"tool_calls": [call]}]
    async with reached(tmp_path) as (liar, client):
        liar.answers += [said(*parts, finish="tool_calls")]
        answer = text(await client.answer(client.send(messages=USER, tools=[TOOL])))
        parse = parser(client.info.dialect, tools=True, reasoning=True)
        assert joined(feed(parse, answer, [3])) == [
            ("thought", "hm"),
            ("text", "<tool_call>"),
            ("f", '{"a": 1}'),
        ]


async def test_a_plain_completion_is_its_text_and_nothing_else(tmp_path: Path) -> None:
    pieces = [event({"choices": [{"index": 0, "text": one}]}) for one in ("a", "b")]
    end = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    async with reached(tmp_path) as (liar, client):
        liar.answers += [stream(*pieces, end, usage(), DONE)]
        deltas = await client.answer(client.send(prompt="Once"))
        assert (text(deltas), deltas[-1].finish) == ("ab", "length")
        assert liar.asked[0].path == "/v1/completions"


async def test_embeddings(tmp_path: Path) -> None:
    body = (
        b'{"data": [{"embedding": [1, 0]}, {"embedding": [0, 1]}], "usage": {"prompt_tokens": 2}}'
    )
    one = whole(b'{"data": [{"embedding": [1, 0]}]}')
    async with lying() as liar:
        liar.answers += [one, whole(body), said("none")]
        wanted = spec(tmp_path, "openai", "kimi", url=liar.url, task="embed")
        async with serving(wanted) as client:
            assert client.info.serves == ("embed",)
            assert client.info.embedding_size == 2
            [last] = await client.answer(client.send(task="embed", inputs=["a", "b"]))
            assert (len(last.vectors), last.prompt_tokens) == (2, 2)
            failed = await client.failure(client.send(task="embed", inputs=["a", "b"]))
            assert failed.code == "endpoint_error"
            failed = await client.failure(client.send(messages=USER))
            assert failed.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x", "task": "tokenize"}, "model"),
        ({"prompt": [1], "task": "detokenize"}, "model"),
        ({"inputs": ["x"], "task": "embed"}, "model"),
        ({"messages": USER, "template": {"tone": "kind"}}, "chat_template_kwargs"),
        ({"messages": USER, "params": SamplingParams(grammar=Grammar("regex", "a"))},
         "response_format"),
    ],
)  # fmt: skip
async def test_what_cannot_be_passed_on_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with reached(tmp_path) as (liar, client):
        failed = await client.failure(client.send(**fields))
        assert (failed.code, failed.param) == ("unsupported_parameter", param)
        assert not liar.asked


async def test_what_the_endpoint_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    told = {"error": {"message": "top_k is not known", "param": "top_k"}}
    async with reached(tmp_path, retries=0) as (liar, client):
        liar.answers += [status(400, told), status(429, "slowly", retry_after="7")]
        failed = await client.failure(client.send(SamplingParams(top_k=3), messages=USER))
        assert (failed.code, failed.param) == ("invalid_request", "top_k")
        assert "top_k is not known" in failed.message
        failed = await client.failure(client.send(messages=USER))
        assert (failed.code, failed.retry_after_s) == ("rate_limit_exceeded", 7.0)


async def test_what_breaks_off_is_an_error_and_not_asked_again(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers += [stream(delta("Once"), ends=False)]
        request = client.send(messages=USER)
        failed = await client.failure(request)
        assert failed.code == "endpoint_error"
        assert text(client.deltas[request]) == "Once"
        assert len(liar.asked) == 1


async def test_a_cancelled_request_ends_there_too(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers += [silent(), stream(delta("a"), hold=asyncio.Event())]
        for gone in (1, 2):
            request = client.send(messages=USER)
            await liar.until(lambda: liar.open == 1)
            client.cancel(request)
            await liar.until(lambda gone=gone: liar.gone == gone, within_s=30)  # type: ignore[misc]
        assert text(await client.answer(client.send(messages=USER))) == "Hello!"
        await poll_async("the engine gets there", lambda: client.engine.load_now().running == 0)


async def test_a_gateway_that_is_gone_wants_nothing_any_more(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers += [silent()] * 3
        for _ in range(3):
            client.send(messages=USER)
        await liar.until(lambda: liar.open == 3)
        client.connection.close()
        await liar.until(lambda: liar.gone == 3)


async def test_no_more_requests_in_a_minute_than_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reached(tmp_path, requests_per_minute=2) as (liar, client):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        requests = [client.send(messages=USER) for _ in range(5)]
        await client.answer(requests[1])
        await liar.until(lambda: len(liar.asked) == 2)
        await poll_async("the engine gets there", lambda: client.engine.load_now().waiting == 3)
        monkeypatch.setattr(rate_limiter, "WINDOW_S", 0.4)  # the next to wait goes by it
        client.cancel(requests[2])
        await client.answer(requests[4])
        assert loop.time() - began_s >= 0.4
        assert len(liar.asked) == 4


async def test_tokens_count_as_the_endpoint_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limiter, "WINDOW_S", 0.4)
    async with reached(tmp_path, tokens_per_minute=1000) as (liar, client):
        liar.answers += [stream(delta("a", "stop"), usage(900, 99), DONE)]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await client.answer(client.send(messages=USER))
        await client.answer(client.send(messages=USER))
        assert loop.time() - began_s >= 0.4


async def test_one_that_goes_down_is_in_trouble_and_comes_back_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("servekit.engines.remote.engine.LOOK_EVERY_S", 0.05)
    async with reached(tmp_path) as (liar, client):
        engine = client.engine
        assert isinstance(engine, OpenAIEngine)
        assert engine.trouble == ""
        liar.models = status(503, "out to lunch")
        await poll_async("the engine gets there", lambda: "out to lunch" in engine.trouble)
        liar.answers.extend([dropped()] * 9)
        failed = await client.failure(client.send(messages=USER))
        assert failed.code == "model_unavailable"
        assert len(liar.asked) == 1, "while it is in trouble nobody is kept waiting"
        liar.models, spent = None, len(liar.greetings)
        liar.answers.clear()
        await poll_async("the engine gets there", lambda: engine.trouble == "")
        assert len(liar.greetings) == spent
        assert text(await client.answer(client.send(messages=USER))) == "Hello!"


async def test_any_answer_ends_the_trouble(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers += [status(401, "the key has run out")]
        failed = await client.failure(client.send(messages=USER))
        assert (failed.code, "run out" in failed.message) == ("endpoint_error", True)
        engine = client.engine
        assert isinstance(engine, OpenAIEngine)
        assert "run out" in engine.trouble
        await client.answer(client.send(messages=USER))
        assert engine.trouble == ""


async def test_its_loop_turns_while_it_waits(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers += [silent()]
        request = client.send(messages=USER)
        await liar.until(lambda: liar.open == 1)
        await poll_async(
            "the engine gets there", lambda: client.engine.load_now().progress_age_s > 0.3
        )
        await poll_async(
            "the engine gets there", lambda: client.engine.load_now().progress_age_s < 0.3
        )
        client.cancel(request)


def test_a_key_that_is_not_there(tmp_path: Path) -> None:
    options = {"url": "http://127.0.0.1:9/v1", "key_environment": "NO_SUCH_VARIABLE"}
    with pytest.raises(LoadError, match="the variable NO_SUCH_VARIABLE") as told:
        create_engine(spec(tmp_path, "openai", "kimi", **options)).load(lambda _: None)
    assert told.value.permanent


@pytest.mark.parametrize("key", ["sk-1234\nsk-5678", "sk-“1234”"])
async def test_a_key_that_no_header_can_hold_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("KIMI_KEY", key)
    async with lying() as liar:
        options = {"url": liar.url, "key_environment": "KIMI_KEY"}
        engine = create_engine(spec(tmp_path, "openai", "kimi", **options))
        with pytest.raises(LoadError, match="the variable KIMI_KEY") as told:
            await asyncio.to_thread(engine.load, lambda _: None)
    assert told.value.permanent and "1234" not in str(told.value)


def test_it_may_be_told_to_end_before_it_has_begun(tmp_path: Path) -> None:
    create_engine(spec(tmp_path, "openai", "kimi", url="http://127.0.0.1:9/v1")).close()


async def test_many_at_once(tmp_path: Path) -> None:
    async with reached(tmp_path) as (liar, client):
        liar.answers.extend([said(*"abcdefgh")] * 64)
        requests = [client.send(messages=USER) for _ in range(64)]
        for request in requests:
            assert text(await client.answer(request)) == "abcdefgh"
