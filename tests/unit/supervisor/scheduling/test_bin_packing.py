"""The search for GPUs, without a file: what stays, what grows, and when it gives up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from servekit.supervisor.scheduling import bin_packing as module
from servekit.supervisor.scheduling.bin_packing import Board, Unplaceable, Want, candidates, pack
from servekit.system.gpu.gpus import Gpu, Slot

GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100, 100) for i in range(16))
Places = dict[str, list[tuple[int, ...]]]


def rooms(count: int, size: int = 100) -> dict[Gpu, int]:
    return dict.fromkeys(GPUS[:count], size)


def want(name: str, claim: int, on: Sequence[int] = range(4), **more: Any) -> Want:
    facts = {"least": 1, "width": 1, "stays": True, "grows": False} | more
    return Want(name, claims={GPUS[i]: claim for i in on}, **facts)


def at(*indexes: int) -> Slot:
    return tuple(GPUS[i] for i in indexes)


def packed(wants: Sequence[Want], room: Mapping[Gpu, int]) -> Places:
    found = pack(wants, room)
    return {name: [tuple(gpu.index for gpu in slot) for slot in own] for name, own in found.items()}


# ---------------------------------------------------------------- what stays


def test_a_model_with_fewer_workers_than_before_keeps_only_so_many() -> None:
    one = want("a", 10, held=(at(2), at(0), at(1)), shares=True)
    assert packed([one], rooms(4)) == {"a": [(2,)]}


def test_a_model_that_grows_keeps_all_its_workers() -> None:
    one = want("a", 60, on=(0, 1), grows=True, held=(at(1), at(0)))
    other = want("b", 60, on=(2,), grows=True)
    assert packed([one, other], rooms(3)) == {"a": [(0,), (1,)], "b": [(2,)]}


def test_a_worker_beyond_the_least_makes_room_for_a_new_model() -> None:
    one = want("a", 60, on=(0, 1), grows=True, held=(at(0), at(1)))
    other = want("b", 60, on=(0, 1))
    assert packed([one, other], rooms(2)) == {"a": [(0,)], "b": [(1,)]}


def test_a_place_of_another_width_or_without_room_is_not_kept() -> None:
    wide = want("a", 50, on=range(2), width=2, held=(at(0), at(1)))
    assert packed([wide], rooms(2)) == {"a": [(0, 1)]}
    grown = want("a", 90, on=(0, 1), held=(at(0),))
    assert packed([grown], {GPUS[0]: 80, GPUS[1]: 100}) == {"a": [(1,)]}
    gone = want("a", 50, on=(1,), held=(at(0),))
    assert packed([gone], rooms(2)) == {"a": [(1,)]}


def test_places_come_in_the_order_of_the_gpus() -> None:
    one = want("a", 10, least=3, held=(at(3), at(1), at(2)))
    assert packed([one], rooms(4)) == {"a": [(1,), (2,), (3,)]}


# ---------------------------------------------------------------- what grows


def test_what_is_left_is_shared_out_evenly() -> None:
    found = packed([want(name, 100, grows=True) for name in "ab"], rooms(4))
    assert {name: len(slots) for name, slots in found.items()} == {"a": 2, "b": 2}
    found = packed([want("a", 100, on=(0,), grows=True), want("b", 100, grows=True)], rooms(4))
    assert found == {"a": [(0,)], "b": [(1,), (2,), (3,)]}


def test_one_that_does_not_grow_has_its_least() -> None:
    assert packed([want("a", 10)], rooms(4)) == {"a": [(0,)]}


def test_no_gpu_gets_a_second_worker_of_one_that_grows() -> None:
    assert packed([want("a", 10, on=(0, 1), grows=True)], rooms(2)) == {"a": [(0,), (1,)]}


# ---------------------------------------------------------------- which slot is best


def best(board: Board, one: Want, order: Any = "emptiest") -> tuple[int, ...]:
    return tuple(gpu.index for gpu in candidates(board, one, order)[0])


def with_placed(*placed: tuple[Want, Slot], room: Mapping[Gpu, int] | None = None) -> Board:
    board = Board(room or rooms(4))
    board.placed = list(placed)
    return board


def test_the_emptiest_gpu_is_taken_first_or_the_fullest_with_room() -> None:
    board = with_placed((want("x", 60), at(0)), (want("y", 30), at(1)), room=rooms(3))
    small = want("a", 20, on=range(3))
    assert best(board, small) == (2,)
    assert best(board, small, "fullest") == (0,)
    assert best(board, want("a", 50, on=range(3)), "fullest") == (1,)


def test_a_gpu_without_a_worker_of_its_own_goes_before_all_others() -> None:
    one = want("a", 20, shares=True, held=(at(0),))
    board = with_placed((one, at(0)), (want("x", 50), at(1)), room=rooms(2))
    assert best(board, want("a", 20, on=range(2), shares=True, held=(at(0),))) == (1,)


def test_its_present_place_goes_before_a_better_one() -> None:
    board = with_placed((want("x", 60), at(2)), room=rooms(4))
    assert best(board, want("a", 20, held=(at(2),))) == (2,)


def test_one_that_comes_and_goes_overlaps_as_little_as_it_can() -> None:
    guest: dict[str, Any] = {"stays": False}
    board = with_placed((want("x", 60, **guest), at(0)), (want("y", 80, **guest), at(1)))
    board.rooms = rooms(2)
    assert best(board, want("a", 40, on=range(2), **guest)) == (0,), "it fits beside x"
    assert best(board, want("a", 50, on=range(2), **guest)) == (0,), "10 too much, not 30"


def test_a_pair_lies_within_a_pair_of_neighbours() -> None:
    board = with_placed((want("x", 100), at(0)), room=rooms(5))
    assert best(board, want("a", 50, on=range(5), width=2)) == (2, 3)


# ---------------------------------------------------------------- the limits of the search


def test_of_very_many_ways_only_neighbours_are_tried() -> None:
    wide = want("a", 10, on=range(16), width=8)
    found = candidates(Board(rooms(16)), wide)
    assert len(found) == 9
    assert all(slot[-1].index - slot[0].index == 7 for slot in found)
    few = candidates(Board(rooms(10)), want("a", 10, on=range(10), width=5))
    assert len(few) == 252, "all of them"


def test_gpus_that_are_alike_are_tried_once() -> None:
    """Else sixteen workers without room for the last would take more than all steps."""
    wants = [want(f"w{i:02}", 60, on=range(16)) for i in range(16)]
    wants.append(want("last", 50, on=range(16)))
    with pytest.raises(Unplaceable) as caught:
        pack(wants, rooms(16))
    assert not caught.value.gave_up
    assert caught.value.want.name == "last"
    assert len(caught.value.board.placed) == 16, "the furthest that it came"


def test_a_search_that_takes_too_long_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 3)
    wants = [want(f"w{i}", 60 + i) for i in range(4)]
    with pytest.raises(Unplaceable) as caught:
        pack(wants, rooms(4))
    assert caught.value.gave_up
    monkeypatch.setattr(module, "STEPS", 5)
    assert len(pack(wants, rooms(4))) == 4


def test_workers_move_only_where_one_could_not_be_placed_otherwise() -> None:
    one = want("a", 60, on=(0, 1), held=(at(0),))
    assert packed([one, want("b", 60, on=(0, 1))], rooms(2)) == {"a": [(0,)], "b": [(1,)]}
    assert packed([one, want("b", 60, on=(0,))], rooms(2)) == {"a": [(1,)], "b": [(0,)]}
