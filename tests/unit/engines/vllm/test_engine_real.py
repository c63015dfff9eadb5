"""The vLLM engine with its real core: a tiny random model, on a GPU or by a build for CPUs.

`python -m tests.vllm_cpu` runs these where there is no GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from servekit.config.engines.installed import is_there
from servekit.config.engines.options import KINDS
from servekit.engines.api.base import EmbedJob
from servekit.engines.vllm import library
from servekit.engines.vllm.engine import VllmEngine
from servekit.engines.vllm.probes import Probes
from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import Grammar, WorkerSpec
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    assert_dead_end_is_its_own,
    make_spec,
    reference,
    write_tiny_llama,
)
from tests.unit.engines.transformers.pooling_models import test_logit_score as causal
from tests.unit.engines.transformers.pooling_models import test_pooling as pooling

GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
ADAPTERS = ("lora", "rslora", "boft")
GIB = 2**30
ON_CPU = KINDS["vllm"].is_for_cpus
pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.timeout(900),  # three processes import vLLM: minutes on a busy machine
    pytest.mark.skipif(
        not is_there("vllm") or not (ON_CPU or torch.cuda.is_available()),
        reason="no vLLM, or no GPU for it",
    ),
]
needs_gpu = pytest.mark.skipif(ON_CPU, reason="of GPU memory")


def spec_of(path: Path, slots: int, claim: int = 4 * GIB, **options: Any) -> WorkerSpec:
    """As the supervisor makes it, of a model that may take `claim` bytes of a GPU."""
    for name, value in KINDS["vllm"].env.items():
        os.environ.setdefault(name, value)
    if ON_CPU:
        return make_spec(path, engine="vllm", options={"slots": slots} | options)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    options = {"enforce_eager": True, "slots": slots} | options
    fields: dict[str, Any] = {"device": "cuda", "memory_bytes": claim, "sleeps": True}
    return make_spec(path, engine="vllm", options=options, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny", hidden_size=256)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.unit.engines.transformers.lora import making

    there = tmp_path_factory.mktemp("adapters")
    configs = making.configs()
    return {
        kind: making.write(folder, there / kind, configs[kind])
        for kind in configs
        if kind in ADAPTERS
    }


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Harness]:
    shared = Harness(spec_of(folder, 64, 8 * GIB, max_loras=2), VllmEngine)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def even(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A model that finds all tokens nearly alike: noise decides, which no rounding changes."""
    path = tmp_path_factory.mktemp("even") / "even"
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 1e-4
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    shared = Harness(spec_of(path, 64, kv_cache_bytes=2**28, max_batch_tokens=512), VllmEngine)
    yield shared
    shared.close()


def held_bytes() -> int:
    """What all processes hold on the first GPU, this test's own apart."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.check_output(query, text=True)) * 2**20


def test_it_says_what_it_is(engine: Harness) -> None:
    info = engine.info
    assert (info.max_context, info.slots, info.sleeps) == (512, 64, not ON_CPU)
    assert {"generate", "grammar", "logprobs", "adapters"} <= set(info.serves)
    assert info.device == ("cpu" if ON_CPU else "cuda")
    assert ON_CPU or held_bytes() < 9 * GIB


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
def test_a_seed_goes_on_with_the_noise_that_it_would_have_had(even: Harness, at: int) -> None:
    asked = GREEDY | {"temperature": 1.0, "seed": 7}
    whole = even.tokens(even.submit(PROMPTS[1], **asked))
    assert len(set(whole)) > 12
    jobs = [even.submit(PROMPTS[1], emitted=whole[:at], **asked) for _ in range(3)]
    assert [even.tokens(job) for job in jobs] == [whole[at:]] * 3
    other = even.submit(PROMPTS[1], emitted=whole[:at], **(asked | {"seed": 8}))
    assert even.tokens(other) != whole[at:]


def test_a_seed_goes_on_behind_a_long_prompt_and_in_a_crowd(even: Harness) -> None:
    """A prompt that is read in parts draws for each, and takes it back."""
    prompt = (even.engine.codec.encode("".join(PROMPTS)) * 8)[:400]
    asked = GREEDY | {"temperature": 1.0, "seed": 5}
    whole = even.tokens(even.submit(prompt, **asked))
    crowd = [even.submit(prompt[:-one], **asked) for one in range(1, 40)]
    again = [even.submit(prompt, emitted=whole[:at], **asked) for at in (0, 3, 11)]
    assert [even.tokens(job) for job in again] == [whole, whole[3:], whole[11:]]
    assert all(len(even.tokens(job)) == 24 for job in crowd)


def test_a_seed_goes_on_beside_requests_without_one(even: Harness) -> None:
    asked = GREEDY | {"temperature": 1.0, "seed": 5}
    whole = even.tokens(even.submit(PROMPTS[1], **asked))
    beside = [even.submit(PROMPTS[2], **(GREEDY | {"temperature": t})) for t in (0.0, 1.0) * 8]
    again = [even.submit(PROMPTS[1], emitted=whole[:at], **asked) for at in (0, 3, 11)]
    assert [even.tokens(job) for job in again] == [whole, whole[3:], whole[11:]]
    assert all(len(even.tokens(job)) == 24 for job in beside)


def test_greedy_text_is_that_of_transformers(engine: Harness, folder: Path) -> None:
    said = [engine.generate(prompt, **GREEDY) for prompt in PROMPTS]
    expected = reference(folder, PROMPTS, 24)
    same = sum(a == b for a, b in zip(said, expected, strict=True))
    begun = sum(a[:2] == b[:2] for a, b in zip(said, expected, strict=True))
    assert (same if ON_CPU else begun) == len(PROMPTS)  # on GPUs in bfloat16: up to near-ties


@pytest.mark.parametrize(
    ("penalties", "others"),
    [
        ({"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}),
        ({"presence_penalty": 2.0}, {"presence_penalty": -2.0}),
        (
            {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
            {"presence_penalty": 2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
        ),
    ],
)
def test_penalties_count_what_another_worker_said(
    even: Harness, penalties: dict[str, Any], others: dict[str, Any]
) -> None:
    """The noise is the same, so that the penalties alone could make another text.

    Tokens that come again count as often as they have come, and once for their presence.
    """
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    whole = even.generate(PROMPTS[0], **asked, **penalties)
    assert whole != even.generate(PROMPTS[0], **asked, **others)
    beside = even.submit(PROMPTS[0], **asked, **penalties)
    jobs = {at: even.submit(PROMPTS[0], whole[:at], **asked, **penalties) for at in (1, 8, 100)}
    for at, job in jobs.items():
        assert even.tokens(job) == whole[at:]
    assert even.tokens(beside) == whole


@pytest.mark.skipif(not ON_CPU, reason="in bfloat16 a near-tie may part the texts")
def test_penalties_count_what_another_worker_said_beside_drafts(folder: Path) -> None:
    if library.vllm_version().startswith("0.30."):
        pytest.skip("this release cannot speculate on a CPU")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    passed = {"speculative_config": drafts}
    one = Harness(spec_of(folder, 8, kv_cache_bytes=2**28, engine_args=passed), VllmEngine)
    try:
        asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "frequency_penalty": -1.5}
        whole = one.generate(PROMPTS[4], **asked)
        assert len(set(whole)) < 120, "tokens come again"
        jobs = {at: one.submit(PROMPTS[4], whole[:at], **asked) for at in (1, 40, 150)}
        assert {at: one.tokens(job) for at, job in jobs.items()} == {at: whole[at:] for at in jobs}
        # a step without drafts, which the first one is
        assert len(one.generate([7, 8], max_tokens=4, temperature=1.0, top_k=5)) <= 4
    finally:
        one.close()


def test_a_prompt_that_begins_alike_is_read_from_the_cache(engine: Harness) -> None:
    prompt = (engine.engine.codec.encode("".join(PROMPTS)) * 8)[:400]
    first = engine.submit(prompt, **GREEDY)
    said = engine.tokens(first)
    again = engine.submit(prompt, **GREEDY)
    assert engine.tokens(again) == said
    assert sum(one.cached_tokens for one in engine.outputs[again]) >= 256


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


def test_an_object_of_a_thousand_members_is_followed(engine: Harness) -> None:
    members = {f"p{number}": {"type": "integer"} for number in range(1000)}
    schema = {"type": "object", "properties": members, "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema))
    job = engine.submit("x", max_tokens=64, grammar=grammar)
    engine.tokens(job)
    if engine.outputs[job][-1].finish == "stop":
        assert isinstance(json.loads(engine.text(job)), dict)


def test_a_grammar_that_grows_too_complex_fails_its_own_request(engine: Harness) -> None:
    assert_dead_end_is_its_own(engine, max_tokens=400)
    assert not engine.engine._followed


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


@needs_gpu
def test_asleep_the_memory_is_given_back(engine: Harness) -> None:
    before, text = held_bytes(), engine.generate(PROMPTS[0], **GREEDY)
    engine.engine.sleep()
    asleep = held_bytes()
    engine.engine.wake()
    print({"before": before, "asleep": asleep, "after": held_bytes()})
    assert asleep < before - 4 * GIB
    assert engine.generate(PROMPTS[0], **GREEDY) == text


@needs_gpu
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


def test_a_causal_reranker_has_the_scores_of_its_card(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "initializer_range": 0.05}
    path = causal.make_reranker(tmp_path / "Qwen3-Reranker-tiny", **sizes)
    spec = structs.replace(spec_of(path, 64, kv_cache_bytes=2**28), dtype="float32")
    one = Harness(spec, VllmEngine)
    try:
        assert one.info.serves == ("score", "instruction", "tokenize", "detokenize")
        for told in ("", causal.INSTRUCTION):
            found = causal.scores(one, causal.submit(one, causal.PAIRS, told=told))
            expected = causal.score_as_the_card(path, causal.PAIRS, told or None)
            assert found == pytest.approx(expected, abs=1e-3)
    finally:
        one.close()
    assert max(expected) - min(expected) > 0.01


def test_thousands_of_texts_are_embedded_and_a_cancelled_job_is_not_heard_of(
    tmp_path: Path,
) -> None:
    path = write_tiny_llama(tmp_path / "embedder", hidden_size=256)
    pooling.write(path, {"word_embedding_dimension": 256, "pooling_mode_lasttoken": True})
    one = Harness(spec_of(path, 64, kv_cache_bytes=2**28), VllmEngine)
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


def group(one: Harness, name: str) -> psutil.Process:
    """A process below this one, by vLLM's name for it: EngineCore, Worker."""
    core = psutil.Process(one.engine._core._client.resources.engine_manager.processes[0].pid)
    processes = [core, *core.children(recursive=True)]
    return next(found for found in processes if name in " ".join(found.cmdline()))


@pytest.mark.parametrize(
    ("victim", "number", "words"),
    [
        ("EngineCore", signal.SIGKILL, r"^vLLM's engine core was killed by SIGKILL\.$"),
        ("EngineCore", signal.SIGTERM, r"^vLLM's engine core (was told to end|ended with exit)"),
        pytest.param(
            "Worker",  # on one GPU the core runs the model itself
            signal.SIGKILL,
            r"^A process of vLLM's that runs the model was killed by SIGKILL\.$",
            marks=pytest.mark.skipif(not ON_CPU, reason="it is the core"),
        ),
    ],
)
def test_a_core_that_dies_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str,
    number: signal.Signals, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")  # is restored at the end
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    monkeypatch.chdir(tmp_path)
    spec = structs.replace(spec_of(folder, 8, kv_cache_bytes=2**28), socket="w1.sock")
    one = Harness(spec, VllmEngine)
    try:
        assert list(Path("w1.sock.d").iterdir()), "the sockets of its processes"
        job = one.submit(PROMPTS[0], max_tokens=450, ignore_eos=True)
        one.until(lambda: bool(one.outputs.get(job)), "it began")
        group(one, victim).send_signal(number)
        killed = time.monotonic()
        one.until_true(lambda: one.engine.fatal is not None)
        assert time.monotonic() - killed < 5.0
        assert re.match(words, str(one.engine.fatal)), one.engine.fatal
        assert not one.ended(job), "it goes on elsewhere"
    finally:
        one.close()
