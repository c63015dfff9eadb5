"""Runs of a page: through the queue as any request, in slots, and ended with the page."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.gateway.generation.generation import Choice
from servekit.gateway.http.request_context import CallFacts, RequestContext
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.status_html import progress_note
from servekit.gateway.ui.widgets.answer_html import MOST_CHARS, clean_text, render_answer
from servekit.gateway.ui.widgets.request_runner import (
    CHAT,
    COMPLETIONS,
    Progress,
    RequestOptions,
    Runs,
    Shown,
    Visit,
    merge_streams,
)
from servekit.protocol.messages import ModelStatus, Topology
from servekit.protocol.residency import ResidencyStatus
from tests.unit.gateway.conftest import DEADLINE_S, ENDLESS, ENDLESS_TOKENS, Service, until

VISIT = Visit("s", "ui 127.0.0.1")


def chat(text: str = "hello ", tokens: int = 24, **more: Any) -> RequestOptions:
    messages = [{"role": "user", "content": text}]
    return RequestOptions(CHAT, {"model": "m", "messages": messages, "max_tokens": tokens, **more})


async def told(runs: Runs, options: RequestOptions, slot: str = "") -> list[Shown]:
    async with asyncio.timeout(DEADLINE_S):
        return [shown async for shown in runs.stream_run(VISIT, options, slot)]


async def test_a_chat_and_a_completion_with_its_probabilities(service: Service) -> None:
    await service.up()
    runs = Runs(service.router)
    last = (await told(runs, chat()))[-1]
    assert (last.choice.text, last.busy, last.error) == ("hello " * 4, False, "")
    assert (last.progress.tokens, last.progress.finish) == (24, "length")
    body = {"model": "m", "prompt": "abc", "max_tokens": 3, "logprobs": 2}
    last = (await told(runs, RequestOptions(COMPLETIONS, body)))[-1]
    assert [one.token for one in last.choice.logprobs] == [b"a", b"b", b"c"]
    silent = (await told(runs, RequestOptions(COMPLETIONS, {**body, "max_tokens": 0})))[-1]
    assert progress_note(silent.progress, busy=False).count("0 tokens · length limit reached") == 1
    assert service.router.requests == 3


async def test_two_slots_run_at_once_and_the_second_knows_its_place(service: Service) -> None:
    await service.up(step_s=0.01, slots=1)
    runs = Runs(service.router)
    streams = {slot: runs.stream_run(VISIT, chat(tokens=60), slot) for slot in "ab"}
    async with asyncio.timeout(DEADLINE_S):
        seen = [one async for one in merge_streams(streams)]
    first, second = ([shown for slot, shown in seen if slot == at] for at in "ab")
    assert any(shown.progress.waiting == 0 for shown in [*first, *second])
    assert [shown[-1].choice.text for shown in (first, second)] == ["hello " * 10] * 2


async def test_stop_keeps_the_text_and_frees_the_engine(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    runs = Runs(service.router)
    stream = runs.stream_run(VISIT, chat(tokens=ENDLESS_TOKENS))
    last = await _until_text(stream)
    runs.stop_runs("s")
    async for shown in stream:
        last = shown
    assert (last.busy, last.error, last.progress.finish) == (False, "", "cancelled")
    assert last.choice.text.startswith("hello")
    await until(lambda: worker.running == 0)
    assert service.router.in_flight == 0


async def test_who_leaves_two_at_once_ends_both(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    runs = Runs(service.router)
    both = merge_streams(
        {slot: runs.stream_run(VISIT, chat(tokens=ENDLESS_TOKENS), slot) for slot in "ab"}
    )
    texts: dict[str, str] = {}
    async with asyncio.timeout(DEADLINE_S):
        async for slot, shown in both:
            texts[slot] = shown.choice.text
            if all(texts.get(slot) for slot in "ab"):
                break
    await both.aclose()
    await until(lambda: worker.running == 0)
    assert service.router.in_flight == 0


async def _until_text(stream: AsyncGenerator[Shown, None]) -> Shown:
    async for shown in stream:
        if len(shown.choice.text) > len("hello"):
            return shown
    raise AssertionError("it ended without a word")


async def test_who_leaves_or_asks_again_ends_what_ran(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    runs = Runs(service.router)
    left = runs.stream_run(VISIT, chat(tokens=ENDLESS_TOKENS))
    await _until_text(left)
    await left.aclose()
    await until(lambda: worker.running == 0)
    before = runs.stream_run(VISIT, chat(tokens=ENDLESS_TOKENS), "a")
    await _until_text(before)
    after = await told(runs, chat(tokens=3), "a")
    assert after[-1].choice.text == "hel"
    assert [shown async for shown in before] == []
    runs.drop_runs("s")
    await until(lambda: service.router.in_flight == 0)


async def test_errors_are_sentences(service: Service) -> None:
    runs = Runs(service.router)
    assert "is not served here" in (await told(runs, chat()))[-1].error
    await service.up()
    last = (await told(runs, chat(temperature=9)))[-1]
    assert "temperature" in last.error
    assert not last.busy
    with pytest.raises(RequestError):
        RequestOptions(CHAT, {"messages": []}).make_request("k")


# ---------------------------------------------------------------- as HTML


def shown(text: str, reasoning: str = "") -> Shown:
    choice = Choice()
    choice.text, choice.reasoning = text, reasoning
    return Shown(choice, Progress())


def test_what_a_model_writes_is_text() -> None:
    html = render_answer(
        shown("<script>x</script>![a](http://x/y.png)<img src=x>\x1b]0;t\x07", "<b>"), SAY_ENGLISH
    )
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html
    assert "\x1b" not in html


def test_more_text_only_adds_to_the_html() -> None:
    texts = ["", "a <", "a <b> c", "a <b> c & d"]
    parts = [render_answer(shown(text), SAY_ENGLISH) for text in texts]
    assert all(more.startswith(less) for less, more in itertools.pairwise(parts))


def test_a_gigabyte_is_cut_and_counted() -> None:
    html = render_answer(shown("w" * (MOST_CHARS + 1234)), SAY_ENGLISH)
    assert len(html) < MOST_CHARS + 1000
    assert "1,234 characters more" in html


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[H\x1bcX", "cX"),
        ("bell\x07", "bell�"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("\u202eabc", "�abc"),
        ("\x1b", ""),
    ],
)  # fmt: skip
def test_terminal_escapes_are_taken_out(text: str, left: str) -> None:
    assert clean_text(text) == left


async def test_who_waits_for_a_model_that_was_never_loaded_is_told_so(service: Service) -> None:
    worker = await service.worker()
    loading = replace(worker.status(), state="loading")
    residence = ResidencyStatus("on_demand", "stopped")
    model = ModelStatus("m", "echo", "-", 0, (loading,), residence=residence)
    service.router.apply_topology(Topology((model,)))
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        async for shown in Runs(service.router).stream_run(VISIT, chat(tokens=5)):
            seen.append(shown)
            if len(seen) == 3:
                ready = replace(model, info=worker.runner.info, replicas=(worker.status(),))
                service.router.apply_topology(Topology((ready,)))
    assert [shown.progress.waiting for shown in seen[1:3]] == [0, 0]
    assert seen[1].progress.route is service.router.routes["m"]
    assert seen[-1].choice.text == "hello"


async def test_requests_of_a_page_are_in_the_request_log(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, int, CallFacts | None]] = []

    def note(path: str, status: int, origin: RequestContext) -> None:
        noted.append((path, status, origin.calls))

    monkeypatch.setattr(RECORDER, "note_request", note)
    await service.up(**ENDLESS)
    runs = Runs(service.router)
    await told(runs, chat(tokens=5))
    await told(runs, chat(model="nobody"))
    left = runs.stream_run(VISIT, chat(tokens=ENDLESS_TOKENS))
    await _until_text(left)
    await left.aclose()
    assert [(path, status) for path, status, _ in noted] == [(CHAT, 200), (CHAT, 404), (CHAT, 499)]
    calls = noted[0][2]
    assert calls is not None and (calls[0], calls[2], calls[5]) == ("m", "length", 5)
    assert noted[2][2] is not None  # what was generated until then is in it
