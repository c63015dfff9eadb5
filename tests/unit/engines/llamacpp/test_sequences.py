"""Which sequence of a context a request gets, and how much of its beginning is there already."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.api.base import Job
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sequences import LEAST_SHARED, Sequences
from servekit.engines.text.sampling_params import Sampling
from servekit.protocol.messages import SamplingParams

BEGIN = list(range(100, 100 + LEAST_SHARED))


class MadeUpContext:
    """A context that notes what is done to its cache."""

    def __init__(self, sequences: int, *, continues: bool = True) -> None:
        self.sequences = sequences
        self.done: list[tuple[Any, ...]] = []
        self.continues = continues

    def cut_sequence(self, sequence: int, start: int) -> None:
        self.done.append(("cut", sequence, start))

    def share_prefix(self, source: int, target: int, end: int) -> None:
        self.done.append(("share", source, target, end))

    def can_continue(self, sequence: int, end: int) -> bool:
        return self.continues

    def clear_cache(self) -> None:
        self.done.append(("clear",))


def make(count: int = 2, *, rewinds: bool = True, **of_context: Any) -> tuple[Sequences, Any]:
    context: Any = MadeUpContext(count, **of_context)
    return Sequences(context, rewinds=rewinds), context


def row(ids: list[int], salt: str = "", **params: Any) -> LlamaRow:
    job = Job(1, ids, SamplingParams(**params), cache_salt=salt)
    return LlamaRow("k", job, Sampling(0.0), frozenset(), 9)


def run(sequences: Sequences, given: LlamaRow, now: int) -> Any:
    """Enter a row, and read all of it, as a step does."""
    place = sequences.enter(given, now)
    place.cached, place.used = given.marked(), now
    return place


def test_a_new_request_gets_an_empty_place_first() -> None:
    sequences, context = make(3)
    first = run(sequences, row([1, 2, 3]), 1)
    sequences.free(first)
    second = run(sequences, row([4, 5]), 2)
    assert second is not first and context.done == []
    third = run(sequences, row([6]), 3)
    assert sequences.has_free and sequences.active == [second, third]
    fourth = run(sequences, row([7]), 4)
    assert fourth is first and context.done == [("cut", 0, 0)], "what it had goes"
    assert not sequences.has_free
    assert sequences.count_cached() == 2 + 1 + 1


def test_the_place_that_was_used_least_recently_is_taken() -> None:
    sequences, _ = make(2)
    first, second = run(sequences, row([1]), 1), run(sequences, row([2]), 2)
    sequences.free(second)
    sequences.free(first)
    first.used = 5
    assert sequences.enter(row([3]), 6) is second


def test_a_request_goes_on_where_an_ended_one_began_alike() -> None:
    sequences, context = make(2)
    ended = run(sequences, row([*BEGIN, 1, 2]), 1)
    sequences.free(ended)
    place = sequences.enter(row([*BEGIN, 1, 7, 8]), 2)
    assert place is ended and place.cached == [*BEGIN, 1]
    assert context.done == [("cut", 0, LEAST_SHARED + 1)]


def test_a_running_ones_beginning_is_shared_without_a_copy() -> None:
    sequences, context = make(2)
    run(sequences, row([*BEGIN, 1]), 1)
    place = sequences.enter(row([*BEGIN, 2]), 2)
    assert place.id == 1 and place.cached == BEGIN
    assert context.done == [("share", 0, 1, LEAST_SHARED)]


def test_the_last_token_is_read_again_since_its_logits_are_wanted() -> None:
    sequences, _ = make(1)
    same = row([*BEGIN, 1])
    sequences.free(run(sequences, same, 1))
    assert sequences.enter(row([*BEGIN, 1]), 2).cached == BEGIN


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (row([*BEGIN[:-1], 7, 8]), {}),
        (row([*BEGIN, 7], salt="another"), {}),
        (row([*BEGIN, 7], prompt_logprobs=1), {}),
        (row([*BEGIN, 7]), {"rewinds": False}),
        (row([*BEGIN, 7]), {"continues": False}),
    ],
)
def test_what_may_not_be_shared_is_not(given: LlamaRow, more: dict[str, bool]) -> None:
    sequences, _ = make(2, **more)
    running = run(sequences, row([*BEGIN, 1]), 1)
    assert sequences.enter(given, 2).cached == []
    assert running.cached == [*BEGIN, 1]


def test_the_longest_beginning_is_shared() -> None:
    sequences, context = make(3)
    run(sequences, row([*BEGIN, 1]), 1)
    run(sequences, row([*BEGIN, 5, 6]), 2)
    assert sequences.enter(row([*BEGIN, 5, 7]), 3).cached == [*BEGIN, 5]
    assert context.done[-1] == ("share", 1, 2, LEAST_SHARED + 1)


def test_a_recurrent_model_keeps_nothing_of_an_ended_request() -> None:
    for rewinds, kept in ((True, 3), (False, 0)):
        sequences, _ = make(1, rewinds=rewinds)
        sequences.free(run(sequences, row([1, 2, 3]), 1))
        assert sequences.count_cached() == kept


def test_ended_requests_make_room_the_oldest_first() -> None:
    sequences, context = make(3)
    places = [run(sequences, row([n]), n) for n in range(3)]
    assert not sequences.evict_ended(), "all run"
    sequences.free(places[1])
    sequences.free(places[0])
    assert sequences.evict_ended() and context.done == [("cut", 0, 0)]
    assert sequences.evict_ended() and context.done[-1] == ("cut", 1, 0)
    assert not sequences.evict_ended()
    assert places[2].cached == [2]


def test_an_emptied_cache_has_no_requests() -> None:
    sequences, context = make(2)
    run(sequences, row([1, 2]), 1)
    sequences.empty_cache()
    assert sequences.active == [] and sequences.count_cached() == 0
    assert context.done == [("clear",)]


def test_requests_are_served_in_the_order_of_their_coming() -> None:
    sequences, _ = make(2)
    late, early = run(sequences, row([1]), 9), run(sequences, row([2]), 3)
    assert sequences.active == [early, late]


# ---------------------------------------------------------------- their rows


def test_a_rows_tokens_are_prompt_and_completion() -> None:
    given = row([1, 2, 3])
    given.completion = [4, 5, 6]
    assert given.tokens_between(0, 6) == [1, 2, 3, 4, 5, 6]
    assert given.tokens_between(1, 2) == [2]
    assert given.tokens_between(2, 5) == [3, 4, 5]
    assert given.tokens_between(3, 4) == [4]
    assert given.tokens_between(4, 6) == [5, 6]
    assert given.marked() == [1, 2, 3, 4, 5, 6]
    assert given.text_end(1) == 6 and given.find_chunk(1) is None


def test_what_a_row_has_read_and_counted_is_kept() -> None:
    given = row([1, 2, 2])
    given.completion = [2, 4]
    seen, counted, counts = given.history()
    assert sorted(seen) == [1, 2, 4]
    assert dict(zip(counted.tolist(), counts.tolist(), strict=True)) == {2: 1.0, 4: 1.0}
    given.completion += [4, 7]
    seen, counted, counts = given.history()
    assert sorted(seen) == [1, 2, 4, 7]
    assert dict(zip(counted.tolist(), counts.tolist(), strict=True)) == {2: 1.0, 4: 2.0, 7: 1.0}
