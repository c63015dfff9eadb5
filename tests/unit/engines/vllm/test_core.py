"""Waiting for the core; vLLM itself is not needed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from servekit.engines.vllm.core import wait_for
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
