"""The breaker's table with a clock that is only a number, and random lives of many replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.supervisor.lifecycle.restart_policy import BreakerLimits, BreakerPolicy, StartDelay

LIMITS = BreakerLimits(lives=3, first_s=10.0, longest_s=40.0)


def opened(at: float = 100.0) -> BreakerPolicy:
    one = BreakerPolicy(LIMITS)
    for _ in range(3):
        one.fruitless_end("a", at)
    return one


def test_it_opens_after_so_many_fruitless_lives_in_a_row() -> None:
    one = BreakerPolicy(LIMITS)
    for _ in range(2):
        one.fruitless_end("a", 1.0)
        assert one.blocked_until(1.0) is None
    one.fruitless_end("b", 5.0)
    assert (one.state, one.since) == ("open", 5.0)
    assert one.blocked_until(14.9) == StartDelay(15.0)
    assert one.blocked_until(15.0) is None


def test_a_fruitful_life_starts_the_count_over() -> None:
    one = BreakerPolicy(LIMITS)
    for _ in range(10):
        one.fruitless_end("a", 1.0)
        one.fruitless_end("a", 1.0)
        one.record_success()
    assert one.state == "closed"


def test_one_replica_is_the_probe_and_the_others_wait() -> None:
    one = opened()
    one.started("b")
    assert (one.state, one.probe) == ("half-open", "b")
    assert one.blocked_until(1e9) == StartDelay(None)
    one.fruitless_end("c", 120.0)  # one that had been running all the time
    assert one.state == "half-open"
    one.record_success()
    assert one.blocked_until(120.0) is None
    assert one.fruitless == 0


def test_each_failed_probe_doubles_the_cool_down_up_to_a_limit() -> None:
    one, now, cooldowns = opened(), 100.0, []
    for _ in range(5):
        cooldowns.append(one.until - now)
        now = one.until
        one.started("a")
        one.fruitless_end("a", now)
    assert cooldowns == [10.0, 20.0, 40.0, 40.0, 40.0]
    one.record_success()
    for _ in range(3):
        one.fruitless_end("a", now)
    assert one.until - now == 10.0, "all is forgotten"


def test_a_probe_that_is_taken_away_lets_another_one_try() -> None:
    one = opened()
    one.started("a")
    one.withdrawn("b", 111.0)
    assert one.probe == "a"
    one.withdrawn("a", 111.0)
    assert one.probe == ""
    assert one.blocked_until(111.0) is None


def test_a_year_of_failures_overflows_nothing() -> None:
    one = opened()
    for number in range(5000):
        one.started("a")
        one.fruitless_end("a", float(number))
    assert one.until == 4999.0 + 40.0


@given(st.integers(1, 8))
def test_the_number_of_lives_is_the_limit(lives: int) -> None:
    one = BreakerPolicy(BreakerLimits(lives=lives))
    ended = 0
    while one.blocked_until(0.0) is None:
        one.fruitless_end("a", 0.0)
        ended += 1
    assert ended == lives


class Lives(RuleBasedStateMachine):
    """Replicas that start when they may, and end as they like; time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = BreakerPolicy(LIMITS)
        self.running: set[str] = set()
        self.probes: set[str] = set()

    @rule(passed_s=st.floats(0, 60))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s

    @rule(name=st.sampled_from("abcd"))
    def wants_to_start(self, name: str) -> None:
        if name in self.running or self.breaker.blocked_until(self.now) is not None:
            return
        was = self.breaker.state
        self.breaker.started(name)
        self.running.add(name)
        if was == "open":
            self.probes.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def dies_fruitless(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(name)
        self.probes.discard(name)
        self.breaker.fruitless_end(name, self.now)

    @precondition(lambda self: self.running)
    @rule()
    def proves_itself(self) -> None:
        self.breaker.record_success()
        self.probes.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def is_drained(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(name)
        self.probes.discard(name)
        self.breaker.withdrawn(name, self.now)

    @invariant()
    def one_probe_at_most_and_only_a_running_one(self) -> None:
        assert len(self.probes) <= 1
        assert (self.breaker.state == "half-open") == bool(self.probes)
        if self.breaker.state == "half-open":
            assert self.breaker.probe in self.running, "nobody waits for one that is gone"

    @invariant()
    def it_never_waits_longer_than_the_longest(self) -> None:
        hold = self.breaker.blocked_until(self.now)
        if hold is not None and hold.until is not None:
            assert 0 < hold.until - self.now <= LIMITS.longest_s + 1e-6


TestLives = Lives.TestCase
