"""The engine on a GPU: the same text, in company too, and memory on its own GPU only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.errors import LoadError
from tests.unit.engines.harness import PROMPTS, Harness, reference
from tests.unit.engines.text.test_structured_output import DIGITS, JSON
from tests.unit.engines.transformers.pooling_models.test_embedding import (
    TEXTS,
    bert,
    qwen3,
    submit,
)
from tests.unit.engines.transformers.test_engine_load import (
    FAMILIES,
    write_family,
    write_long_rope,
)

Make = Callable[..., Harness]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]
#: A small cache: the default takes nine tenths of the GPU.
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 64 * 2**20}


@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_greedy_in_a_crowd_is_what_generate_says(
    harness: Make, tiny_model: Path, attention: str | None
) -> None:
    one = harness(device="cuda", dtype="float32", options=OPTIONS | {"attention": attention})
    assert isinstance(one.engine._runner, ContinuousRunner)
    expected = reference(tiny_model, PROMPTS, 24)
    jobs = []
    for seed, prompt in enumerate(PROMPTS):
        jobs.append(one.submit(prompt, max_tokens=24, ignore_eos=True))
        one.submit(prompt, temperature=1.0, top_p=0.9, seed=seed, presence_penalty=1.0)
    assert [one.tokens(job) for job in jobs] == expected


def test_other_families_say_there_what_generate_says(harness: Make, tmp_path: Path) -> None:
    for family in (*FAMILIES, "LongRoPE"):
        folder = tmp_path / family.replace(" ", "-")
        if family == "LongRoPE":
            write_long_rope(folder)
        else:
            write_family(folder, family)
        one = harness(folder, device="cuda", dtype="float32", options=OPTIONS)
        expected = reference(folder, PROMPTS[4:5], 16)
        assert [one.generate(PROMPTS[4], max_tokens=16, ignore_eos=True)] == expected, family
        one.close()


def test_a_seed_draws_the_same_as_on_the_cpu(harness: Make, tiny: Harness) -> None:
    one = harness(device="cuda", dtype="float32", options=OPTIONS)
    for seed in range(5):
        params: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "seed": seed, "max_tokens": 12}
        assert one.generate(PROMPTS[0], **params) == tiny.generate(PROMPTS[0], **params)


def test_grammars_biases_and_log_probabilities_are_as_on_the_cpu(
    harness: Make, tiny: Harness
) -> None:
    one = harness(device="cuda", dtype="float32", options=OPTIONS)
    asked: list[dict[str, Any]] = [
        {"grammar": JSON, "max_tokens": 100, "logprobs": 3},
        {"grammar": DIGITS, "temperature": 1.0, "seed": 3, "logprobs": 0},
        {"logit_bias": ((77, 5.0), (60, -100.0)), "max_tokens": 12, "logprobs": 5},
        {"max_tokens": 12},
    ]
    jobs = [one.submit(PROMPTS[0], **params) for params in asked]
    for job, params in zip(jobs, asked, strict=True):
        here = tiny.submit(PROMPTS[0], **params)
        assert one.tokens(job) == tiny.tokens(here)
        found, expected = one.logprobs(job), tiny.logprobs(here)
        assert [each.token for each in found] == [each.token for each in expected]
        assert [each.logprob for each in found] == pytest.approx(
            [each.logprob for each in expected], abs=1e-2
        )


@pytest.mark.parametrize("make_model", [bert, qwen3])
def test_embeddings_are_as_on_the_cpu(
    harness: Make, tmp_path: Path, make_model: Callable[[Path], Path]
) -> None:
    folder = make_model(tmp_path)
    on_gpu, on_cpu = harness(folder, device="cuda", dtype="float32"), harness(folder)
    found = on_gpu.vectors(submit(on_gpu, TEXTS))
    for vector, expected in zip(found, on_cpu.vectors(submit(on_cpu, TEXTS)), strict=True):
        assert vector == pytest.approx(expected, abs=1e-3)
    assert (on_gpu.info.device, on_gpu.info.embedding_size) == ("cuda:0", 32)


def test_bfloat16_runs_and_stays_on_its_gpu(harness: Make) -> None:
    one = harness(device="cuda", dtype="bfloat16", options=OPTIONS)
    assert (one.info.dtype, one.info.device) == ("bfloat16", "cuda:0")
    jobs = [one.submit(prompt, max_tokens=64, ignore_eos=True) for prompt in PROMPTS * 8]
    assert all(len(one.tokens(job)) == 64 for job in jobs)
    for index in range(1, torch.cuda.device_count()):
        assert torch.cuda.memory_reserved(index) == 0


def held() -> tuple[int, int]:
    """Bytes of torch's tensors, and of what torch has reserved, once nothing is left over."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asleep_only_the_context_is_left_and_awake_it_says_the_same(
    harness: Make, batching: str, dtype: str
) -> None:
    empty = held()
    one = harness(device="cuda", dtype=dtype, options=OPTIONS | {"batching": batching})
    before = [one.generate(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    for _ in range(2):
        one.engine.sleep()
        assert held() <= empty
        one.engine.wake()
        assert before == [one.generate(p, max_tokens=24, ignore_eos=True) for p in PROMPTS]


def test_embeddings_sleep(harness: Make, tmp_path: Path) -> None:
    empty = held()
    one = harness(bert(tmp_path), device="cuda", dtype="float32")
    before = one.vectors(submit(one, TEXTS))
    one.engine.sleep()
    assert held() <= empty
    one.engine.wake()
    assert one.vectors(submit(one, TEXTS)) == before


def test_without_room_it_sleeps_on_and_wakes_later(harness: Make) -> None:
    empty = held()
    one = harness(device="cuda", dtype="float32", options=OPTIONS)
    before = one.generate(PROMPTS[0], max_tokens=12)
    one.engine.sleep()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(LoadError, match="no room"):
            one.engine.wake()
        assert held() <= empty
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    one.engine.wake()
    assert one.generate(PROMPTS[0], max_tokens=12) == before


def test_it_keeps_to_its_share(harness: Make) -> None:
    share = 2 * 2**30
    one = harness(device="cuda", dtype="float32", memory_bytes=share)
    try:
        jobs = [one.submit(prompt, max_tokens=64, ignore_eos=True) for prompt in PROMPTS * 8]
        assert all(len(one.tokens(job)) == 64 for job in jobs)
        assert torch.cuda.memory_reserved() <= share
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(share, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.model
def test_smollm2_fills_the_gpu_with_cache_and_serves(harness: Make, smollm2: Path) -> None:
    one = harness(smollm2, device="cuda", dtype="bfloat16")
    assert one.info.kv_cache_bytes > 2**30
    prompts = ["Once upon a time", "The capital of France is"] * 64
    jobs = [one.submit(prompt, max_tokens=64, temperature=1.0) for prompt in prompts]
    assert all(one.tokens(job) for job in jobs)
