"""Places for models that share GPUs, come and go, or have several GPUs each."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import (
    Assignment,
    Misplaced,
    claim_bytes,
    least,
    reserve_bytes,
)
from servekit.supervisor.scheduling.placement import place
from servekit.system.gpu.gpus import Gpu, Slot

GIB = 2**30
#: By model, the indexes of each replica's GPUs.
Places = dict[str, list[tuple[int, ...]]]
EACH_ON_BOTH: Places = {"a": [(0,), (1,)], "b": [(0,), (1,)]}


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"GPU-{i:04x}", "H200", 100 * GIB, 100 * GIB) for i in range(count))


def model(name: str, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "path": "x", **keys})


def indexes(placed: tuple[Assignment, ...]) -> Places:
    found: Places = {}
    for one in placed:
        found.setdefault(one.model, []).append(tuple(gpu.index for gpu in one.gpus))
    return found


@pytest.mark.parametrize(
    ("models", "count", "expected"),
    [
        # a GPU of its own where there is one, else side by side
        ([model("a", memory="40%"), model("b", memory="40%")], 1, {"a": [(0,)], "b": [(0,)]}),
        (
            [model("a", memory="40%", replicas=1), model("b", memory="50GiB", replicas=1)],
            2,
            {"a": [(1,)], "b": [(0,)]},
        ),
        # who has no `memory` has the whole GPU; the others share what is left
        (
            [model("a", memory="30%"), model("b", memory="30%"), model("c", replicas=1)],
            2,
            {"a": [(1,)], "b": [(1,)], "c": [(0,)]},
        ),
        # auto takes as many as fit, one on each GPU
        ([model("a", memory="60%"), model("b", memory="30%")], 2, EACH_ON_BOTH),
        # of a number that the file names, more than GPUs where each says what it takes
        ([model("a", memory="30%", replicas=3)], 1, {"a": [(0,), (0,), (0,)]}),
        ([model("a", memory="30%", replicas=4)], 2, {"a": [(0,), (0,), (1,), (1,)]}),
        ([model("a", memory="30%", replicas=3, gpus_per_replica=2)], 2, {"a": [(0, 1)] * 3}),
        (
            [model("a", memory="40%", replicas=2), model("b", memory="60%", replicas=1)],
            2,
            {"a": [(0,), (1,)], "b": [(0,)]},
        ),
        ([model("a", memory="50%", replicas=2, load="on_demand")], 1, {"a": [(0,), (0,)]}),
        # several GPUs for one, neighbours, in pairs
        ([model("a", gpus_per_replica=2)], 4, {"a": [(0, 1), (2, 3)]}),
        ([model("a", gpus_per_replica=2)], 3, {"a": [(0, 1)]}),
        (
            [model("a", replicas=1, gpus=[0]), model("b", replicas=1, gpus_per_replica=2)],
            4,
            {"a": [(0,)], "b": [(2, 3)]},
        ),
        (
            [model("a", gpus_per_replica=2, memory="50%"), model("b", memory="50%", gpus=[1])],
            2,
            {"a": [(0, 1)], "b": [(1,)]},
        ),
        # those that come and go overlap with each other, never with those that stay
        (
            [model("a", load="on_demand"), model("b", load="manual")],
            1,
            {"a": [(0,)], "b": [(0,)]},
        ),
        ([model(n, load="on_demand") for n in "ab"], 2, {"a": [(0,)], "b": [(1,)]}),
        ([model("a"), model("b", load="on_demand")], 3, {"a": [(0,), (2,)], "b": [(1,)]}),
        (
            [model("a", memory="60%"), *(model(n, memory="40%", load="on_demand") for n in "bc")],
            1,
            {"a": [(0,)], "b": [(0,)], "c": [(0,)]},
        ),
    ],
)
def test_places(models: list[ModelConfig], count: int, expected: Places) -> None:
    placed = indexes(place(models, gpus(count), 8))
    assert {name: sorted(slots) for name, slots in placed.items()} == {
        name: sorted(slots) for name, slots in expected.items()
    }


def test_nvlink_goes_before_neighbourhood() -> None:
    some = tuple(replace(gpu, linked=(f"GPU-{(gpu.index + 2) % 4:04x}",)) for gpu in gpus(4))
    placed = indexes(place([model("a", gpus_per_replica=2)], some, 8))
    assert placed == {"a": [(0, 2), (1, 3)]}


def test_what_is_claimed_is_known_of_each_gpu() -> None:
    [one] = place([model("a", memory="25%", gpus_per_replica=2)], gpus(2), 8)
    assert one.claims == (25 * GIB, 25 * GIB)
    [one] = place([model("a")], gpus(1), 8, reserve="2GiB")
    assert one.claims == (98 * GIB,)
    [one] = place([model("a", device="cpu")], gpus(1), 8)
    assert one.claims == ()


@pytest.mark.parametrize(
    ("models", "count", "reserve", "key", "words"),
    [
        (
            [model("a", memory="60GiB"), model("b", memory="50GiB")],
            1,
            "2GiB",
            (1, "memory"),
            "no place was found for b/0 beside the others: it claims 50.0 GiB of GPU "
            "0 (H200), which has 100.0 GiB, less 2.0 GiB reserved, less 60.0 GiB of a: 12.0 GiB "
            "too much",
        ),
        (
            [model("a", memory="99GiB")],
            1,
            "2GiB",
            (0, "memory"),
            "model 'a' claims 99.0 GiB of GPU 0 (H200), which has 100.0 GiB, less 2.0 GiB "
            "reserved: 1.0 GiB too much",
        ),
        (
            [model("a"), model("b", load="on_demand")],
            1,
            None,
            (1, "load"),
            "it claims 100.0 GiB of GPU 0 (H200), which has 100.0 GiB, less 100.0 GiB of a: 100.0 "
            "GiB too much",
        ),
        (
            [model("a", gpus_per_replica=4)],
            2,
            None,
            (0, "gpus_per_replica"),
            "spreads each replica over 4 GPUs, and it may use 2: GPU 0 (H200), GPU 1 (H200)",
        ),
        (
            [model("a", gpus_per_replica=2, replicas=2)],
            3,
            None,
            (0, "replicas"),
            "needs 4 GPUs for 2 replicas of 2, and it may use 3: 1 too few",
        ),
        (
            [model("a", replicas=2, load="on_demand")],
            1,
            None,
            (0, "replicas"),
            "needs 2 GPUs for 2 replicas of 1, and it may use 1: 1 too few; two of them share a "
            "GPU only where `memory` says what each takes",
        ),
        *(
            (
                [model("a", memory="40%", replicas=3, load=load)],
                1,
                None,
                (0, "memory"),
                "no place was found for a/2 beside the others: it claims 40.0 GiB of GPU 0 (H200), "
                "which has 100.0 GiB, less 40.0 GiB of a, less 40.0 GiB of a: 20.0 GiB too much",
            )
            for load in ("on_start", "on_demand")
        ),
        (
            [model("a", gpus_per_replica=2), model("b", gpus=[1], memory="10%")],
            2,
            None,
            (1, "memory"),
            "b/0",
        ),
    ],
)
def test_refuses_with_the_arithmetic(
    models: list[ModelConfig],
    count: int,
    reserve: str | None,
    key: tuple[int, str],
    words: str,
) -> None:
    with pytest.raises(Misplaced, match=re.escape(words)) as caught:
        place(models, gpus(count), 8, reserve=reserve)
    assert caught.value.loc == ("models", *key)


def test_the_engine_that_must_have_a_gpu_is_named() -> None:
    with pytest.raises(Misplaced, match="the engine vllm needs a GPU, and no NVIDIA GPU"):
        place([model("a", engine="vllm")], (), 8)
    with pytest.raises(Misplaced, match="the engine vllm needs a GPU, and it asks for device: cpu"):
        place([model("a", engine="vllm", device="cpu")], gpus(1), 8)


# ---------------------------------------------------------------- reloads


def test_everybody_stays_where_it_is() -> None:
    some = gpus(4)
    held: dict[str, list[Slot]] = {"a": [some[2:4]], "b": [(some[3],)], "c": [(some[0],)]}
    models = [
        model("a", gpus_per_replica=2, memory="50%", replicas=1),
        model("b", memory="50%", replicas=1),
        model("c", memory="50%", load="on_demand"),
        model("d", memory="50%", replicas=1),
    ]
    placed = indexes(place(models, some, 8, held))
    assert (placed["a"], placed["b"], placed["c"]) == ([(2, 3)], [(3,)], [(0,)])
    assert placed["d"] == [(1,)]


def test_one_moves_where_another_could_not_be_placed() -> None:
    some = gpus(2)
    models = [model("a", memory="60%", replicas=1), model("b", memory="60%", gpus=[0])]
    assert indexes(place(models, some, 8, {"a": [(some[0],)]})) == {"a": [(1,)], "b": [(0,)]}


def test_replicas_that_come_and_go_do_so_together_and_are_given_room_together() -> None:
    some = gpus(2)
    models = [
        model("pair", memory="30%", replicas=2, gpus_per_replica=2, load="on_demand"),
        model("one", memory="25%", replicas="auto"),
        model("two", memory="25%", replicas="auto"),
    ]
    placed = indexes(place(models, some, 8))
    assert placed["pair"] == [(0, 1), (0, 1)]
    assert sorted(placed["one"] + placed["two"]) == [(0,), (1,)]


# ---------------------------------------------------------------- whatever the file


@st.composite
def files(draw: st.DrawFn) -> tuple[list[ModelConfig], int, str | None]:
    count = draw(st.integers(1, 3))
    some = st.none() | st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    models = [
        model(
            f"m{i}",
            gpus=draw(some),
            replicas=draw(st.just("auto") | st.integers(1, 2)),
            memory=draw(st.none() | st.sampled_from(["20%", "30GiB", "50%", "70%", "95%"])),
            gpus_per_replica=draw(st.integers(1, 2)),
            load=draw(st.sampled_from(["on_start", "on_start", "on_demand", "manual"])),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    return models, count, draw(st.none() | st.just("10%"))


def fits(
    models: list[ModelConfig], slots: list[tuple[ModelConfig, Slot]], reserve: str | None
) -> bool:
    """By the rules, and not by the code: claims of those that stay and each of the others."""
    for gpu in {gpu for _, slot in slots for gpu in slot}:
        here = [one for one, slot in slots if gpu in slot]
        counts = Counter(one.name for one in here)
        if any(counts[m.name] > 1 and (m.memory is None or m.replicas == "auto") for m in here):
            return False
        staying = sum(claim_bytes(m, gpu, reserve) for m in here if m.load == "on_start")
        passing = [
            claim_bytes(m, gpu, reserve) * counts[m.name] for m in here if m.load != "on_start"
        ]
        if staying + max(passing, default=0) > gpu.total_bytes - reserve_bytes(gpu, reserve):
            return False
    return True


def can_be_placed(models: list[ModelConfig], count: int, reserve: str | None) -> bool:
    """By exhaustion."""
    some = gpus(count)
    todo = [m for m in models for _ in range(least(m))]

    def fill(at: int, slots: list[tuple[ModelConfig, Slot]]) -> bool:
        if at == len(todo):
            return True
        one = todo[at]
        allowed = [g for g in some if one.gpus is None or g.index in one.gpus]
        for slot in itertools.combinations(allowed, one.gpus_per_replica):
            more = [*slots, (one, slot)]
            if fits(models, more, reserve) and fill(at + 1, more):
                return True
        return False

    return fill(0, [])


@settings(max_examples=200, deadline=None)
@given(files())
def test_no_gpu_is_promised_twice_and_whatever_can_be_placed_is(
    file: tuple[list[ModelConfig], int, str | None],
) -> None:
    models, count, reserve = file
    named = {one.name: one for one in models}
    try:
        placed = place(models, gpus(count), 8, reserve=reserve)
    except Misplaced:
        assert not can_be_placed(models, count, reserve)
        return
    assert fits(models, [(named[one.model], one.gpus) for one in placed], reserve)
    assert place(models, gpus(count), 8, reserve=reserve) == placed, "and the same again"
    for one in models:
        own = [p for p in placed if p.model == one.name]
        assert all(len(p.gpus) == one.gpus_per_replica == len(p.claims) for p in own)
        assert one.gpus is None or {g.index for p in own for g in p.gpus} <= set(one.gpus)
        assert len(own) >= 1 if one.replicas == "auto" else len(own) == one.replicas


@settings(max_examples=100, deadline=None)
@given(files())
def test_a_second_look_moves_nobody(file: tuple[list[ModelConfig], int, str | None]) -> None:
    models, count, reserve = file
    some = gpus(count)
    try:
        placed = place(models, some, 8, reserve=reserve)
    except Misplaced:
        return
    held = {one.name: [p.gpus for p in placed if p.model == one.name] for one in models}
    again = place(models, some, 8, held, reserve)
    assert sorted(indexes(again).items()) == sorted(indexes(placed).items())


def test_tens_of_workers_on_sixteen_gpus_take_no_time_to_speak_of() -> None:
    models = [
        *(model(f"whole{i}", replicas=1) for i in range(4)),
        *(model(f"wide{i}", gpus_per_replica=4, memory="50%", replicas=1) for i in range(4)),
        *(model(f"small{i}", memory="30%", replicas=2) for i in range(5)),
        *(model(f"guest{i}", memory="45%", load="on_demand") for i in range(8)),
    ]
    placed = place(models, gpus(16), 8)
    named = {one.name: one for one in models}
    assert fits(models, [(named[one.model], one.gpus) for one in placed], None)
