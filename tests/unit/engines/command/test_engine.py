"""The command engine with a real process; what it needs of a worker is in tests/integration."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from servekit.engines.api.text_engine import TextJob
from servekit.engines.command.engine import CommandEngine
from servekit.errors import LoadError
from servekit.protocol.messages import UNKNOWN_TOKEN, ChatMessage, Generate, SamplingParams
from servekit.system import procfs
from tests.polling import poll, poll_async
from tests.unit.engines.command.serving import make_spec, plain, started
from tests.unit.engines.contract.test_text import Running


def ask(running: Running, request: Generate) -> int:
    running.engine.ask(TextJob(request.id, request))
    return request.id


def chat(text: str, max_tokens: int = 6, **fields: Any) -> Generate:
    params = SamplingParams(max_tokens=max_tokens)
    return Generate(1, params, messages=[ChatMessage("user", text)], **fields)


async def test_it_serves_what_the_server_says() -> None:
    async with started() as (engine, running):
        info = running.info
        assert (info.max_context, info.slots, info.chat, info.resumes) == (4096, 4, True, False)
        assert "chats continue" in info.detail
        first = ask(running, chat("count"))
        assert await running.text(first) == " 0; 1; 2; 3; 4; 5;"
        last = (await running.answer(first))[-1]
        assert (last.finish, last.prompt_tokens, last.completion_tokens) == ("length", 5, 6)
        counted = [id for output in running.outputs[first] for id in output.token_ids]
        assert counted == [UNKNOWN_TOKEN] * 6
        assert engine.trouble == ""


@pytest.mark.parametrize("make", [chat, plain])
async def test_it_goes_on_after_the_text_of_another_worker(make: Any) -> None:
    async with started() as (engine, running):
        begun = make("count", answered=" 0; 1; ", emitted=[UNKNOWN_TOKEN] * 2)
        assert engine.continues(begun)
        job = ask(running, begun)
        assert await running.text(job) == "2; 3; 4; 5;"  # the white space was there
        last = (await running.answer(job))[-1]
        assert (last.prompt_tokens, last.completion_tokens) == (5, 6)


async def test_it_measures_the_weights_that_the_server_has_read(tmp_path: Path) -> None:
    spec = make_spec()
    folder, file = tmp_path / "folder", tmp_path / "m.gguf"
    folder.mkdir()
    save_file({"a": torch.zeros(100)}, folder / "model.safetensors")
    file.write_bytes(bytes(300))
    for path, weights_bytes in ((folder, 400), (file, 300), (tmp_path / "missing", 0)):
        engine = CommandEngine(structs.replace(spec, path=str(path)))
        try:
            info = await asyncio.to_thread(engine.load, lambda progress: None)
        finally:
            await asyncio.to_thread(engine.close)
        assert info.weights_bytes == weights_bytes


async def test_a_server_that_takes_no_prefix_is_found_out() -> None:
    async with started("--no-prefix") as (engine, running):
        assert "completions, but not chats, continue" in running.info.detail
        assert not engine.continues(chat("count"))
        assert engine.continues(plain("count"))


async def test_a_server_without_chats_serves_completions() -> None:
    async with started("--no-chat") as (_, running):
        assert not running.info.chat
        assert await running.text(ask(running, plain("count"))) == " 0; 1; 2; 3; 4; 5;"


async def test_embeddings() -> None:
    async with started(task="embed", endpoints=()) as (_, running):
        assert (running.info.serves, running.info.embedding_size) == (("embed",), 2)
        job = ask(running, Generate(1, SamplingParams(), task="embed", inputs=["a"]))
        assert (await running.answer(job))[-1].vectors


async def test_it_waits_for_a_server_that_takes_its_time() -> None:
    async with started("--load-s", "0.6", "--late-s", "0.6") as (_, running):
        assert await running.text(ask(running, chat("count", 1))) == " 0;"


def test_a_server_that_exits_while_it_loads() -> None:
    engine = CommandEngine(make_spec("--exit-code", "3"))
    with pytest.raises(LoadError, match="exited with code 3 while it loaded"):
        engine.load(lambda progress: None)
    engine.close()


def test_a_program_that_does_not_exist() -> None:
    engine = CommandEngine(make_spec(command=["/no/such/program", "{port}"]))
    with pytest.raises(LoadError, match="cannot be started: No such file") as raised:
        engine.load(lambda progress: None)
    assert raised.value.permanent
    engine.close()


def test_a_server_that_is_never_ready_ends_with_its_engine() -> None:
    engine = CommandEngine(make_spec("--never-ready"))

    def load() -> None:
        with pytest.raises(LoadError):
            engine.load(print)

    loading = threading.Thread(target=load)
    loading.start()
    server = poll("it is started", lambda: engine._server)
    engine.close()
    loading.join()
    assert server is not None and procfs.read_process(server.pid) is None


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("DIE=3", "killed by SIGKILL"), ("EXIT=3", "exited with code 7"), ("ILL=3", "answered 503")],
)
async def test_its_death_is_the_engines_and_nothing_is_refused(trouble: str, said: str) -> None:
    async with started() as (engine, running):
        job = ask(running, chat(trouble))
        await poll_async("its death is noticed", lambda: engine.fatal is not None)
        assert said in str(engine.fatal)
        outputs = running.outputs.get(job, [])
        assert all(output.failure is None and output.finish is None for output in outputs)


async def test_a_connection_that_breaks_fails_alone() -> None:
    async with started() as (engine, running):
        failure = (await running.answer(ask(running, chat("BREAK=2"))))[-1].failure
        assert failure is not None and "broke off" in failure.message
        assert engine.fatal is None


async def test_a_connection_closed_before_the_first_byte_is_tried_again() -> None:
    async with started() as (_, running):
        assert await running.text(ask(running, chat("CLOSE", 1))) == " 0;"


async def test_an_error_is_passed_on() -> None:
    async with started() as (_, running):
        failure = (await running.answer(ask(running, chat("ERROR"))))[-1].failure
        assert failure is not None and "told to fail" in failure.message


async def test_a_stall_shows_in_the_age_of_its_progress() -> None:
    async with started() as (engine, running):
        assert engine.load_now().progress_age_s == 0.0
        ask(running, chat("STALL=2"))
        await poll_async("its age grows", lambda: engine.load_now().progress_age_s > 1.2)


async def test_it_sleeps_by_the_servers_pages() -> None:
    async with started(sleep="/sleep", wake="/wake") as (engine, running):
        assert running.info.sleeps
        await asyncio.to_thread(engine.sleep)
        await asyncio.to_thread(engine.wake)
    async with started(sleep="/none", wake="/wake") as (engine, _):
        with pytest.raises(LoadError, match="answered /none with 404"):
            await asyncio.to_thread(engine.sleep)


async def test_a_server_that_ignores_sigterm_is_killed() -> None:
    async with started("--ignore-sigterm") as (engine, _):
        assert engine._server is not None
        pid, began_s = engine._server.pid, time.monotonic()
    assert procfs.read_process(pid) is None
    assert time.monotonic() - began_s < 30
