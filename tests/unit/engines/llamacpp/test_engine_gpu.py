"""llama.cpp on a GPU, where its binding is built for one: SmolLM2, against itself on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from servekit.engines.llamacpp.library.bindings import open_binding
from tests.unit.engines.conftest import SMOLLM2, llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.llamacpp.test_engine_smollm2 import (
    QUESTIONS,
    ask,
    assert_same_but_for_near_ties,
)

GIB = 2**30


def gpus() -> int:
    library = open_binding("auto").library
    return len(library.free_bytes()) if library.call("llama_supports_gpu_offload") else 0


pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module", autouse=True)
def with_a_gpu() -> None:
    """Asked when the tests run: to ask is to initialise CUDA."""
    if not gpus():
        pytest.skip("no GPU, or a llama.cpp without CUDA")


def on_gpu(**fields: object) -> Harness:
    options = {"cache_type": "f16", "flash_attention": "auto"}
    return llamacpp(SMOLLM2, options, device="cuda", **fields)


@pytest.fixture(scope="module")
def engine() -> Iterator[Harness]:
    shared = on_gpu()
    yield shared
    shared.close()


def test_all_layers_are_there(engine: Harness) -> None:
    assert "31 layers on the GPU" in engine.info.detail
    assert engine.info.device == "cuda:0"


def test_it_says_what_it_says_on_the_cpu(engine: Harness) -> None:
    on_cpu = llamacpp(SMOLLM2, {"cache_type": "f16", "flash_attention": "auto"})
    try:
        for question in QUESTIONS:
            prompt = ask(engine, question)
            texts = [
                one.generate(prompt, max_tokens=24, ignore_eos=True) for one in (engine, on_cpu)
            ]
            assert_same_but_for_near_ties(on_cpu, prompt, texts[1], texts[0])
    finally:
        on_cpu.close()


def test_alone_and_in_a_batch(engine: Harness) -> None:
    prompts = [ask(engine, question) for question in QUESTIONS]
    alone = [engine.generate(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    jobs = [engine.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    for prompt, job, one in zip(prompts, jobs, alone, strict=True):
        assert_same_but_for_near_ties(engine, prompt, one, engine.tokens(job))


def test_it_keeps_within_its_memory() -> None:
    library = open_binding("auto").library
    before = library.free_bytes()[0]
    one = on_gpu(memory_bytes=2 * GIB)
    try:
        one.generate(ask(one, QUESTIONS[0]))
        assert before - library.free_bytes()[0] <= 2 * GIB
    finally:
        one.close()


@pytest.mark.parametrize("split", ["layer", "row"])
def test_two_gpus_say_what_one_says(engine: Harness, split: str) -> None:
    if gpus() < 2:
        pytest.skip("one GPU")
    options = {"cache_type": "f16", "flash_attention": "auto", "split": split}
    spread = llamacpp(SMOLLM2, options, device="cuda", gpus=2)
    try:
        prompt = ask(engine, QUESTIONS[6])
        texts = [one.generate(prompt, max_tokens=24, ignore_eos=True) for one in (engine, spread)]
        assert_same_but_for_near_ties(engine, prompt, *texts)
    finally:
        spread.close()
