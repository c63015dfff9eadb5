"""A worker that is put to sleep and woken: a real one, and what may come between."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.polling import poll_async
from tests.unit.supervisor.lifecycle.test_managed_process import Play, Stage
from tests.unit.supervisor.lifecycle.test_managed_process import play as play  # a fixture


async def told() -> None:
    """Gateways know at once."""


async def up(play: Play, **options: object) -> Stage:
    stage = play(**options)
    await stage.until("ready")
    return stage


async def die(stage: Stage) -> None:
    """It is killed, and there again before anybody goes on."""
    before = stage.replica.pid
    os.kill(before, signal.SIGKILL)
    await stage.host.until(
        lambda: stage.replica.state == "ready" and stage.replica.pid not in (0, before)
    )


async def test_it_sleeps_and_is_woken(play: Play) -> None:
    stage = await up(play)
    replica = stage.replica
    assert await replica.sleep(told) == ""
    assert not replica.serves
    assert await replica.wake() == ""
    assert replica.serves
    assert stage.host.states == ["starting", "loading", "ready", "asleep", "ready"]


async def test_one_that_cannot_sleep_serves_on_and_says_why(play: Play) -> None:
    stage = await up(play, sleep_error="it is not tired")
    assert await stage.replica.sleep(told) == "it is not tired"
    assert stage.replica.state == "ready"
    assert stage.replica.reason == "it could not be put to sleep: it is not tired"


async def test_one_that_cannot_be_woken_sleeps_on_and_says_why(play: Play) -> None:
    stage = await up(play, wake_error="it sleeps too well")
    assert await stage.replica.sleep(told) == ""
    assert await stage.replica.wake() == "it sleeps too well"
    assert stage.replica.state == "asleep"


async def test_it_is_told_to_sleep_only_when_gateways_send_nothing_more(play: Play) -> None:
    stage = await up(play)
    knows = asyncio.Event()

    async def wait() -> None:
        await knows.wait()

    sleeping = asyncio.create_task(stage.replica.sleep(wait))
    await stage.until("asleep")
    assert not sleeping.done()
    knows.set()
    assert await sleeping == ""


async def test_one_that_dies_before_it_is_told_is_not_asleep(play: Play) -> None:
    stage = await up(play)
    assert await stage.replica.sleep(lambda: die(stage)) == "its worker died"
    assert stage.replica.state == "ready"


async def test_one_that_dies_as_it_has_fallen_asleep_is_not_asleep(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after it is awake, and is not to be taken for a sleeper."""
    stage = await up(play)
    monkeypatch.setattr(stage.replica.gpu, "fell_asleep", lambda: die(stage))
    assert await stage.replica.sleep(told) == "its worker died"
    assert stage.replica.state == "ready"


async def test_an_open_order_is_answered_by_its_death(play: Play) -> None:
    stage = await up(play, wake_s=30.0)
    replica = stage.replica
    assert await replica.sleep(told) == ""
    waking = asyncio.ensure_future(replica.wake())
    await poll_async("the order is sent", lambda: replica.admin.is_open)
    os.kill(stage.replica.pid, signal.SIGKILL)
    assert await asyncio.wait_for(waking, 10) == "its worker died"


async def test_of_two_orders_to_wake_the_second_is_refused(play: Play) -> None:
    stage = await up(play, wake_s=1.0)
    assert await stage.replica.sleep(told) == ""
    first, second = await asyncio.gather(stage.replica.wake(), stage.replica.wake())
    assert (first, second) == ("", "it was asked to sleep or wake already, and has not answered")
    assert stage.replica.serves


async def test_one_that_takes_too_long_is_ended(play: Play) -> None:
    stage = await up(play, wake_s=60.0, settings={"load_timeout_s": 1.0})
    assert await stage.replica.sleep(told) == ""
    assert await stage.replica.wake() == "its worker died"
    await stage.host.until(lambda: "did not wake within 1 s" in stage.replica.reason)


async def test_who_has_no_process_cannot_be_woken(play: Play) -> None:
    stage = play(load_error="no such weights")
    await stage.until("failed")
    assert await stage.replica.wake() == "worker m/0 is failed"
