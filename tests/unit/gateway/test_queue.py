"""The fair queue against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway.queue import FairQueue

keys = st.sampled_from("abc")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), keys, st.integers(0, 2)),
        st.tuples(st.just("pop"), keys, st.just(0)),
        st.tuples(st.just("remove"), keys, st.integers(0, 20)),
        st.tuples(st.just("back"), keys, st.just(0)),
    ),
    max_size=60,
)


@given(operations)
def test_every_item_leaves_exactly_once_and_in_the_order_foretold(
    steps: list[tuple[str, str, int]],
) -> None:
    queue: FairQueue[int] = FairQueue(10)
    inside: set[int] = set()
    for number, (what, key, value) in enumerate(steps):
        if what == "push":
            queue.push(number, key, value)
            inside.add(number)
        elif what == "back":
            queue.give_back(number)
            inside.add(number)
        elif what == "remove":
            assert queue.remove(value) == (value in inside)
            inside.discard(value)
        elif inside:
            expected = queue.order()[0]
            assert queue.position(expected) == 0
            assert queue.pop() == expected
            inside.discard(expected)
        assert len(queue) == len(inside) == len(queue.order())
        assert set(queue.order()) == inside
    foretold = queue.order()
    assert [queue.pop() for _ in foretold] == foretold
    with pytest.raises(IndexError):
        queue.pop()


def test_a_heavy_client_cannot_starve_another() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for n in range(100):
        queue.push(f"heavy-{n}", "heavy")
    queue.push("light-0", "light")
    queue.push("light-1", "light")
    assert [queue.pop() for _ in range(4)] == ["heavy-0", "light-0", "heavy-1", "light-1"]


def test_priority_comes_before_fairness_and_the_returned_before_all() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.push("later", "a", 1)
    queue.push("sooner", "a", 0)
    queue.give_back("again")
    assert [queue.pop() for _ in range(3)] == ["again", "sooner", "later"]


def test_the_limit_is_for_new_items_only() -> None:
    queue: FairQueue[int] = FairQueue(1)
    queue.push(1)
    assert queue.full
    queue.give_back(0)
    assert len(queue) == 2
