"""What the contests with other servers make of their rounds, and how they ask."""

from __future__ import annotations

import pytest

from tests.bench import llama_servers, long_prompts
from tests.bench.chats import Round, chat
from tests.bench.long_prompts_ways import Answer, Clock, Question


def a_round(tokens_per_s: float, *texts: str) -> Round:
    return Round(tokens_per_s, 0.5, texts or ("once",))


def test_an_aim_is_met_by_the_median_and_where_it_is_set() -> None:
    rounds = {
        "ours": [a_round(90), a_round(100), a_round(10)],
        "xllamacpp": [a_round(100), a_round(100), a_round(100)],
        "llama-cpp-python": [a_round(29), a_round(30), a_round(31)],
    }
    native, python, first = llama_servers.rows(8, rounds)
    assert (native.to_reach, native.met) == ("≥ 0.97", False)
    assert native.measured.startswith("0.90; by round 0.90 (0.10–1.00)")
    assert (python.to_reach, python.met) == ("≥ 3.0", True)
    assert "xllamacpp 0.50 s" in first.measured
    alone = list(llama_servers.rows(1, rounds))
    assert [row.met for row in alone] == [False, None, None]


def test_the_same_text_is_counted() -> None:
    rounds = {
        "ours": [a_round(1, "one", "two"), a_round(1, "three", "four")],
        "xllamacpp": [a_round(1, " one", "two"), a_round(1, "three", "five")],
    }
    row, _ = llama_servers.rows(1, rounds)
    assert row.how.endswith("3 of 4 answers the same text")


def test_marked_chats_differ_from_their_first_word() -> None:
    plain = [chat(which, marked=False) for which in ("0.0.0", "0.0.1")]
    assert plain[0] != plain[1]
    assert all(len(messages) == 1 for messages in plain)
    one, other = (chat(which, marked=True)[0]["content"] for which in ("0.0.0", "0.0.1"))
    assert one.split()[0] != other.split()[0]


def test_prompts_are_distinct_and_the_same_in_every_run() -> None:
    asked, again = (long_prompts.questions(2, 3, 40, 5) for _ in range(2))
    assert asked == again
    prompts = [tuple(prompt) for question in asked for prompt in question.prompts]
    assert len(set(prompts)) == 6
    assert {len(prompt) for prompt in prompts} == {40}


def test_the_clock_takes_the_first_and_the_last_token_of_each_prompt() -> None:
    times = iter([10.0, 11.0, 12.0, 14.0])
    clock = Clock(Question([[1], [2]], output=2), lambda: next(times))
    clock.tell([(0, [7]), (1, [])])
    clock.tell([(0, [8]), (1, [9])])
    assert not clock.done
    clock.tell([(1, [6])])
    assert clock.done
    assert clock.answer() == Answer([1.0, 2.0], [2.0, 4.0], [[7, 8], [9, 6]])


def test_another_number_of_tokens_is_no_answer() -> None:
    clock = Clock(Question([[1]], output=1))
    clock.tell([(0, [7, 8])])
    with pytest.raises(RuntimeError, match="where 1 were asked for"):
        clock.answer()


def test_servekit_is_ahead_where_the_other_takes_longer() -> None:
    ours = [Answer([1.0, 3.0], [4.0, 4.0], [[1], [2]])]
    theirs = [Answer([3.0, 3.0], [3.0, 3.6], [[1], [3]])]
    rows = list(long_prompts.figures({"ours": ours, "generate": theirs}))
    assert [row.met for row in rows] == [False, True, None, None]
    assert [row.measured[:4] for row in rows] == ["0.90", "1.50", "1.00", "3.00"]
    assert rows[0].how.endswith("1 of 2 answers the same tokens")


def test_to_be_ahead_is_to_be_so_in_each_round() -> None:
    ours = [Answer([1.0], [2.0], [[1]])] * 3
    theirs = [Answer([first_s], [9.0], [[1]]) for first_s in (0.9, 2.0, 3.0)]
    whole, first, *_ = long_prompts.figures({"ours": ours, "batching": theirs})
    assert (whole.met, first.met) == (True, False)
    assert first.measured.startswith("2.00; by round 2.00 (0.90–3.00)")
