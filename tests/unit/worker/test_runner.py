"""What a worker takes by its state, and when it is idle: once its answers are out."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from servekit.engines.echo.engine import EchoEngine
from servekit.errors import ModelChanged, WorkerLost
from servekit.protocol.messages import (
    PROTOCOL,
    ChatMessage,
    Continuation,
    DeltaBatch,
    Generate,
    Hello,
    SamplingParams,
    TokenBatch,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address, listen_at
from servekit.worker.runner import Runner
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.llamacpp.making import write_sentencepiece
from tests.unit.engines.text.test_tokenizer import SENTENCEPIECE
from tests.unit.gateway.conftest import DEADLINE_S, ENDLESS, ENDLESS_TOKENS, until
from tests.unit.worker.serving import deltas_of, serving
from tests.unit.worker.serving import spec as spec_in

#: Much more than a socket's buffer takes while nobody reads.
TOKENS = 200_000


async def test_the_last_answer_is_out_before_it_is_idle(tmp_path: Path) -> None:
    options = {"max_context": 10**6}
    spec = WorkerSpec(
        "m/0", "m", "echo", "-", None, "cpu", "auto", None, False, {}, options, str(tmp_path / "s")
    )
    engine = EchoEngine(spec)
    info = engine.load(lambda progress: None)
    idle = asyncio.Event()
    runner = Runner(engine, info, on_idle=idle.set)
    engine.start(runner.emit)
    server = await listen_at(spec.socket, runner.connect)
    got: list[Any] = []
    connection: Connection[WorkerToGateway] = await dial_address(
        spec.socket, lambda: Connection(WorkerToGateway, got.append, lambda error: None)
    )
    connection.send(Hello(PROTOCOL, "gateway", "g"))
    connection.send(Generate(1, SamplingParams(max_tokens=TOKENS), prompt="hello"))
    await until(lambda: runner.busy)
    runner.draining = True
    assert connection._transport is not None
    connection._transport.pause_reading()
    await until(lambda: not runner.busy)
    assert not idle.is_set(), "it is made, and nobody has read it"
    connection._transport.resume_reading()
    async with asyncio.timeout(DEADLINE_S):
        await idle.wait()
        await connection.closed
    deltas = [
        delta
        for message in got
        if isinstance(message, DeltaBatch | TokenBatch)
        for delta in deltas_of(message)
    ]
    assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
    assert deltas[-1].finish == "length"
    server.close()
    engine.close()


async def test_an_engine_that_is_faster_than_its_worker_leaves_it_turns(tmp_path: Path) -> None:
    """Each step that is passed on brings another one from the engine's thread."""
    spec = WorkerSpec(
        "m/0", "m", "echo", "-", None, "cpu", "auto", None, False, {}, {}, str(tmp_path / "s")
    )
    engine = EchoEngine(spec)
    runner = Runner(engine, engine.load(lambda progress: None), on_idle=lambda: None)
    steps = 0

    def step_again(tokens: int, ends: int) -> None:
        nonlocal steps
        steps += 1
        if steps < 100:
            emitting = threading.Thread(target=runner.emit, args=([],))
            emitting.start()
            emitting.join()

    runner.on_step = step_again
    emitting = threading.Thread(target=runner.emit, args=([],))
    emitting.start()
    emitting.join()
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(steps))
    await until(lambda: steps == 100)
    assert seen[0] < 100, "nothing else had its turn before the last step"


@pytest.mark.parametrize(
    ("state", "begun", "takes"),
    [
        ("", False, True),
        ("draining", False, False),
        ("draining", True, True),  # there may be no other that can go on with it
        ("asleep", False, False),
        ("asleep", True, False),
    ],
)
async def test_what_a_worker_takes_by_its_state(
    tmp_path: Path, state: str, begun: bool, takes: bool
) -> None:
    async with serving(spec_in(tmp_path, **ENDLESS)) as client:
        busy = client.send(SamplingParams(max_tokens=ENDLESS_TOKENS), prompt="ab")
        await until(lambda: client.runner.busy)
        if state:
            setattr(client.runner, state, True)
        began = Continuation(client.runner.generation(""), 4)
        more: Any = {"emitted": [97], "sent_chars": 1, "continuation": began} if begun else {}
        request = client.send(SamplingParams(max_tokens=4), prompt="ab", **more)
        if takes:
            await client.answer(request)
        else:
            assert (await client.failure(request)).code == WorkerLost.code
        client.cancel(busy)


async def test_what_another_model_has_begun_is_not_gone_on_with(tmp_path: Path) -> None:
    async with serving(spec_in(tmp_path)) as client:
        began = Continuation("another", 4)
        request = client.send(SamplingParams(max_tokens=4), prompt="ab", continuation=began)
        assert (await client.failure(request)).code == ModelChanged.code


@pytest.mark.parametrize(("settled", "context", "tokens"), [(4, 64, 4), (90, 64, 62)])
async def test_a_continuation_ends_where_the_first_worker_would_have(
    tmp_path: Path, settled: int, context: int, tokens: int
) -> None:
    """`max_tokens` of the request itself had another default there; and here is less room."""
    async with serving(spec_in(tmp_path, max_context=context)) as client:
        began = Continuation(client.runner.generation(""), settled)
        more: Any = {"emitted": [97, 98], "sent_chars": 2, "continuation": began}
        last = (await client.answer(client.send(prompt="ab", **more)))[-1]
        assert (last.finish, last.completion_tokens) == ("length", tokens)


async def test_files_of_an_adapter_are_part_of_its_generation(tmp_path: Path) -> None:
    async with serving(spec_in(tmp_path)) as client:
        runner = client.runner
        runner._adapter_files = {"x": "x@1", "y": "x@2"}
        assert len({runner.generation(name) for name in ("", "x", "y")}) == 3


async def test_a_prompt_that_was_cut_is_the_same_where_there_is_more_room(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"prompt": "abcdefghij" * 9}
    params = SamplingParams(max_tokens=8, truncate_prompt=-1, stop=("never said",))
    async with serving(spec_in(tmp_path, max_context=40, step_s=0.001)) as client:
        deltas = await client.answer(client.send(params, **asked))
    whole, began = "".join(delta.text for delta in deltas), deltas[0].continuation
    async with serving(spec_in(tmp_path, max_context=64)) as client:
        said = whole[:3]
        more: Any = {"emitted": [*map(ord, said)], "sent_chars": 3, "continuation": began}
        rest = await client.answer(client.send(params, **asked, **more))
    assert said + "".join(delta.text for delta in rest) == whole


async def test_what_another_worker_needs_to_go_on_is_told_once(tmp_path: Path) -> None:
    async with serving(spec_in(tmp_path, step_s=0.001)) as client:
        params = SamplingParams(max_tokens=6, stop=("never said",))
        first, *rest = await client.answer(client.send(params, prompt="abcdef"))
        assert first.continuation == Continuation(client.runner.generation(""), 6)
        assert len(rest) > 1 and not any(delta.continuation for delta in rest)


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
async def test_the_space_after_a_prompt_is_part_of_the_text(tmp_path: Path, engine: str) -> None:
    """SentencePiece drops the first space of a text, and a completion is the middle of one."""
    model = tmp_path / "model"
    if engine == "llamacpp":
        write_sentencepiece(model.with_suffix(".gguf"))
        chosen = spec_in(tmp_path, engine, str(model.with_suffix(".gguf")), threads=1)
    else:
        SENTENCEPIECE.save_pretrained(write_tiny_llama(model))
        chosen = spec_in(tmp_path, engine, str(model), threads=1)
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    async with serving(structs.replace(chosen, chat_template=template)) as client:
        (the,) = client.engine.codec.encode_plain("the")
        params = SamplingParams(max_tokens=3, temperature=0.0, logit_bias=((the, 100.0),))

        async def say(**asked: Any) -> str:
            deltas = await client.answer(client.send(params, **asked))
            return "".join(delta.text for delta in deltas)

        begun = [ChatMessage("user", "a"), ChatMessage("assistant", "at")]
        assert await say(prompt="at") == " the the the"
        assert await say(prompt="at", emitted=[the, the], sent_chars=8) == " the"
        assert await say(messages=begun, continues=True) == " the the the"
        assert await say(messages=begun) == "the the the"
