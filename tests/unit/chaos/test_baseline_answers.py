"""What is told apart in answers."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from servekit.chaos.baseline_answers import BaselineAnswer, Tally, classify_difference, make_prompt
from servekit.chaos.client import ChatAnswer, Question, TokenUsage

#: A text in which no stretch occurs twice.
TEXT = "".join(f"{a}{b}" for a in string.ascii_letters for b in string.digits)[:400]


def answer(text: str = "abc", **fields: object) -> ChatAnswer:
    found = ChatAnswer(
        0.0, stream=True, status=200, text=text, finishes=["length"], dones=1, ids={"x"}
    )
    found.usages = [TokenUsage(1, 3, 4)]
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def tallied(got: ChatAnswer, *, sure: bool = True) -> Tally:
    tally = Tally()
    tally.add(BaselineAnswer(Question("m", "p", 3), answer(), sure), got)
    return tally


@given(st.integers(0, 380), st.integers(1, 20))
def test_a_lost_chunk_is_missing(at: int, size: int) -> None:
    assert classify_difference(TEXT, TEXT[:at] + TEXT[at + size :]) == "missing"


@given(st.integers(20, 380), st.integers(1, 20))
def test_a_chunk_that_comes_twice_is_repeated(at: int, size: int) -> None:
    assert classify_difference(TEXT, TEXT[:at] + TEXT[at - size :]) == "repeated"


@given(st.integers(0, 399))
def test_other_text_is_wrong(at: int) -> None:
    assert classify_difference(TEXT, TEXT[:at] + "é" + TEXT[at + 1 :]) == "wrong"


def test_equal_is_equal() -> None:
    assert classify_difference(TEXT, TEXT) == ""
    assert classify_difference("", "") == ""


def test_a_good_answer_is_clean() -> None:
    tally = tallied(answer())
    assert tally.clean
    assert (tally.sent, tally.answered, tally.complaints()) == (1, 1, "")


def test_usage_twice_or_otherwise_is_told() -> None:
    for usages in ([TokenUsage(1, 3, 4)] * 2, [TokenUsage(1, 2, 3)], []):
        tally = tallied(answer(usages=usages))
        assert not tally.clean
        assert tally.kinds["usage"] == 1


def test_two_finishes_closings_or_ids_are_failures() -> None:
    for fields in ({"finishes": ["stop"] * 2}, {"dones": 2}, {"dones": 0}, {"ids": {"a", "b"}}):
        assert tallied(answer(**fields)).failed == 1


def test_another_finish_is_no_equal_answer() -> None:
    assert tallied(answer(finishes=["stop"])).wrong == 1


def test_texts_are_not_compared_where_undisturbed_ones_differ() -> None:
    tally = tallied(answer("else"), sure=False)
    assert tally.clean and tally.unsure == 1
    assert tallied(answer("else")).wrong == 1


def test_an_error_after_text_is_a_failure() -> None:
    tally = tallied(answer(error="worker_lost: it died"))
    assert (tally.failed, tally.answered) == (1, 0)
    assert tally.complaints() == "1 × worker_lost: it died"


def test_prompts_differ_and_stay() -> None:
    assert make_prompt(1) == make_prompt(1) != make_prompt(2)
    assert len(make_prompt(3)) > 300
