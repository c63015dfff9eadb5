"""Claims on this machine's memory, as the file makes them."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.scheduling.memory_requests import Assignment, Misplaced, check_host_memory

GIB = 2**30


def model(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "path": "x", "engine": "echo", **keys})


def places(*names: str) -> list[Assignment]:
    return [Assignment(name, at, (), 1) for at, name in enumerate(names)]


def test_each_that_comes_and_goes_has_to_fit_beside_those_that_stay() -> None:
    a = model("a", memory="60%", load="on_demand")
    b = model("b", memory="60%", load="manual")
    check_host_memory([a, b, model("c")], places("a", "b", "c"), 10 * GIB)
    stays = model("stays", memory="5GiB")
    with pytest.raises(Misplaced) as refused:
        check_host_memory([stays, a], places("stays", "a"), 10 * GIB)
    assert refused.value.message == (
        "model 'a' claims 6.0 GiB of this machine's memory, which has 10.0 GiB, less 5.0 GiB of"
        " stays: 1.0 GiB too much"
    )
    assert refused.value.loc == ("models", 1, "memory")


def test_the_complaint_is_at_the_one_that_tips_it_and_shows_what_is_small() -> None:
    small, more = {"memory": "50MiB"}, {"memory": "6GiB"}
    models = [model("z", load="on_demand", **small), model("a", **small)]
    models += [model("b", **more), model("c", **more)]
    with pytest.raises(Misplaced) as refused:
        check_host_memory(models, places("z", "a", "b", "c"), 10 * GIB)
    assert refused.value.message == (
        "model 'c' claims 6.0 GiB of this machine's memory, which has 10.0 GiB, less 50 MiB of a,"
        " less 6.0 GiB of b: 2.0 GiB too much"
    )
    assert refused.value.loc == ("models", 3, "memory")


def test_every_replica_counts() -> None:
    with pytest.raises(Misplaced, match=r"claims 12\.0 GiB"):
        check_host_memory([model("a", memory="6GiB", replicas=2)], places("a", "a"), 10 * GIB)


def test_where_nothing_is_known_nothing_is_refused() -> None:
    check_host_memory([model("a", memory="6GiB")], places("a"), 0)
