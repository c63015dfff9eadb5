"""Over two GPUs: one GPU's text, and each rank's memory on its own GPU only."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.system.gpu.gpus import gpu_memory_by_pid
from tests.unit.engines.harness import PROMPTS, Harness, reference

Opened = Callable[..., AbstractContextManager[Harness]]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CUDA: dict[str, Any] = {"device": "cuda", "dtype": "float32", "options": {"kv_cache_bytes": 2**26}}


def said(one: Harness) -> list[list[int]]:
    jobs = [one.submit(prompt, max_tokens=24, ignore_eos=True) for prompt in PROMPTS]
    return [one.tokens(job) for job in jobs]


def test_ranks_say_what_one_says_and_each_is_on_its_own_gpu(even: Path, two_ranks: Opened) -> None:
    expected = reference(even, PROMPTS, 24)
    with two_ranks(even, **CUDA) as one:
        assert said(one) == expected
        held = gpu_memory_by_pid()
        ranks = one.engine._ranks
        assert ranks is not None
        gpus = [set(held.get(pid, {})) for pid in (os.getpid(), *ranks.pids)]
        assert [len(each) for each in gpus] == [1, 1]
        assert gpus[0] != gpus[1]
        one.engine.sleep()
        assert torch.cuda.memory_reserved() == 0
        one.engine.wake()
        assert said(one) == expected


def test_layers_over_two_say_what_one_says(even: Path, harness: Callable[..., Harness]) -> None:
    expected = reference(even, PROMPTS, 24)
    one = harness(even, gpus=2, parallel="device_map", **CUDA)
    assert said(one) == expected
    assert "layers over 2 GPUs" in one.info.detail
    one.engine.sleep()
    assert [torch.cuda.memory_reserved(index) for index in range(2)] == [0, 0]
    one.engine.wake()
    assert said(one) == expected
