"""The echo engine: what it says, and how it misbehaves when told to."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.echo.engine import EchoEngine
from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import ChatMessage, Progress, SamplingParams, WorkerSpec

DEADLINE_S = 60.0


class Running:
    """An engine under test; `until` waits for what it emits."""

    def __init__(self, **options: Any) -> None:
        spec = WorkerSpec(
            "e/0", "e", "echo", "-", None, "cpu", "auto", None, False, {}, options, "-"
        )
        self.engine = EchoEngine(spec)
        self.progress: list[Progress] = []
        self.info = self.engine.load(self.progress.append)
        self.outputs: list[StepOutput] = []
        self.steps = 0
        self._changed = threading.Condition()
        self.engine.start(self._emit)

    def _emit(self, outputs: Sequence[StepOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self.steps += 1
            self._changed.notify_all()

    def until_finished(self, *ids: int) -> dict[int, str]:
        def finished() -> bool:
            return {o.id for o in self.outputs if o.finish} >= set(ids)

        with self._changed:
            assert self._changed.wait_for(finished, DEADLINE_S)
        return {number: self.text(number) for number in ids}

    def text(self, number: int) -> str:
        return "".join(chr(t) for o in self.outputs if o.id == number for t in o.token_ids)


@pytest.fixture
def engines() -> Iterator[list[Running]]:
    started: list[Running] = []
    yield started
    for running in started:
        running.engine.close()


def job(number: int, text: str = "abc", emitted: str = "", **params: Any) -> Job:
    ids = [ord(c) for c in text]
    return Job(
        number, ids, SamplingParams(**{"max_tokens": 7, **params}), [ord(c) for c in emitted]
    )


@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_it_says_the_prompt_again(engines: list[Running], step_s: float) -> None:
    engines.append(running := Running(step_s=step_s))
    for number in range(3):
        running.engine.submit(job(number, max_tokens=40))
    said = running.until_finished(0, 1, 2)
    assert set(said.values()) == {("abc" * 14)[:40]}
    assert running.engine.load_now().running == 0


def test_a_continuation_goes_on_at_its_position(engines: list[Running]) -> None:
    engines.append(running := Running())
    running.engine.submit(job(1))
    running.engine.submit(job(2, emitted="abca"))
    running.engine.submit(job(3, seed=2, temperature=1.0))
    running.engine.submit(job(4, emitted="cabc", seed=2, temperature=1.0))
    said = running.until_finished(1, 2, 3, 4)
    assert said[1] == "abca" + said[2]
    assert said[3] == "cabc" + said[4]


def test_a_cancelled_job_is_not_heard_of_again(engines: list[Running]) -> None:
    engines.append(running := Running(step_s=0.001, slots=1))
    running.engine.submit(job(1, max_tokens=100_000))
    running.engine.submit(job(2))
    assert running.engine.load_now().waiting == 1
    running.engine.cancel(1)
    running.engine.cancel(77)
    running.until_finished(2)
    assert running.engine.load_now().running == 0
    assert not any(o.id == 1 and o.finish for o in running.outputs)


def test_hanging_shows_in_its_progress_age(engines: list[Running]) -> None:
    engines.append(running := Running(step_s=0.001, hang_on="freeze"))
    assert running.engine.load_now().progress_age_s == 0
    running.engine.submit(job(1, "please freeze"))
    first = running.engine.load_now()
    while running.engine.load_now().progress_age_s <= first.progress_age_s + 0.01:
        assert running.engine.load_now().running == 1


def test_chat_and_decoding() -> None:
    codec = Running().engine.codec
    ids = codec.render_chat([ChatMessage("system", "x"), ChatMessage("user", "hé🙂")])
    decoder = codec.decoder()
    assert decoder.push(ids) + decoder.flush() == "hé🙂"


def test_a_load_error_is_the_users_sentence() -> None:
    with pytest.raises(LoadError, match="no such weights"):
        Running(load_error="no such weights")


def test_loading_takes_its_time_and_says_so(engines: list[Running]) -> None:
    engines.append(running := Running(load_s=0.02))
    assert [p.done for p in running.progress] == list(range(20))


_CRASH = """
from tests.unit.engines.echo.test_engine import Running, job
running = Running({options})
running.engine.submit(job(1, "boom"))
running.until_finished(1)
"""


@pytest.mark.parametrize("options", ["crash_on='boom'", "crash_after_tokens=3"])
def test_crashing_is_a_real_sigkill(options: str) -> None:
    ended = subprocess.run([sys.executable, "-c", _CRASH.format(options=options)], timeout=60)
    assert ended.returncode == -9


# ---------------------------------------------------------------- adapters


def adapter(folder: Path, name: str = "x", config: str = "{}") -> AdapterSpec:
    path = folder / name
    path.mkdir()
    (path / "adapter_config.json").write_text(config)
    return AdapterSpec(name, str(path))


def test_an_adapter_changes_letters_and_a_continuation_goes_on(
    engines: list[Running], tmp_path: Path
) -> None:
    engines.append(running := Running())
    info = running.engine.load_adapter(adapter(tmp_path))
    assert (info.kind, info.mode, info.why) == ("ECHO", "mixed", "letters go through upper")
    for number, emitted in ((1, ""), (2, "AßC")):
        one = job(number, "aßc", emitted)
        one.adapter = "x"
        running.engine.submit(one)
    running.engine.submit(job(3, "aßc"))
    said = running.until_finished(1, 2, 3)
    assert said == {1: "AßCAßCA", 2: "AßCA", 3: "aßcaßca"}  # one token stays one
    running.engine.unload_adapter("x")


def test_it_begins_with_the_adapters_of_its_spec(tmp_path: Path) -> None:
    right, wrong = adapter(tmp_path), adapter(tmp_path, "wrong", "[]")
    missing = AdapterSpec("missing", str(tmp_path / "nowhere"))
    spec = replace(Running().engine.spec, adapters=(right, wrong, missing))
    info = EchoEngine(spec).load(lambda progress: None)
    assert [one.name for one in info.adapters] == ["x"]
    assert set(info.refused_adapters) == {"wrong", "missing"}
    assert "has to be a JSON object" in info.refused_adapters["wrong"]
    assert "No such file" in info.refused_adapters["missing"]


@pytest.mark.parametrize(("option", "is_meant"), [("x", True), ("x/0", True), ("x/1", False)])
def test_it_refuses_an_adapter_when_told_to(tmp_path: Path, option: str, is_meant: bool) -> None:
    engine = Running(adapter_error=option).engine
    if is_meant:
        with pytest.raises(RequestError, match="as its options say"):
            engine.load_adapter(adapter(tmp_path))
    else:
        assert engine.load_adapter(adapter(tmp_path)).name == "x"
