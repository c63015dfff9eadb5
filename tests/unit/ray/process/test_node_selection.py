"""Where one more worker goes."""

from __future__ import annotations

import pytest

from servekit.ray.process.node_selection import Free, all_of, choose_node, free_of, waiting_for

A, B, C = Free("a", 4, 2), Free("b", 8, 4), Free("c", 2, 0)


def test_spread_goes_where_the_model_has_the_fewest_and_most_is_free() -> None:
    assert choose_node([A, B, C], 1, 1, "SPREAD", []) == "b"
    assert choose_node([A, B, C], 1, 1, "SPREAD", ["b"]) == "a"
    assert choose_node([A, B, C], 1, 1, "SPREAD", ["a", "b"]) == "b"


def test_pack_goes_where_the_model_is_already_and_least_is_free() -> None:
    assert choose_node([A, B, C], 1, 1, "PACK", []) == "a"
    assert choose_node([A, B, C], 1, 1, "PACK", ["b"]) == "b"
    assert choose_node([A, B, C], 1, 0, "PACK", []) == "c"


def test_what_has_no_room_or_was_just_lost_is_not_chosen() -> None:
    assert choose_node([A, B, C], 1, 4, "PACK", ["a"]) == "b"
    assert choose_node([A, B, C], 1, 4, "PACK", [], shunned={"b"}) == ""
    assert choose_node([A, B, C], 9, 0, "SPREAD", []) == ""
    assert choose_node([], 1, 0, "SPREAD", []) == ""


def test_what_ray_says_is_free_counts_for_living_nodes_only() -> None:
    nodes = [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]
    available = {"a": {"CPU": 1.5, "GPU": 1.0}, "b": {"CPU": 8.0}}
    assert free_of(nodes, available) == [Free("a", 1.5, 1.0)]
    assert free_of([{"NodeID": "new", "Alive": True}], available) == []


@pytest.mark.parametrize(
    ("cpus", "gpus", "said"),
    [
        (1, 1, "waits for 1 GPU in the Ray cluster"),
        (1, 4, "waits for 4 GPUs in the Ray cluster"),
        (0.5, 0, "waits for 0.5 CPUs in the Ray cluster"),
        (1, 0, "waits for 1 CPU in the Ray cluster"),
        (9, 0, "waits for a node with 9 CPUs: the Ray cluster has none that large now"),
        (
            1,
            8,
            "waits for a node with 8 GPUs beside 1 CPU: the Ray cluster has none that large now",
        ),
        (5, 2, "waits for 2 GPUs in the Ray cluster"),
        (
            9,
            2,
            "waits for a node with 2 GPUs beside 9 CPUs: the Ray cluster has none that large now",
        ),
    ],
)
def test_what_it_waits_for_is_said(cpus: float, gpus: int, said: str) -> None:
    assert waiting_for(cpus, gpus, [A, B, C]) == said


def test_what_keeps_it_from_nodes_with_room_is_said() -> None:
    older = {"a": "node a is older", "b": "node b has no files"}
    assert waiting_for(1, 1, [A, B, C], {"a": older["a"]}) == (
        "waits for 1 GPU in the Ray cluster; node a is older"
    )
    assert waiting_for(1, 1, [A, B, C], older) == (
        "waits for another node with 1 GPU beside 1 CPU; node a is older; node b has no files"
    )
    assert choose_node([A, B, C], 1, 1, "PACK", [], shunned=older.keys()) == ""


def test_what_a_node_has_is_counted_while_it_lives() -> None:
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
        {"NodeID": "b", "Alive": False, "Resources": {"CPU": 9.0}},
        {"NodeID": "c", "Alive": True, "Resources": {}},
    ]
    assert all_of(nodes) == [Free("a", 4.0, 2.0), Free("c", 0.0, 0.0)]
