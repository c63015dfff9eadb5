"""Turns and the forms of OpenAI's answers to them, over a real router and echo workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.errors import ClientClosed, RequestError, Unsupported, WorkerLost
from servekit.gateway.api.openai.response import ChatEncoder, CompletionEncoder, StreamUsage
from servekit.gateway.app import Application
from servekit.gateway.generation.generation import (
    Choice,
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.protocol.messages import ChatMessage, SamplingParams, TokenLogprob, Topology
from tests.unit.gateway.collecting import collect_choices
from tests.unit.gateway.conftest import DEADLINE_S, Service, until

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "ä"]}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
GREEDY = SamplingParams(temperature=0)


def ask(text: str, **fields: Any) -> GenerationRequest:
    """The echo engine says `text`, and then what stops it."""
    params = replace(fields.pop("params", GREEDY), stop=("¤",))
    return GenerationRequest(
        model="m", params=params, messages=[ChatMessage("user", f"{text}¤")], **fields
    )


async def whole(service: Service, asked: GenerationRequest) -> tuple[Generation, list[Choice]]:
    turn = Generation(service.router, asked)
    async with asyncio.timeout(DEADLINE_S):
        return turn, await collect_choices(turn)


async def speaking(
    service: Service, tools: str = "hermes", thoughts: str = "think", **options: Any
) -> None:
    """A worker up, whose model writes calls as Hermes does, and thoughts."""
    said = {"tool_parser": tools, "reasoning_parser": thoughts}
    [worker] = await service.up(said=said, **options)
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    service.router.apply_topology(Topology((status,)))


def events_of(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [p if p == "[DONE]" else json.loads(p) for p in (part[6:] for part in parts)]


async def streamed(
    service: Service, asked: GenerationRequest, form: ChatEncoder | CompletionEncoder
) -> list[Any]:
    turn = Generation(service.router, asked)
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        async for chunks in turn:
            data += (form.encode_start(turn) if not data else b"") + form.encode_chunks(
                turn, chunks
            )
    return events_of(data + form.encode_end(turn))


async def test_choices_are_calls_of_their_own_and_the_prompt_counts_once(service: Service) -> None:
    await service.up(2)
    turn, choices = await whole(service, ask("abc", n=3, params=replace(GREEDY, max_tokens=4)))
    assert [choice.text for choice in choices] == ["abc"] * 3
    assert (turn.prompt_tokens, turn.completion_tokens) == (4, 12)
    assert service.router.in_flight == 0


async def test_each_choice_has_a_seed_of_its_own(service: Service) -> None:
    await service.up()
    params = SamplingParams(seed=2**63 - 1, temperature=1.0)
    _, choices = await whole(service, ask("abcdefgh", n=3, params=replace(params, max_tokens=8)))
    alone = []
    for seed in (2**63 - 1, -(2**63), -(2**63) + 1):
        seeded = SamplingParams(8, 1.0, seed=seed)
        alone.append((await whole(service, ask("abcdefgh", params=seeded)))[1][0].text)

    assert [choice.text for choice in choices] == alone


async def test_prompts_and_choices_are_numbered_as_openai_does(service: Service) -> None:
    await service.up()
    asked = GenerationRequest(model="m", params=SamplingParams(2, 0.0), prompts=["ab", "cd"], n=2)
    turn, choices = await whole(service, asked)
    assert [choice.text for choice in choices] == ["ab", "ab", "cd", "cd"]
    assert turn.prompt_tokens == 4


async def test_a_call_of_a_tool_is_told_from_text(service: Service) -> None:
    await speaking(service)
    _, [choice] = await whole(service, ask(f"so: {CALL}", tools=[TOOL]))
    assert choice.text.strip() == "so:"
    [call] = choice.calls
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": [1, "ä"]})
    assert choice.finish == "tool_calls"


@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_a_call_that_a_stop_string_cuts_off_is_not_told_as_a_whole_one(
    service: Service, step_s: float
) -> None:
    await speaking(service, step_s=step_s)
    begun, _, _ = CALL.partition(', "ä"')
    for text, finish in ((CALL + begun, "stop"), (CALL, "tool_calls"), (begun, "stop")):
        _, [choice] = await whole(service, ask(text, tools=[TOOL]))
        assert choice.finish == finish, text
    assert [call.arguments for call in choice.calls] == ['{"at": [1']


async def test_without_tools_a_call_is_text(service: Service) -> None:
    await speaking(service)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        _, [choice] = await whole(service, ask(CALL, **fields))
        assert (choice.text, choice.calls, choice.finish) == (
            CALL,
            [],
            "stop" if choice.finish == "stop" else "length",
        )


async def test_thoughts_are_told_from_text_where_wanted(service: Service) -> None:
    await speaking(service)
    _, [choice] = await whole(service, ask("<think>hm</think>yes"))
    assert (choice.reasoning, choice.text) == ("hm", "yes")
    _, [choice] = await whole(service, ask("<think>hm</think>yes", reasoning=False))
    assert (choice.reasoning, choice.text) == ("", "<think>hm</think>yes")


async def test_tools_for_a_model_that_knows_none_are_refused_by_name(service: Service) -> None:
    await speaking(service, tools="none")
    with pytest.raises(Unsupported, match=r"the echo engine of 'm' does not take it") as refused:
        Generation(service.router, ask("x", tools=[TOOL]))
    assert refused.value.param == "tools"
    assert service.router.in_flight == 0


async def test_a_turn_that_is_cancelled_frees_all_its_calls(service: Service) -> None:
    [worker] = await service.up(step_s=3600.0)
    turn = Generation(service.router, ask("abc" * 100, n=3))
    await until(lambda: worker.running == 3)
    turn.cancel()
    assert service.router.in_flight == 0
    with pytest.raises(ClientClosed):
        await collect_choices(turn)
    await until(lambda: worker.running == 0)


async def test_one_refused_call_takes_those_before_it_back(service: Service) -> None:
    service.max_queue = 1
    await service.up(slots=1, step_s=0.05)
    with pytest.raises(RequestError, match="wait"):
        Generation(service.router, ask("abc" * 50, n=40))
    await until(lambda: service.router.in_flight == 0)


async def test_a_failure_of_one_choice_is_one_of_the_turn(service: Service) -> None:
    [worker] = await service.up(step_s=0.01)
    turn = Generation(service.router, ask("abc" * 100, n=2))
    await until(lambda: worker.running == 2)
    service.router.apply_topology(Topology(()))  # the model is removed, and its worker dies
    worker.kill()
    with pytest.raises(WorkerLost):
        async with asyncio.timeout(DEADLINE_S):
            await collect_choices(turn)


async def test_a_chat_as_openai_writes_it(service: Service) -> None:
    await speaking(service)
    form = ChatEncoder(usage=StreamUsage(wanted=True), logprobs=False)
    turn, choices = await whole(service, ask(f"<think>t</think>a{CALL}", tools=[TOOL], n=2))
    body = json.loads(form.encode_response(turn, choices))
    assert body["object"] == "chat.completion"
    assert [one["index"] for one in body["choices"]] == [0, 1]
    message = body["choices"][1]["message"]
    assert (message["content"], message["reasoning_content"]) == ("a", "t")
    assert message["tool_calls"][0]["function"]["name"] == "look"
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_content_is_null_beside_calls_only(service: Service) -> None:
    await speaking(service)
    form = ChatEncoder(usage=StreamUsage(), logprobs=False)
    turn, choices = await whole(service, ask(CALL, tools=[TOOL]))
    assert (
        json.loads(form.encode_response(turn, choices))["choices"][0]["message"]["content"] is None
    )
    turn, choices = await whole(service, ask("<think>t</think>"))
    assert json.loads(form.encode_response(turn, choices))["choices"][0]["message"]["content"] == ""


async def test_a_stream_says_the_same_as_the_whole(service: Service) -> None:
    await speaking(service, step_s=0.001)
    events = await streamed(
        service,
        ask(f"<think>t</think>a{CALL}", tools=[TOOL], n=2),
        ChatEncoder(usage=StreamUsage(wanted=True), logprobs=False),
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] > 0
    for index in (0, 1):
        mine = [c for e in events[:-2] for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["tool_calls"]
        assert "".join(c["delta"].get("content") or "" for c in mine) == "a"
        assert "".join(c["delta"].get("reasoning_content", "") for c in mine) == "t"
        calls = [call for c in mine for call in c["delta"].get("tool_calls", [])]
        assert calls[0]["function"]["name"] == "look"
        text = "".join(call["function"]["arguments"] for call in calls)
        assert json.loads(text) == {"at": [1, "ä"]}


@pytest.mark.parametrize("kind", ["chat", "thinking", "completion"])
async def test_each_chunk_has_the_counts_so_far_on_request(service: Service, kind: str) -> None:
    each = StreamUsage(wanted=True, each=True)
    if kind == "completion":
        await service.up(step_s=0.001)
        asked = GenerationRequest(
            model="m", params=SamplingParams(12, 0.0), prompts=["abc"], stream=True
        )
        events = await streamed(
            service, asked, CompletionEncoder(usage=each, logprobs=None, echo=False)
        )
    else:
        await speaking(service, step_s=0.001)
        text = "<think>because</think>so be it" if kind == "thinking" else "so be it"
        events = await streamed(service, ask(text), ChatEncoder(usage=each, logprobs=False))
    counts = [one["usage"]["completion_tokens"] for one in events[:-1]]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    for one in events[:-1]:
        told = one["usage"]
        assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]
        assert told["prompt_tokens"] == events[-2]["usage"]["prompt_tokens"]


async def test_completions_echo_and_number_their_choices(service: Service) -> None:
    await service.up()
    asked = GenerationRequest(
        model="m", params=SamplingParams(2, 0.0), prompts=["ab", "c"], stream=True
    )
    events = await streamed(
        service, asked, CompletionEncoder(usage=StreamUsage(), logprobs=False, echo=True)
    )
    assert events[-1] == "[DONE]"
    texts = ["", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abab", "ccc"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_log_probabilities_are_of_the_text_that_is_told(
    service: Service, stream: bool, step_s: float
) -> None:
    """In both forms, streamed and not, none is of the stop string."""
    await service.up(step_s=step_s)
    transport = httpx.ASGITransport(app=Application(service.router, 10**6, ui=False))
    common = {"stop": ["XYZ"], "max_tokens": 9, "stream": stream, "model": "m"}
    chat = common | {"messages": [{"role": "user", "content": "abXXYZcd"}], "logprobs": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as client:
        answers = [
            (await client.post("/v1/chat/completions", json=chat)).text,
            (await client.post("/v1/completions", json=common | {"prompt": "abXXYZcd"} |
                               {"logprobs": 1})).text,
        ]  # fmt: skip
    for answer in answers:
        whole = events_of(answer.encode())[:-1] if stream else [json.loads(answer)]
        choices = [choice for one in whole for choice in one["choices"]]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [one["token"] for part in told for one in part.get("content", ())]
        tokens += [token for part in told for token in part.get("tokens", ())]
        assert "".join(tokens) == "abX"
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("tokens", [14, 15, 16, 17])
async def test_log_probabilities_go_on_with_the_text_on_another_worker(
    service: Service, tokens: int
) -> None:
    """The first one dies with half of what may be a stop string in its hands, or a bit later."""
    workers = await service.up(2, step_s=0.002)
    text = "abXYcd" * 8
    params = replace(GREEDY, max_tokens=len(text), logprobs=0, stop=("XYZ",))
    turn = Generation(service.router, GenerationRequest(model="m", params=params, prompts=[text]))
    await until(lambda: any(len(worker.steps) >= tokens for worker in workers))
    next(worker for worker in workers if worker.steps).kill()
    async with asyncio.timeout(DEADLINE_S):
        [choice] = await collect_choices(turn)
    assert choice.text == text
    assert b"".join(one.token for one in choice.logprobs).decode() == text
    assert len(choice.logprobs) == turn.completion_tokens == len(text)
    assert all(worker.steps for worker in workers), "both had a part in it"


async def test_log_probabilities_in_both_forms(service: Service) -> None:
    await service.up()
    turn = Generation(service.router, ask("x"))
    await collect_choices(turn)
    half = TokenLogprob("ä".encode()[:1], -0.5, (("ä".encode()[:1], -0.5), (b"b", float("-inf"))))
    choice = Choice()
    choice.add(GenerationChunk(0, [], [half], "stop"))
    chat = json.loads(
        ChatEncoder(usage=StreamUsage(), logprobs=True).encode_response(turn, [choice])
    )
    [told] = chat["choices"][0]["logprobs"]["content"]
    assert told["bytes"] == [0xC3]
    assert told["logprob"] == -0.5
    assert told["top_logprobs"][1] == {"token": "b", "logprob": -9999.0, "bytes": [98]}
    turn.request.prompts = ["x"]
    plain = CompletionEncoder(usage=StreamUsage(), logprobs=True, echo=False).encode_response(
        turn, [choice]
    )
    told = json.loads(plain)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [-0.5]
    assert told["text_offset"] == [0]
    assert told["top_logprobs"][0]["b"] == -9999.0
