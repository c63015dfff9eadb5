"""Whether a cluster can run what the file asks for, and the sentence where not."""

from __future__ import annotations

from dataclasses import replace as replace_place

import pytest
from msgspec.structs import replace

from servekit.config.schema import ModelConfig
from servekit.protocol.control.ray_messages import Node
from servekit.ray.node_requirements import (
    Need,
    Versions,
    gpus_for,
    in_words,
    node_fault,
    refusal_of_nodes,
    sites_of,
    why_unfit,
)
from servekit.supervisor.scheduling.placement import placed_elsewhere
from servekit.supervisor.workers.worker_spec import make_worker_spec

OWN = Versions("0.1.0", "3.11.7", "2.60.0")
HEAD = Node("h", "10.0.0.1", 0, 0, "3.11.7", "2.60.0", "0.1.0")
SMALL = Node("s", "10.0.0.2", 8, 2, "3.11.9", "2.60.0", "0.1.0")
LARGE = Node("l", "10.0.0.3", 16, 4, "3.11.7", "2.60.0", "0.1.0")
ONE, FOUR, EIGHT = (Need("m", gpus, 1) for gpus in (1, 4, 8))


def test_nodes_that_are_alike_and_large_enough_are_not_refused() -> None:
    assert refusal_of_nodes([HEAD, SMALL, LARGE], OWN, [ONE, FOUR]) == ""


def test_what_can_never_fit_is_told_with_its_arithmetic() -> None:
    assert refusal_of_nodes([HEAD, SMALL, LARGE], OWN, [EIGHT]) == (
        "model 'm' needs 8 GPUs on one node of the Ray cluster for each replica, and the largest,"
        " 10.0.0.3, has 4"
    )
    assert refusal_of_nodes([HEAD, SMALL], OWN, [Need("m", 0, 9)]) == (
        "model 'm' needs 9 CPUs on one node of the Ray cluster for each replica, and the largest,"
        " 10.0.0.2, has 8; `ray.cpus` says how many"
    )
    said = refusal_of_nodes([SMALL, LARGE], OWN, [Need("m", 3, 17)])
    assert "17 CPUs beside 3 GPUs" in said and "10.0.0.3, has 16" in said


def test_what_fits_nowhere_may_wait_where_the_cluster_grows() -> None:
    assert refusal_of_nodes([HEAD, SMALL], OWN, [EIGHT], grows=True) == ""
    assert refusal_of_nodes([], OWN, [ONE], grows=True) == ""
    older = replace(SMALL, servekit="0.0.9")
    assert "has servekit 0.0.9" in refusal_of_nodes([older], OWN, [EIGHT, ONE], grows=True)


def test_one_node_is_judged_by_the_same_words() -> None:
    """As when it comes later, and a worker is about to be placed there."""
    empty = replace(SMALL, lacks={"m": "there is no /models/m there"})
    older = replace(SMALL, servekit="0.0.9")
    mute = replace(SMALL, problem="it has not answered within 20 s")
    assert why_unfit(SMALL, OWN, "m") == why_unfit(empty, OWN, "another") == ""
    for node in (empty, older, mute):
        assert why_unfit(node, OWN, "m") == refusal_of_nodes([node], OWN, [ONE]) != ""
    assert why_unfit(empty, OWN, "m") == (
        "model 'm' could be placed on the Ray node 10.0.0.2, and there is no /models/m there"
    )


def test_what_keeps_all_of_ours_from_a_node_is_told_whatever_room_it_has() -> None:
    assert node_fault(HEAD, OWN) == ""
    assert node_fault(replace(HEAD, problem="servekit is not installed there"), OWN) == (
        "servekit is not installed there"
    )
    assert "has Python 3.12, and this one has 3.11" in node_fault(
        replace(HEAD, python="3.12.1"), OWN
    )


def test_there_is_one_on_each_machine_but_ours() -> None:
    assert sites_of([HEAD, SMALL, LARGE], HEAD.node, {}) == {SMALL.host: SMALL, LARGE.host: LARGE}
    beside = Node("beside", HEAD.host)
    assert sites_of([HEAD, beside, SMALL], HEAD.node, {}) == {SMALL.host: SMALL}


def test_of_several_nodes_at_one_address_that_which_has_one_keeps_it() -> None:
    first, second = Node("a", "10.0.0.2"), Node("b", "10.0.0.2")
    assert sites_of([second, first], "", {}) == {"10.0.0.2": first}
    assert sites_of([first, second], "", {"10.0.0.2": "b"}) == {"10.0.0.2": second}
    assert sites_of([first], "", {"10.0.0.2": "b"}) == {"10.0.0.2": first}


def test_versions_that_differ_are_told_where_a_worker_could_be() -> None:
    older = replace(SMALL, servekit="0.0.9")
    assert refusal_of_nodes([older, LARGE], OWN, [ONE]) == (
        "the Ray node 10.0.0.2 has servekit 0.0.9, and this one has 0.1.0: install the same on all"
        " nodes"
    )
    assert refusal_of_nodes([older, LARGE], OWN, [FOUR]) == ""  # nothing of it would ever be there
    assert "Python 3.12" in refusal_of_nodes([replace(SMALL, python="3.12.1")], OWN, [ONE])
    assert "Ray 2.61.0" in refusal_of_nodes([replace(SMALL, ray="2.61.0")], OWN, [ONE])
    assert "has no servekit that its Python finds" in refusal_of_nodes(
        [replace(SMALL, servekit="")], OWN, [ONE]
    )


def test_what_a_model_lacks_on_a_node_is_told() -> None:
    lacking = replace(LARGE, lacks={"m": "there is no /models/m there"})
    said = "model 'm' could be placed on the Ray node 10.0.0.3, and there is no /models/m there"
    assert refusal_of_nodes([SMALL, lacking], OWN, [FOUR]) == said
    assert refusal_of_nodes([SMALL, lacking], OWN, [Need("other", 1, 1)]) == ""


def test_a_node_that_cannot_look_at_itself_is_told_once() -> None:
    silent = Node("x", "10.0.0.4", 8, 8, problem="it has not answered within 25 s")
    said = "the Ray node 10.0.0.4 cannot run workers: it has not answered within 25 s"
    assert refusal_of_nodes([silent], OWN, [ONE]) == said


def test_a_worker_elsewhere_is_told_of_its_gpus() -> None:
    model = ModelConfig.model_validate(
        {"name": "m", "engine": "transformers", "path": "m", "gpus_per_replica": 2}
    )
    (place,) = placed_elsewhere([model], threads=3)
    assert (place.gpus, place.threads) == ((), 3)
    there = make_worker_spec(model, replace_place(place, elsewhere=2), "")
    assert (there.device, there.gpus, there.parallel) == ("cuda", 2, "tensor")
    assert make_worker_spec(model, place, "").device == "cpu"


@pytest.mark.parametrize(
    ("settings", "some", "none", "words"),
    [
        ({"device": "cpu"}, 0, 0, "cpu, on a Ray node"),
        ({"engine": "echo"}, 0, 0, "cpu, on a Ray node"),
        ({"engine": "echo", "device": "cuda"}, 1, 1, "1 GPU of a Ray node"),
        ({"gpus_per_replica": 2}, 2, 0, "2 GPUs of a Ray node, or its cpu if none has any"),
        ({"device": "cuda", "gpus_per_replica": 2}, 2, 2, "2 GPUs of a Ray node"),
        ({"engine": "vllm"}, 1, 1, "1 GPU of a Ray node"),
    ],
)
def test_how_many_gpus_a_worker_gets_elsewhere(
    settings: dict[str, object], some: int, none: int, words: str
) -> None:
    given = {"name": "m", "engine": "transformers", "path": "m", **settings}
    model = ModelConfig.model_validate(given)
    assert (gpus_for(model, any_there=True), gpus_for(model, any_there=False)) == (some, none)
    assert in_words(model) == words
