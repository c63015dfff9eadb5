"""Every order to a worker is answered: by the worker, its death, or the end of patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AdapterSpec,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.supervisor.adapters.state import Refusal
from servekit.supervisor.workers.pending_requests import Answer, PendingRequests
from tests.polling import poll_async

SPEC = AdapterSpec("x", "/x")
INFO = AdapterInfo("x", "LORA", "mixed", "")


class Scene:
    def __init__(self) -> None:
        self.pending = PendingRequests()
        self.sent: list[Any] = []
        self.late: list[str] = []

    async def send(
        self, request: Any, what: str = "loaded 'x'", deadline_s: float = 60.0
    ) -> asyncio.Task[Answer]:
        """Begin a request, which is open then."""
        order = self.pending.send(
            request, self.sent.append, what, lambda: self.late.append(what), deadline_s
        )
        task = asyncio.create_task(order)
        await asyncio.sleep(0)
        return task


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_answers_find_their_requests_in_any_order(scene: Scene) -> None:
    first, second = scene.pending.next_number(), scene.pending.next_number()
    assert (first, second) == (1, 2)
    load = await scene.send(LoadAdapter(first, SPEC))
    unload = await scene.send(UnloadAdapter(second, "y"))
    wake = await scene.send(Wake())
    assert scene.sent == [LoadAdapter(1, SPEC), UnloadAdapter(2, "y"), Wake()]
    scene.pending.take_answer(Awake(2.0))
    scene.pending.take_answer(AdapterUnloaded(2, "y"))
    scene.pending.take_answer(AdapterLoaded(9, INFO))
    scene.pending.take_answer(AdapterLoaded(1, INFO))
    assert await load == AdapterLoaded(1, INFO)
    assert (await unload, await wake) == (AdapterUnloaded(2, "y"), Awake(2.0))
    assert not scene.pending.is_open


@pytest.mark.parametrize(
    ("request_", "answer", "refusal"),
    [
        (Sleep(), SleepFailed("it is not tired"), Refusal("it is not tired")),
        (LoadAdapter(1, SPEC), AdapterRefused(1, "no", True), Refusal("no", True)),
        (LoadAdapter(1, SPEC), AdapterRefused(1, "no", False), Refusal("no", False)),
    ],
)
async def test_a_refusal_is_an_answer(
    scene: Scene, request_: Any, answer: Any, refusal: Refusal
) -> None:
    task = await scene.send(request_)
    scene.pending.take_answer(answer)
    assert await task == refusal


@pytest.mark.parametrize("reason", ["SIGKILL", ""])
async def test_a_death_answers_all(scene: Scene, reason: str) -> None:
    load = await scene.send(LoadAdapter(1, SPEC))
    sleep = await scene.send(Sleep(), "slept")
    scene.pending.answer_death("m/0", reason)
    left = not reason
    said = f"worker m/0 died while it loaded 'x': {reason}"
    assert await load == Refusal(said, died=True, left=left)
    assert await sleep == Refusal(f"worker m/0 died while it slept: {reason}", died=True, left=left)


async def test_a_death_after_the_answer_changes_nothing(scene: Scene) -> None:
    task = await scene.send(Sleep())
    scene.pending.take_answer(Asleep(1.0))
    scene.pending.answer_death("m/0", "SIGKILL")
    scene.pending.take_answer(Asleep(2.0))
    assert await task == Asleep(1.0)


async def test_only_one_order_to_sleep_or_wake_is_open(scene: Scene) -> None:
    first = await scene.send(Sleep())
    second = await scene.send(Wake())
    refused = await second
    assert isinstance(refused, Refusal) and "already" in refused.message
    assert scene.sent == [Sleep()]
    scene.pending.take_answer(Asleep(1.0))
    assert await first == Asleep(1.0), "the refused one has not taken its place"
    third = await scene.send(Wake())
    scene.pending.take_answer(Awake(1.0))
    assert await third == Awake(1.0)


async def test_who_is_late_is_ended_and_who_answers_in_time_is_not(scene: Scene) -> None:
    quick = await scene.send(Sleep(), "slept", 0.01)
    scene.pending.take_answer(Asleep(0.0))
    await quick
    slow = await scene.send(LoadAdapter(1, SPEC), "loaded", 0.01)
    await poll_async("the second is late", lambda: scene.late)
    assert scene.late == ["loaded"], "the timer of the one before is gone"
    assert not slow.done(), "its death will answer it"
    scene.pending.answer_death("m/0", "stalled")
    await slow


async def test_an_order_that_cannot_be_sent_is_open_no_longer(scene: Scene) -> None:
    def refuse(request: Any) -> None:
        raise OSError("gone")

    late: Callable[[], None] = lambda: None  # noqa: E731
    with pytest.raises(OSError, match="gone"):
        await scene.pending.send(Sleep(), refuse, "slept", late, 60.0)
    assert not scene.pending.is_open


async def test_only_loads_of_adapters_count_as_such(scene: Scene) -> None:
    tasks = [await scene.send(Sleep()), await scene.send(UnloadAdapter(1, "x"))]
    assert scene.pending.is_open and not scene.pending.loads_adapter
    tasks.append(await scene.send(LoadAdapter(2, SPEC)))
    assert scene.pending.loads_adapter
    scene.pending.answer_death("m/0", "")
    await asyncio.gather(*tasks)
