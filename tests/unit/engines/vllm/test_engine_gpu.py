"""The vLLM engine on a GPU: a tiny random model, its real core."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servekit.engines.base import EmbedJob
from servekit.engines.vllm.engine import VllmEngine
from servekit.engines.vllm.probing import Probes
from servekit.errors import LoadError, RequestError
from servekit.wire.adapters import AdapterSpec
from servekit.wire.messages import Grammar
from tests.unit.engines import test_pooling as pooling
from tests.unit.engines.harness import PROMPTS, Harness, make_spec, write_tiny_llama

GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
KINDS = ("lora", "rslora", "boft")
GIB = 2**30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", hidden_size=256)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.unit.engines.adapters import making

    there = tmp_path_factory.mktemp("adapters")
    configs = making.configs()
    return {
        kind: making.write(folder, there / kind, configs[kind]) for kind in configs if kind in KINDS
    }


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Harness]:
    pytest.importorskip("vllm")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # as the supervisor pins it
    options = {"enforce_eager": True, "max_loras": 2, "slots": 64}
    spec = make_spec(
        folder,
        engine="vllm",
        device="cuda",
        options=options,
        memory_bytes=8 * GIB,
        sleeps=True,
    )
    shared = Harness(spec, VllmEngine)
    yield shared
    shared.close()


def held_bytes() -> int:
    """What all processes hold on the first GPU, this test's own apart."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.check_output(query, text=True)) * 2**20


def test_it_says_what_it_is(engine: Harness) -> None:
    info = engine.info
    assert (info.max_context, info.slots, info.sleeps) == (512, 64, True)
    assert {"generate", "grammar", "logprobs", "adapters"} <= set(info.serves)
    assert held_bytes() < 9 * GIB


def test_many_at_once_and_alone(engine: Harness) -> None:
    alone = [engine.generate(prompt, **GREEDY) for prompt in PROMPTS]
    jobs = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS * 8]
    together = [engine.tokens(job) for job in jobs]
    same = sum(a == b for a, b in zip(together, alone * 8, strict=True))
    assert same >= len(together) * 0.8  # bfloat16: up to near-ties
    assert all(len(engine.tokens(job)) == 24 for job in jobs)


@pytest.mark.parametrize("at", [1, 7, 23])
def test_a_continuation_goes_on(engine: Harness, at: int) -> None:
    job = engine.submit(PROMPTS[0], **GREEDY)
    ids = engine.tokens(job)
    again = engine.submit(PROMPTS[0], emitted=ids[:at], **GREEDY)
    assert len(engine.tokens(again)) == 24 - at


def test_a_seed_repeats(engine: Harness) -> None:
    asked = GREEDY | {"temperature": 1.5, "seed": 7}
    first = engine.tokens(engine.submit(PROMPTS[1], **asked))
    assert engine.tokens(engine.submit(PROMPTS[1], **asked)) == first
    assert engine.tokens(engine.submit(PROMPTS[1], **(asked | {"seed": 8}))) != first


@pytest.mark.parametrize("at", [1, 7, 23])
def test_a_seed_goes_on_with_the_noise_that_it_would_have_had(engine: Harness, at: int) -> None:
    """So hot that noise alone decides, which no rounding changes."""
    asked = GREEDY | {"temperature": 1000.0, "seed": 7}
    whole = engine.tokens(engine.submit(PROMPTS[1], **asked))
    assert len(set(whole)) > 12
    jobs = [engine.submit(PROMPTS[1], emitted=whole[:at], **asked) for _ in range(3)]
    assert [engine.tokens(job) for job in jobs] == [whole[at:]] * 3
    other = engine.submit(PROMPTS[1], emitted=whole[:at], **(asked | {"seed": 8}))
    assert engine.tokens(other) != whole[at:]


def test_a_seed_goes_on_behind_a_long_prompt_and_in_a_crowd(engine: Harness) -> None:
    """A prompt that is read in parts draws for each, and takes it back."""
    prompt = (engine.engine.codec.encode("".join(PROMPTS)) * 8)[:400]
    asked = GREEDY | {"temperature": 1000.0, "seed": 5}
    whole = engine.tokens(engine.submit(prompt, **asked))
    crowd = [engine.submit(prompt[:-one], **asked) for one in range(1, 40)]
    again = [engine.submit(prompt, emitted=whole[:at], **asked) for at in (0, 3, 11)]
    assert [engine.tokens(job) for job in again] == [whole, whole[3:], whole[11:]]
    assert all(len(engine.tokens(job)) == 24 for job in crowd)


def test_a_grammar_is_kept_to_and_gone_on_with(engine: Harness) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    job = engine.submit("x", max_tokens=200, grammar=grammar)
    ids = engine.tokens(job)
    assert json.loads(engine.text(job)).keys() == {"a"}
    for at in (1, len(ids) // 2, len(ids) - 1):
        rest = engine.submit("x", emitted=ids[:at], max_tokens=200, grammar=grammar)
        whole = ids[:at] + engine.tokens(rest)
        assert json.loads(engine.engine.codec.decoder().push(whole)).keys() == {"a"}


def test_a_regular_expression_and_a_lark_grammar(engine: Harness) -> None:
    for grammar in (Grammar("regex", "(yes|no)"), Grammar("lark", 'start: "yes" | "no"')):
        assert engine.text(engine.submit("x", max_tokens=20, grammar=grammar)) in ("yes", "no")


def test_logprobs(engine: Harness) -> None:
    job = engine.submit("x", logprobs=3, **GREEDY)
    engine.tokens(job)
    told = [one for output in engine.outputs[job] for one in output.logprobs or ()]
    assert len(told) == 24 and all(len(one.best) == 3 for one in told)
    assert all(one.logprob == pytest.approx(one.best[0][1]) for one in told)  # greedy


def test_a_cancelled_request_brings_nothing_more(engine: Harness) -> None:
    job = engine.submit(PROMPTS[0], max_tokens=400, ignore_eos=True)
    engine.until(lambda: bool(engine.outputs.get(job)), "it began")
    engine.engine.cancel(job)
    engine.generate("x", **GREEDY)
    engine.until(lambda: engine.engine.load_now().running == 0, "it is idle")
    assert sum(len(output.token_ids) for output in engine.outputs[job]) < 400
    assert engine.outputs[job][-1].finish is None


def test_nothing_comes_once_a_cancellation_has_returned(engine: Harness) -> None:
    jobs = [engine.submit(prompt, max_tokens=200, ignore_eos=True) for prompt in PROMPTS * 8]
    engine.until(lambda: jobs[-1] in engine.outputs, "the last one began")
    counts = {}
    for job in jobs:
        engine.engine.cancel(job)
        counts[job] = len(engine.outputs.get(job, ()))
    engine.generate("x", **GREEDY)
    assert {job: len(engine.outputs.get(job, ())) for job in jobs} == counts


def test_what_it_cannot_do_harms_nobody(engine: Harness) -> None:
    for bad in ([], [10**6]):
        with pytest.raises(RequestError):
            engine.submit(bad, **GREEDY)
    with pytest.raises(RequestError):
        engine.submit("x" * 2000, **GREEDY)
    assert engine.generate("x", **GREEDY)


def test_adapters_come_and_go(engine: Harness, adapters: dict[str, Path]) -> None:
    base = engine.generate(PROMPTS[0], **GREEDY)
    info = engine.engine.load_adapter(AdapterSpec("a", str(adapters["lora"]), any_base=True))
    assert info.kind == "LORA" and info.figures["effect"] > 0
    both = [engine.submit(PROMPTS[0], adapter=name, **GREEDY) for name in ("a", "", "a")]
    said = [engine.tokens(job) for job in both]
    assert said[0] == said[2] != said[1] == base
    with pytest.raises(RequestError, match="this one is BOFT"):
        engine.engine.load_adapter(AdapterSpec("b", str(adapters["boft"]), any_base=True))
    engine.engine.unload_adapter("a")
    with pytest.raises(RequestError):
        engine.submit("x", adapter="a", **GREEDY)


def test_an_adapter_finds_nothing_in_the_cache_of_another_one_of_its_name(
    engine: Harness, adapters: dict[str, Path]
) -> None:
    prompt = PROMPTS[0] * 8  # several blocks of the cache
    said = []
    for name, kind in (("a", "lora"), ("a", "rslora"), ("fresh", "rslora")):
        engine.engine.load_adapter(AdapterSpec(name, str(adapters[kind]), any_base=True))
        said.append(engine.tokens(engine.submit(prompt, adapter=name, **GREEDY)))
        engine.engine.unload_adapter(name)
    assert said[0] != said[1] == said[2]


def test_asleep_the_memory_is_given_back(engine: Harness) -> None:
    before, text = held_bytes(), engine.generate(PROMPTS[0], **GREEDY)
    engine.engine.sleep()
    asleep = held_bytes()
    engine.engine.wake()
    print({"before": before, "asleep": asleep, "after": held_bytes()})
    assert asleep < before - 4 * GIB
    assert engine.generate(PROMPTS[0], **GREEDY) == text


def test_without_room_it_sleeps_on_and_wakes_when_there_is_some(engine: Harness) -> None:
    text = engine.generate(PROMPTS[0], **GREEDY)
    engine.engine.sleep()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - GIB // 2, dtype=torch.uint8, device="cuda")  # by somebody else
    for _ in range(2):
        with pytest.raises(LoadError, match="too little free memory to wake it"):
            engine.engine.wake()
    assert engine.engine.fatal is None
    del taken
    torch.cuda.empty_cache()
    engine.engine.wake()
    assert engine.generate(PROMPTS[0], **GREEDY) == text


def test_an_unanswered_probe_leaves_nothing_in_the_core(engine: Harness) -> None:
    probes = Probes(engine.engine._core, patience_s=0.0)
    for _ in range(8):
        with pytest.raises(LoadError, match="did not answer a probe"):
            probes.scores([1, 2, 3], 0)
    assert engine.generate("x", **GREEDY)
    assert engine.engine.load_now().running == 0


def test_thousands_of_texts_are_embedded_and_a_cancelled_job_is_not_heard_of(
    tmp_path: Path,
) -> None:
    path = write_tiny_llama(tmp_path / "embedder", hidden_size=256)
    pooling.write(path, {"word_embedding_dimension": 256, "pooling_mode_lasttoken": True})
    options = {"enforce_eager": True, "slots": 64, "kv_cache_bytes": 2**28}
    spec = make_spec(path, engine="vllm", device="cuda", options=options, memory_bytes=4 * GIB)
    one = Harness(spec, VllmEngine)
    try:
        assert one.info.embedding_size == 256
        texts = [[5 + n % 100, 7, 9] for n in range(2048)]
        for job_id in (1, 2, 3):
            one.engine.embed(EmbedJob(job_id, texts))
        one.engine.cancel(2)
        one.until(lambda: one.ended(1) and one.ended(3), "they are embedded")
        first, third = one.outputs[1][0].vectors or [], one.outputs[3][0].vectors or []
        assert len(first) == len(third) == 2048 and 2 not in one.outputs
        numbers = np.stack([np.frombuffer(vector, "<f4") for vector in first])
        np.testing.assert_allclose(numbers[:100], numbers[100:200], atol=0.02)
        assert np.abs(numbers[0] - numbers[1]).max() > 0.02
        assert one.engine.load_now().running == one.engine.load_now().waiting == 0
    finally:
        one.close()


def test_a_core_that_dies_is_noticed(folder: Path) -> None:
    options = {"enforce_eager": True, "slots": 8, "kv_cache_bytes": 2**28}
    spec = make_spec(folder, engine="vllm", device="cuda", options=options, memory_bytes=4 * GIB)
    one = Harness(spec, VllmEngine)
    try:
        job = one.submit(PROMPTS[0], max_tokens=450, ignore_eos=True)
        one.until(lambda: bool(one.outputs.get(job)), "it began")
        for process in one.engine._core._client.resources.engine_manager.processes:
            process.kill()
        one.until(lambda: one.outputs[job][-1].error is not None, "it was told")
        assert one.engine.fatal is not None
    finally:
        one.close()
