from __future__ import annotations

import os

import pytest

from servekit.engines.api.cpu_threads import count_threads


@pytest.mark.parametrize(
    ("stated", "threads"), [("3", 3), ("0", 6), ("many", 6), ("", 6), (None, 6)]
)
def test_threads_are_those_stated_or_half_the_cores_and_few_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, stated: str | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert count_threads(None, on_gpu=False) == threads
    assert count_threads(None, on_gpu=True) == 4
    assert count_threads(7, on_gpu=False) == count_threads(7, on_gpu=True) == 7


def test_threads_are_at_least_one_and_at_most_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count_threads(None, on_gpu=False) == count_threads(None, on_gpu=True) == 1
