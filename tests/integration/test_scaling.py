"""A model of `replicas: {min, max}` follows its load, with real processes; nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from servekit.event_store import EventFilter, newest_events
from servekit.protocol.messages import Accepted, Reload
from servekit.supervisor.admin.control_socket import query_supervisor
from tests.integration.instance import Instance, echo, write_config

TEXT = "up and down again "
TOKENS = 60
#: Enough for a machine ten times slower.
LONG_S = 120.0

MODEL: dict[str, Any] = {
    **echo("m", step_s=0.01, slots=4),
    "replicas": {"min": 1, "max": 3},
    "scale": {"wait_s": 0.2, "down_s": 2.0},
}
KEPT = {**echo("kept"), "replicas": 1}


class Clients:
    """So many that ask one request after the other; `wrong` are answers that were not whole."""

    def __init__(self, url: str, count: int) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    @contextmanager
    def asking(self) -> Iterator[Clients]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(LONG_S)

    def _ask(self) -> None:
        body = {"model": "m", "prompt": TEXT, "max_tokens": TOKENS}
        wanted = (TEXT * TOKENS)[:TOKENS]
        with httpx.Client(base_url=self._url, timeout=LONG_S) as client:
            while not self._over.is_set():
                answer = client.post("/v1/completions", json=body)
                text = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
                if text == wanted:
                    self.answered += 1
                else:
                    self.wrong.append(text)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("scaling"), [MODEL, KEPT]) as instance:
        instance.until_settled()
        yield instance


def ready(instance: Instance) -> int:
    return sum(replica.state == "ready" for replica in instance.model("m").replicas)


def settled(instance: Instance, count: int) -> bool:
    """So many, and none that comes or goes."""
    return ready(instance) == len(instance.model("m").replicas) == count


def scaled(instance: Instance) -> list[str]:
    return [
        event.what for event in newest_events(instance.run_dir, EventFilter(kinds=("scale",)), 100)
    ]


def test_load_brings_replicas_and_calm_takes_them_with_nothing_lost(instance: Instance) -> None:
    with Clients(instance.url, 24).asking() as many:
        instance.until("three are ready", lambda: ready(instance) == 3, LONG_S)
        before = many.answered
        instance.until("they answer", lambda: many.answered > before + 48, LONG_S)
        told = instance.model("m").scale
        assert told is not None
        assert (told.min, told.max, told.desired) == (1, 3, 3)
        assert told.reason.startswith("scaled up to ")
        figures = httpx.get(f"{instance.url}/metrics").text
        for state, count in {"min": 1, "max": 3, "desired": 3, "ready": 3}.items():
            assert f'servekit_replicas{{model="m",state="{state}"}} {count}' in figures
    with Clients(instance.url, 1).asking() as few:
        instance.until("one is left", lambda: settled(instance, 1), LONG_S)
    assert few.answered
    assert not many.wrong
    assert not few.wrong
    first, *_, last = scaled(instance)
    assert first.startswith("scaled up to 2: ")
    assert " waited " in first
    assert last.startswith("scaled down to 1: 1 could have carried it for ")
    assert instance.replica("kept/0").restarts == 0


def pids(instance: Instance) -> dict[str, int]:
    return {one.name: one.pid for model in instance.status().models for one in model.replicas}


@pytest.mark.lane("long")
def test_a_reload_of_the_range_touches_nothing_else(instance: Instance) -> None:
    def reload(least: int, most: int) -> str:
        model = {**MODEL, "replicas": {"min": least, "max": most}}
        write_config(instance.run_dir.parent, [model, KEPT])
        answer = asyncio.run(query_supervisor(instance.run_dir / "control.sock", Reload(), LONG_S))
        assert isinstance(answer, Accepted)
        return answer.message

    instance.until("one is left", lambda: settled(instance, 1), LONG_S)
    before = pids(instance)
    assert reload(2, 4) == "m scaled from 1 to 2, kept unchanged"
    instance.until("there are two", lambda: settled(instance, 2), LONG_S)
    both = pids(instance)
    assert before.items() < both.items()
    told = instance.model("m").scale
    assert told is not None
    assert (told.min, told.max) == (2, 4)
    assert reload(1, 2) == "m updated, kept unchanged"
    instance.until("the surplus goes by load", lambda: settled(instance, 1), LONG_S)
    assert pids(instance).items() < both.items()
