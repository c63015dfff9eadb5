"""A whole GPU for each worker: found whenever there is one, whatever GPUs the models name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.gpu_matching import Matching, match_whole
from servekit.supervisor.scheduling.memory_requests import Misplaced
from servekit.system.gpu.gpus import Gpu, Slot

GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100, 100) for i in range(4))


def model(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "path": "x", "engine": "echo", **keys})


def matched(
    models: Sequence[ModelConfig],
    allowed: Mapping[str, Sequence[int]],
    held: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    count: int = 4,
) -> dict[str, list[int]]:
    wanted = {name: [GPUS[i] for i in own] for name, own in allowed.items()}
    slots: dict[str, list[Slot]] = {
        name: [tuple(GPUS[i] for i in slot) for slot in own] for name, own in (held or {}).items()
    }
    found = match_whole(models, wanted, GPUS[:count], slots)
    assert all(len(slot) == 1 for own in found.values() for slot in own)
    return {name: [slot[0].index for slot in own] for name, own in found.items()}


def test_others_move_along_a_chain_until_each_has_a_gpu() -> None:
    models = [model(name, replicas=1) for name in "abc"]
    allowed = {"a": [0, 1], "b": [1, 2], "c": [0]}
    assert matched(models, allowed, {"a": [(0,)], "b": [(1,)]}, 3) == {"a": [1], "b": [2], "c": [0]}


def test_nobody_moves_where_a_gpu_is_free() -> None:
    models = [model(name, replicas=1) for name in "ab"]
    allowed = {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert matched(models, allowed, {"a": [(1,)]}) == {"a": [1], "b": [0]}


def test_only_as_many_places_are_kept_as_a_model_has_workers() -> None:
    models = [model("a", replicas=1), model("b", replicas=2)]
    allowed = {"a": [0, 1, 2, 3], "b": [0, 1]}
    held: dict[str, Sequence[tuple[int, ...]]] = {"a": [(3,), (0,), (1,)]}
    assert matched(models, allowed, held) == {"a": [3], "b": [0, 1]}


def test_a_place_that_a_model_may_not_have_any_more_is_not_kept() -> None:
    assert matched([model("a", replicas=1)], {"a": [1, 2]}, {"a": [(0,)]}) == {"a": [1]}
    assert matched([model("a", replicas=1)], {"a": [1, 2]}, {"a": [(2, 3)]}) == {"a": [1]}, "wide"


def test_a_model_grows_where_it_was_before() -> None:
    models = [model("a", replicas="auto"), model("b", replicas="auto")]
    allowed = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    held: dict[str, Sequence[tuple[int, ...]]] = {"a": [(1,), (3,)], "b": [(0,), (2,)]}
    assert matched(models, allowed, held) == {"a": [1, 3], "b": [0, 2]}


def test_what_is_left_goes_to_the_model_with_the_fewest() -> None:
    models = [model("a", replicas=2), model("b"), model("c")]
    allowed = {name: [0, 1, 2, 3] for name in "abc"}
    assert {name: len(own) for name, own in matched(models, allowed).items()} == {
        "a": 2,
        "b": 1,
        "c": 1,
    }
    found = matched([model("b"), model("c")], {"b": [0, 1, 2, 3], "c": [0]})
    assert found == {"b": [1, 2, 3], "c": [0]}


def test_places_come_in_the_order_of_the_gpus() -> None:
    held: dict[str, Sequence[tuple[int, ...]]] = {"a": [(3,), (1,)]}
    assert matched([model("a", replicas=2)], {"a": [0, 1, 2, 3]}, held) == {"a": [1, 3]}


def test_growth_never_takes_a_gpu_from_another_for_good() -> None:
    matching = Matching({"a": GPUS[:2], "b": GPUS[:2]}, {})
    assert matching.grow("a") and matching.grow("b")
    assert not matching.grow("a") and not matching.grow("b")
    assert len(matching.gpus_of("a")) == len(matching.gpus_of("b")) == 1


@pytest.mark.parametrize(
    ("models", "allowed", "count", "key", "said"),
    [
        (
            [model("a", replicas=3, gpus=[0, 1])],
            {"a": [0, 1]},
            4,
            (0, "replicas"),
            "model 'a' asks for 3 replicas and its `gpus` names 2: each replica takes a GPU of its"
            " own, or a share of one by `memory`",
        ),
        (
            [model("a", replicas=2), model("b", replicas=3)],
            {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]},
            4,
            (1, "replicas"),
            "the models need 5 GPUs (a 2, b 3) and there are 4: 1 too few; each replica takes a GPU"
            " of its own, or a share of one by `memory`",
        ),
        (
            [model("a", replicas=1, gpus=[0]), model("b", gpus=[0])],
            {"a": [0], "b": [0]},
            4,
            (1, "gpus"),
            "model 'b' needs 1 of the GPUs that its `gpus` names, and the other models' `gpus`"
            " leave it fewer (replicas: a 1, b 1; 4 GPUs in all)",
        ),
        (
            [model("a", replicas=1), model("b")],
            {"a": [0], "b": [0]},
            1,
            (1, "replicas"),
            "the models need 2 GPUs (a 1, b 1) and there are 1: 1 too few",
        ),
    ],
)
def test_too_few_gpus_are_told_with_their_number(
    models: list[ModelConfig],
    allowed: dict[str, list[int]],
    count: int,
    key: tuple[int, str],
    said: str,
) -> None:
    with pytest.raises(Misplaced, match=re.escape(said)) as caught:
        matched(models, allowed, count=count)
    assert caught.value.loc == ("models", *key)
