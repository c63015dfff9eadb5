"""Waiting for the core; vLLM itself is not needed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.engines.vllm import core
from servekit.engines.vllm.core import Core, wait_for
from servekit.errors import EngineFailed


def test_an_answer_is_handed_on_and_so_is_a_refusal() -> None:
    answer: Future[Any] = Future()
    threading.Timer(0.05, answer.set_result, [7]).start()
    assert wait_for(answer, lambda: False, 10.0) == 7
    refused: Future[Any] = Future()
    refused.set_exception(TimeoutError("its own words"))
    with pytest.raises(TimeoutError, match="its own words"):
        wait_for(refused, lambda: False, 10.0)


def test_a_core_that_dies_over_a_call_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="has died"):
        wait_for(Future(), lambda: True, 600.0)
    assert time.monotonic() - began < 10.0


def test_patience_ends() -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        wait_for(Future(), lambda: False, 0.01)


class Client:
    """Of vLLM's client what is used of it; requests are refused from the third on."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.sent: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request: Any) -> None:
        if len(self.sent) == 2:
            raise OverflowError("too large a number")
        self.sent.append(request.request_id)

    def abort_requests(self, names: list[str]) -> None:
        if self.resources.engine_dead:
            raise ConnectionError("it is dead")
        self.aborted += names


def test_what_was_sent_before_one_that_cannot_be_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client()
    monkeypatch.setattr(core, "_start", lambda asked, model: client)
    one = Core({}, "m")
    with pytest.raises(OverflowError):
        one.add([SimpleNamespace(request_id=name) for name in "abcd"])
    assert client.sent == client.aborted == ["a", "b"] and not one.dead
    client.resources.engine_dead = True
    one.abort(["a"])  # with the core its requests are gone
    assert one.dead
