"""Waiting for the core, and its death; vLLM itself is not needed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from servekit.engines.vllm.core import causes, core_client
from servekit.engines.vllm.core.causes import Causes
from servekit.engines.vllm.core.core_client import Core, explain_refusal, wait_for
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


class Section(pydantic.BaseModel):
    tokens: int
    method: str


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Section.model_validate({"tokens": "x"}),
            "tokens: Input should be a valid integer, unable to parse string as an integer; "
            "method: Field required",
        ),
        (lambda: int("x"), "invalid literal for int() with base 10: 'x'"),
    ],
)
def test_a_refusal_of_the_configuration_is_told_in_full(
    call: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match="valid") as caught:
        call()
    assert explain_refusal(caught.value) == sentence


CONFIG = SimpleNamespace(instance_id=f"test-{os.getpid()}")


class Client:
    """Of vLLM's client what is used of it; requests are refused from the third on.

    Its core is a process that does nothing until it is told how to end.
    """

    def __init__(self, end: Any = time.sleep, *told: Any) -> None:
        process = multiprocessing.get_context("spawn").Process(target=end, args=told or (600,))
        process.start()
        manager = SimpleNamespace(processes=[process])
        self.resources = SimpleNamespace(engine_dead=False, engine_manager=manager)
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        self.sent: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request: Any) -> None:
        if len(self.sent) == 2:
            raise OverflowError("too large a number")
        self.sent.append(request.request_id)

    @property
    def process(self) -> Any:
        return self.resources.engine_manager.processes[0]

    def shutdown(self) -> None:
        self.process.kill()

    def abort_requests(self, names: list[str]) -> None:
        if self.resources.engine_dead:
            raise ConnectionError("it is dead")
        self.aborted += names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Core, Client]]]:
    """Make cores whose client is the one above; they are closed at the end."""
    made: list[Core] = []

    def start(*told: Any) -> tuple[Core, Client]:
        client = Client(*told)
        monkeypatch.setattr(
            core_client, "_start_core", lambda asked, model: (client, Causes(CONFIG))
        )
        made.append(Core({}, "m"))
        return made[-1], client

    yield start
    for one in made:
        one.close()


Start = Callable[..., tuple[Core, Client]]


def test_what_was_sent_before_one_that_cannot_be_is_aborted(started: Start) -> None:
    one, client = started()
    with pytest.raises(OverflowError):
        one.add([SimpleNamespace(request_id=name) for name in "abcd"])
    assert client.sent == client.aborted == ["a", "b"] and not one.dead
    client.resources.engine_dead = True
    one.abort_jobs(["a"])  # with the core its requests are gone
    assert one.dead


def test_a_core_that_is_killed_is_noticed_at_once_with_its_signal(started: Start) -> None:
    one, client = started()
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        client.process.kill()

    threading.Timer(0.2, kill).start()
    with pytest.raises(EngineFailed, match=r"engine core was killed by SIGKILL\.$"):
        while True:
            one.read_outputs(30.0)
    assert time.monotonic() - killed_at < 5.0  # and not when the 30 s are over
    assert one.dead


def _die_of(parent: int, error: str) -> None:
    """As vLLM's core does: log, and end."""
    causes.report_errors(SimpleNamespace(instance_id=f"test-{parent}"))
    try:
        raise MemoryError(error)
    except MemoryError:
        log = logging.getLogger("vllm.v1.engine.core")
        log.error("of one request, and not of this", exc_info=True)
        log.exception("EngineCore encountered a fatal error.")
    sys.exit(1)


def _lose_a_child(parent: int) -> None:
    """As vLLM's core does, which asks for the exit code of its child before there is one."""
    causes.report_errors(SimpleNamespace(instance_id=f"test-{parent}"))
    child = os.fork()
    if not child:
        time.sleep(600)
    os.kill(child, signal.SIGKILL)
    log = logging.getLogger("vllm.v1.executor.multiproc_executor")
    log.error("Worker proc %s died unexpectedly (exit code: %s), shutting down", "W-0", None)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL  # still there to be asked for
    sys.exit(1)


def test_a_process_below_the_core_is_named_with_its_signal(started: Start) -> None:
    one, _ = started(_lose_a_child, os.getpid())
    with pytest.raises(EngineFailed) as caught:
        while True:
            one.read_outputs(30.0)
    assert caught.value.message == "A process of vLLM's that runs the model was killed by SIGKILL."


def test_an_exception_that_ends_a_core_is_named(started: Start) -> None:
    one, _ = started(_die_of, os.getpid(), "CUDA out of memory\nmore of it")
    with pytest.raises(EngineFailed) as caught:
        while True:
            one.read_outputs(30.0)
    assert caught.value.message == ("vLLM's engine core has died: MemoryError: CUDA out of memory")


def test_a_process_below_the_core_that_is_killed_is_told_so() -> None:
    told = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
    assert causes.describe_death(told, None) == (
        "A process of vLLM's that runs the model was killed by SIGKILL."
    )
    unknown = told.replace("-9", "None")
    assert (
        causes.describe_death(unknown, None) == "A process of vLLM's that runs the model has died."
    )
    assert (
        causes.describe_death(told, -signal.SIGSEGV) == "vLLM's engine core was killed by SIGSEGV."
    )
    assert (
        causes.describe_death("", 1)
        == "vLLM's engine core ended with exit code 1; its log says why."
    )
    assert causes.describe_death("", None) == "vLLM's engine core has died; its log says why."


def test_a_start_that_fails_gives_the_reported_cause() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above.\nmore")
    told = causes.explain_start("ValueError: no weights", error)
    assert (told.message, told.permanent) == (
        "vLLM's engine did not start: ValueError: no weights",
        False,
    )
    assert causes.explain_start(
        "ModuleNotFoundError: No module named 'flashinfer'", error
    ).permanent
    untold = causes.explain_start("", error)
    assert "the lines before this say why (Engine core init" in untold.message
    assert not untold.permanent
