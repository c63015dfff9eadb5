"""Adapters on a GPU: the same text as PEFT's on the CPU, and the memory given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engines.harness import PROMPTS, Harness
from tests.unit.engines.transformers.lora import making
from tests.unit.engines.transformers.lora.conftest import Answers
from tests.unit.engines.transformers.lora.test_manager import GREEDY, ask

Make = Callable[..., Harness]
NAMES = sorted(making.MODES)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]
#: A small cache: the default takes nine tenths of the GPU.
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 64 * 2**20}


def all_of(adapters: dict[str, Path]) -> tuple[Any, ...]:
    return tuple(making.spec(folder) for folder in map(adapters.__getitem__, NAMES))


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_all_together_say_what_peft_says_on_the_cpu(
    harness: Make, adapters: dict[str, Path], answers: Answers, batching: str
) -> None:
    options = OPTIONS | {"batching": batching}
    one = harness(device="cuda", dtype="float32", options=options, adapters=all_of(adapters))
    assert not one.info.refused_adapters
    jobs = [
        (name, turn, one.submit(prompt, adapter=name, **GREEDY))
        for turn, prompt in enumerate(PROMPTS)
        for name in ("", *NAMES)
    ]
    wrong = [(n, turn) for n, turn, job in jobs if one.tokens(job) != answers(n)[turn]]
    assert not wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_all_are_verified(
    harness: Make, adapters: dict[str, Path], dtype: str
) -> None:
    one = harness(device="cuda", dtype=dtype, options=OPTIONS, adapters=all_of(adapters))
    assert not one.info.refused_adapters
    assert {info.name: info.mode for info in one.info.adapters} == making.MODES
    print({info.name: info.figures for info in one.info.adapters})


def test_loads_and_unloads_give_the_memory_back(harness: Make, adapters: dict[str, Path]) -> None:
    one = harness(device="cuda", dtype="float32", options=OPTIONS)
    for turn in range(3):
        for name in NAMES:
            one.engine.load_adapter(making.spec(adapters[name]))
            ask(one, name, PROMPTS[0])
        for name in NAMES:
            one.engine.unload_adapter(name)
        one.generate(PROMPTS[0], **GREEDY)
        one.until_idle()
        if turn == 0:  # by now the libraries have made what they keep
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    for index in range(1, torch.cuda.device_count()):
        assert torch.cuda.memory_reserved(index) == 0


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_asleep_only_the_context_is_left_and_awake_the_text_is_the_same(
    harness: Make, adapters: dict[str, Path], batching: str
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    empty = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    options = OPTIONS | {"batching": batching}
    one = harness(device="cuda", dtype="float32", options=options, adapters=all_of(adapters))
    asked = [(prompt, name) for prompt in PROMPTS for name in ("", *NAMES)]

    def said() -> list[list[int]]:
        jobs = [one.submit(prompt, adapter=name, **GREEDY) for prompt, name in asked]
        return [one.tokens(job) for job in jobs]

    before = said()
    for _ in range(2):
        one.engine.sleep()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) <= empty
        one.engine.wake()
        assert said() == before
    name = next(iter(adapters))
    one.engine.unload_adapter(name)
    one.engine.load_adapter(making.spec(adapters[name]))
    assert said() == before
