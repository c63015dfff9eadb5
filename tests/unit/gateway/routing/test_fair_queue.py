"""The fair queue against a plain model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from servekit.gateway.routing.fair_queue import STEP_S, FairQueue

keys = st.sampled_from("abc")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), keys, st.integers(-2, 2)),
        st.tuples(st.just("pop"), keys, st.just(0)),
        st.tuples(st.just("take"), keys, st.just(0)),
        st.tuples(st.just("remove"), keys, st.integers(0, 20)),
        st.tuples(st.just("back"), keys, st.just(0)),
        st.tuples(st.just("wait"), keys, st.integers(1, 25)),
    ),
    max_size=60,
)


@dataclass
class Plain:
    """The same rules on flat lists, searched from end to end."""

    returned: list[int] = field(default_factory=list)
    waiting: list[tuple[int, str, int, float]] = field(default_factory=list)  # in order of arrival
    turns: dict[int, list[str]] = field(default_factory=dict)  # keys by priority

    def push(self, item: int, key: str, priority: int, at_s: float) -> None:
        self.waiting.append((item, key, priority, at_s))
        turns = self.turns.setdefault(priority, [])
        if key not in turns:
            turns.append(key)

    def pop(self) -> int:
        if self.returned:
            return self.returned.pop(0)
        firsts = []
        for priority, turns in self.turns.items():
            if turns:
                item, _, _, at_s = next(w for w in self.waiting if w[1:3] == (turns[0], priority))
                firsts.append((at_s + STEP_S * priority, priority, item))
        _, priority, item = min(firsts)
        self.turns[priority].append(self.turns[priority].pop(0))
        self.remove(item)
        return item

    def remove(self, item: int) -> None:
        self.returned = [other for other in self.returned if other != item]
        self.waiting = [other for other in self.waiting if other[0] != item]
        for priority, turns in self.turns.items():
            left = {key for _, key, at, _ in self.waiting if at == priority}
            self.turns[priority] = [key for key in turns if key in left]

    def inside(self) -> set[int]:
        return {*self.returned, *(item for item, *_ in self.waiting)}


@given(operations)
@example([*[("push", "a", 0)] * 2, ("push", "b", 0), *[("pop", "a", 0)] * 3])  # keys take turns
def test_every_item_leaves_exactly_once_and_in_the_order_foretold(
    steps: list[tuple[str, str, int]],
) -> None:
    queue: FairQueue[int] = FairQueue(10)
    plain, now = Plain(), 0.0
    for number, (what, key, value) in enumerate(steps):
        if what == "push":
            queue.push(number, key, value, now, size_bytes=number)
            plain.push(number, key, value, now)
        elif what == "back":
            queue.requeue(number)
            plain.returned.append(number)
        elif what == "remove":
            assert queue.remove(value) == (value in plain.inside())
            plain.remove(value)
        elif what == "wait":
            now += value
        elif plain.inside():
            expected = queue.order()[0]
            assert queue.position(expected) == 0
            if what == "take":
                assert queue.remove(expected, turn=True)
            else:
                assert queue.pop() == expected
            assert plain.pop() == expected
        assert len(queue) == len(plain.inside())
        assert set(queue.order()) == plain.inside()
        assert queue.size_bytes == sum(item for item, *_ in plain.waiting)
    foretold = queue.order()
    assert [queue.pop() for _ in foretold] == foretold == [plain.pop() for _ in foretold]
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
    queue.requeue("again")
    queue.requeue("at once", first=True)
    assert [queue.pop() for _ in range(4)] == ["at once", "again", "sooner", "later"]


@given(steps=st.integers(1, 20), low=st.integers(-9, 10))
def test_a_flood_of_the_prior_delays_the_others_by_a_bounded_time(steps: int, low: int) -> None:
    high = max(-10, low - steps)
    queue: FairQueue[str] = FairQueue(10**6)
    queue.push("patient", "a", low, 0.0)
    for second in range(1000):  # one leaves a second, and two of the prior come
        queue.push("prior", "b", high, float(second))
        queue.push("prior", "c", high, float(second))
        if queue.pop() == "patient":
            assert second <= 2 * STEP_S * (low - high) + 2
            return
    pytest.fail("it waited for ever")


def test_what_has_waited_a_step_goes_before_what_comes_now() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.push("patient", "a", 0, 0.0)
    queue.push("now", "a", -1, STEP_S + 1)
    assert queue.pop() == "patient"


def test_the_limit_is_for_new_items_only() -> None:
    queue: FairQueue[int] = FairQueue(1)
    queue.push(1)
    assert queue.full
    queue.requeue(0)
    assert len(queue) == 2


@given(st.lists(st.tuples(keys, st.integers(-1, 1)), max_size=40), keys)
def test_only_those_who_filled_the_queue_are_crowded_out(
    pushed: list[tuple[str, int]], newcomer: str
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(10)
    for number, (key, priority) in enumerate(pushed):
        queue.push((key, number), key, priority)
    before = [key for key, _ in queue.order()]
    gone = queue.crowd_out(newcomer)
    most = max(map(before.count, before), default=0)
    if gone is None:
        assert most < before.count(newcomer) + 2
        assert len(queue) == len(pushed)
    else:
        assert before.count(gone[0]) == most >= before.count(newcomer) + 2
        assert len(queue) == len(queue.order()) == len(pushed) - 1
        assert gone not in queue.order()
