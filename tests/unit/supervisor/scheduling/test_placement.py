"""Placement: a pure function, so every rule is a table, and the rest is hypothesis."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config.schema import ModelConfig
from servekit.errors import ConfigError
from servekit.supervisor.scheduling.memory_requests import Assignment, Misplaced, least
from servekit.supervisor.scheduling.placement import allowed, place
from servekit.system.gpu.gpus import Gpu


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"GPU-{i:04x}", "H200", 10, 10) for i in range(count))


def model(name: str, **keys: object) -> ModelConfig:
    given = {"name": name, "path": "x", "engine": "transformers", **keys}
    return ModelConfig.model_validate(given)


def shares(placed: tuple[Assignment, ...]) -> dict[str, list[int | str]]:
    found: dict[str, list[int | str]] = {}
    for one in placed:
        found.setdefault(one.model, []).append(one.gpus[0].index if one.gpus else "cpu")
    return found


@pytest.mark.parametrize(
    ("models", "count", "expected"),
    [
        ([model("a")], 0, {"a": ["cpu"]}),
        ([model("a")], 4, {"a": [0, 1, 2, 3]}),
        ([model("a", device="cpu")], 4, {"a": ["cpu"]}),
        ([model("a", device="cpu", replicas=3)], 1, {"a": ["cpu"] * 3}),
        ([model("a", engine="echo", replicas=3)], 1, {"a": ["cpu"] * 3}),
        ([model("a", engine="echo", device="cuda")], 2, {"a": [0, 1]}),
        ([model("a", replicas=1), model("b")], 4, {"a": [0], "b": [1, 2, 3]}),
        ([model("a"), model("b", replicas=3)], 4, {"a": [0], "b": [1, 2, 3]}),
        ([model("a", gpus=["GPU-0001"]), model("b")], 2, {"a": [1], "b": [0]}),
        ([model("a"), model("b", gpus=[0], replicas=1)], 2, {"a": [1], "b": [0]}),
        ([model("a", gpus=[0, 1]), model("b", gpus=[0], replicas=1)], 2, {"a": [1], "b": [0]}),
    ],
)
def test_places(
    models: list[ModelConfig], count: int, expected: dict[str, list[int | str]]
) -> None:
    assert shares(place(models, gpus(count), 8)) == expected


def test_auto_models_share_evenly() -> None:
    sizes = Counter(one.model for one in place([model("a"), model("b")], gpus(5), 8))
    assert sorted(sizes.values()) == [2, 3]


@pytest.mark.parametrize(
    ("models", "count", "loc", "words"),
    [
        (
            [model("a", replicas=3)],
            2,
            ("models", 0, "replicas"),
            "need 3 GPUs (a 3) and there are 2",
        ),
        (
            [model("a", replicas=2), model("b")],
            2,
            ("models", 1, "replicas"),
            "need 3 GPUs (a 2, b 1) and there are 2: 1 too few",
        ),
        ([model("a", device="cuda")], 0, ("models", 0, "device"), "no NVIDIA GPU was found"),
        ([model("a", gpus=[0, 7])], 2, ("models", 0, "gpus", 1), "'a' asks for GPU 7"),
        ([model("a", gpus=["GPU-00"])], 2, ("models", 0, "gpus", 0), "asks for GPU 'GPU-00'"),
        ([model("a", gpus=[0])], 0, ("models", 0, "gpus", 0), "no GPU at all"),
        ([model("a", gpus=[0], device="cpu")], 2, ("models", 0, "gpus"), "asks for device: cpu"),
        ([model("a", gpus=[0], replicas=2)], 2, ("models", 0, "replicas"), "`gpus` names 1"),
        ([model("a", gpus=[0]), model("b", gpus=[0])], 2, ("models", 1, "gpus"), "leave it fewer"),
    ],
)
def test_refuses_with_reason_and_place(
    models: list[ModelConfig], count: int, loc: tuple[object, ...], words: str
) -> None:
    with pytest.raises(Misplaced) as caught:
        place(models, gpus(count), 8)
    assert words in caught.value.message
    assert caught.value.loc == loc
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("cpus", "replicas", "threads"), [(2, 1, 1), (1, 1, 1), (9, 2, 4), (2, 8, 1), (64, 1, 63)]
)
def test_cpu_workers_divide_the_cores(cpus: int, replicas: int, threads: int) -> None:
    placed = place([model("a", replicas=replicas)], (), cpus)
    assert [one.threads for one in placed] == [threads] * replicas


@st.composite
def files(draw: st.DrawFn) -> tuple[list[ModelConfig], int]:
    count = draw(st.integers(1, 6))
    names = draw(st.integers(1, 5))
    some = st.none() | st.lists(st.integers(0, count - 1), min_size=1, max_size=count)
    replicas = st.just("auto") | st.integers(1, 4)
    models = [model(f"m{i}", gpus=draw(some), replicas=draw(replicas)) for i in range(names)]
    return models, count


def can_be_placed(models: list[ModelConfig], count: int) -> bool:
    """By exhaustion: whether every model can have its least number of GPUs of its own."""
    slots = [
        set(range(count)) if m.gpus is None else {int(g) for g in m.gpus}
        for m in models
        for _ in range(least(m))
    ]

    def fill(index: int, taken: frozenset[int]) -> bool:
        if index == len(slots):
            return True
        return any(fill(index + 1, taken | {gpu}) for gpu in slots[index] - taken)

    return len(slots) <= count and fill(0, frozenset())


@given(files())
def test_a_gpu_has_one_holder_and_whatever_can_be_placed_is(
    file: tuple[list[ModelConfig], int],
) -> None:
    models, count = file
    try:
        placed = place(models, gpus(count), 8)
    except Misplaced:
        assert not can_be_placed(models, count)
        return
    held = [gpu for one in placed for gpu in one.gpus]
    assert len(held) == len(set(held)) == len(placed)
    assert len({one.name for one in placed}) == len(placed)
    for one in models:
        own = [gpu.index for p in placed if p.model == one.name for gpu in p.gpus]
        assert own == sorted(own)
        assert one.gpus is None or set(own) <= set(one.gpus)
        assert len(own) >= 1 if one.replicas == "auto" else len(own) == one.replicas


@given(st.integers(1, 5), st.integers(5, 12))
def test_unrestricted_auto_models_take_all_and_differ_by_one_at_most(
    names: int, count: int
) -> None:
    placed = place([model(f"m{i}") for i in range(names)], gpus(count), 8)
    sizes = Counter(one.model for one in placed).values()
    assert len(placed) == count
    assert max(sizes) - min(sizes) <= 1


def test_a_gpu_that_is_named_twice_is_one() -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "H200", 100, 100) for i in range(2))
    twice = model("a", gpus=[1, "GPU-1", 0], device="cuda")
    assert allowed(0, twice, gpus) == (gpus[1], gpus[0])
