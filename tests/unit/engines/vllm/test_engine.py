"""What the engine makes of the core's steps; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from servekit.engines.api.base import StepOutput
from servekit.engines.vllm.engine import VllmEngine
from servekit.engines.vllm.generation_defaults import Stated
from servekit.engines.vllm.request_table import Embedding
from servekit.engines.vllm.sleep import Broken, SleepControl
from servekit.errors import EngineFailed, LoadError, WorkerLost
from servekit.protocol.messages import Grammar
from tests.unit.engines.harness import make_spec
from tests.unit.engines.vllm.recording import RecordingCore


def _engine() -> Any:
    return VllmEngine(make_spec("/model", engine="vllm", device="cuda"))


class Bench:
    """An engine whose core is a recording one, and all that it has emitted."""

    def __init__(self, *, embeds: bool = False) -> None:
        self.engine = _engine()
        self.core = self.engine._core = RecordingCore(self._answer)
        self.engine._stated = Stated(frozenset({2}), 2, {})
        self.engine._pieces = SimpleNamespace(find_bytes=lambda token: b"")
        self.engine._embeds = embeds
        self.asked: list[Any] = []
        self.engine._probes = SimpleNamespace(
            deliver=self.asked.append, fail_all=lambda error: None
        )
        self.engine._slumber = SleepControl(self.engine._core, 1, lambda: None)
        self.outputs: list[StepOutput] = []
        self.engine.start(self.outputs.extend)

    def _answer(self, method: str, *told: Any) -> Any:
        if method == "wake_up":
            raise RuntimeError("CUDA Error: out of memory")
        return [0]

    def hold(self, *jobs: int) -> None:
        for job in jobs:
            self.engine._held.add_job(job, [f"{job}#0"])

    def step(self, *outputs: Any) -> None:
        stats = SimpleNamespace(num_running_reqs=len(outputs), kv_cache_usage=0.5)
        self.engine._take_step(SimpleNamespace(outputs=outputs, scheduler_stats=stats))


def output(name: str, ids: list[int], reason: int | None = None, **more: Any) -> Any:
    fields = {"new_logprobs": None, "prefill_stats": None, "pooling_output": None}
    fields |= {"stop_reason": None, "new_prompt_logprobs_tensors": None} | more
    return SimpleNamespace(request_id=name, new_token_ids=ids, finish_reason=reason, **fields)


def vector(*numbers: float) -> Any:
    """Of a tensor what is used of it."""
    tensor = SimpleNamespace(numpy=lambda: np.array(numbers, np.float32))
    tensor.cpu = tensor.float = lambda: tensor
    return tensor


def test_a_step_brings_tokens_and_ends() -> None:
    bench = Bench()
    bench.hold(1, 2, 3)
    stats = SimpleNamespace(num_cached_tokens=16)
    bench.step(
        output("1#0", [7], prefill_stats=stats),
        output("2#0", [7, 2], 0),
        output("3#0", [8]),
        output("9#0", [7]),
    )
    first, ended, plain = bench.outputs
    assert (first.id, first.token_ids, first.cached_tokens) == (1, [7], 16)
    assert (ended.id, ended.token_ids, ended.finish) == (2, [7], "stop")
    assert plain == StepOutput(3, [8])
    assert [one.request_id for one in bench.asked] == ["9#0"]
    assert bench.engine.load_now().running == 2 and bench.engine.load_now().kv_used == 0.5


def test_who_cancels_is_aborted_and_hears_no_more() -> None:
    bench = Bench()
    bench.hold(1, 2)
    bench.engine.cancel(1)
    bench.engine.cancel(77)
    bench.step(output("1#0", [7]), output("2#0", [7]))
    assert [one.id for one in bench.outputs] == [2] and bench.core.aborted == ["1#0"]


def test_vectors_come_together_in_the_order_of_the_texts() -> None:
    bench = Bench(embeds=True)
    bench.engine._held.add_job(1, ["a", "b"], Embedding.from_names(["a", "b"]))
    bench.step(output("b", [], 0, pooling_output=vector(2.0)))
    assert bench.outputs == []
    bench.step(output("a", [], 0, pooling_output=vector(1.0)))
    [found] = bench.outputs
    assert [np.frombuffer(one, "<f4").tolist() for one in found.vectors or ()] == [[1.0], [2.0]]


def test_a_text_that_fails_takes_the_others_with_it() -> None:
    bench = Bench(embeds=True)
    bench.engine._held.add_job(1, ["a", "b"], Embedding.from_names(["a", "b"]))
    bench.step(output("b", [], 3), output("a", [], 0, pooling_output=vector(1.0)))
    assert [one.error is not None for one in bench.outputs] == [True]
    assert bench.core.aborted == ["a", "b"] and len(bench.engine._held) == 0


def test_a_text_that_cannot_go_on_in_its_grammar_is_the_requests_fault() -> None:
    bench = Bench()
    bench.hold(1, 2)
    bench.engine._followed[1] = Grammar("json_schema", "{}", "tools")
    bench.step(output("1#0", [], 3), output("2#0", [], 3))
    first, other = bench.outputs
    assert first.error == "The grammar of the tools cannot be followed: it is too complex."
    assert first.param == "tools"
    assert (other.error, other.param) == ("vLLM gave the request up; its log says why.", None)
    assert not bench.engine._followed


@pytest.mark.parametrize("embeds", [False, True])
def test_a_core_that_is_told_to_end_ends_no_request(embeds: bool) -> None:
    """It aborts them all first, and then itself."""
    bench = Bench(embeds=embeds)
    bench.engine._held.add_job(1, ["1#0"], Embedding.from_names(["1#0"]) if embeds else None)
    with pytest.raises(EngineFailed, match="was told to end"):
        bench.step(output("9#0", [], 2), output("1#0", [], 2))
    assert bench.outputs == [] and 1 in bench.engine._held


def test_a_core_that_is_half_awake_is_given_up() -> None:
    bench = Bench()
    bench.engine.sleep()
    bench.hold(1)
    died: list[BaseException | None] = []
    bench.engine.on_death = lambda: died.append(bench.engine.fatal)
    with pytest.raises(Broken):
        bench.engine.wake()
    [cause] = died
    assert isinstance(cause, Broken)
    assert bench.outputs == [], "what it held goes on elsewhere"
    with pytest.raises(WorkerLost):
        bench.hold(2)
    calls = len(bench.core.calls)
    with pytest.raises(LoadError, match="being restarted"):
        bench.engine.wake()
    assert len(bench.core.calls) == calls
