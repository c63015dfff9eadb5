"""Phases of a load: who is told of them, and what they are within."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from servekit.engines.api.load_phases import heard_by, phase
from servekit.protocol.control.startup_messages import Phase


@pytest.fixture
def heard() -> Iterator[list[Phase]]:
    said: list[Phase] = []
    heard_by(said.append)
    yield said
    heard_by(None)


def test_a_phase_is_told_when_it_begins_and_when_it_ends(heard: list[Phase]) -> None:
    with phase("load"):
        assert [(one.name, one.ended_s) for one in heard] == [("load", None)]
    began, ended = heard
    assert ended.ended_s is not None
    assert ended.began_s == began.began_s <= ended.ended_s


def test_one_within_another_says_so_also_in_a_thread(heard: list[Phase]) -> None:
    def inner() -> None:
        with phase("weights"):
            pass

    async def load() -> None:
        with phase("load"):
            await asyncio.to_thread(inner)
        with phase("warm-up"):
            pass

    asyncio.run(load())
    assert [(one.name, one.within) for one in heard if one.ended_s is None] == [
        ("load", ""),
        ("weights", "load"),
        ("warm-up", ""),
    ]


def test_a_thread_of_its_own_is_within_nothing(heard: list[Phase]) -> None:
    def fetch() -> None:
        with phase("fetch"):
            pass

    with phase("import"):
        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    assert [one.within for one in heard if one.name == "fetch"] == ["", ""]


def test_an_error_ends_it_and_is_told_of(heard: list[Phase]) -> None:
    with pytest.raises(ValueError, match="no"), phase("load"):
        with phase("tokenizer"):
            pass
        raise ValueError("no")
    ends = {one.name: one.failed for one in heard if one.ended_s is not None}
    assert ends == {"tokenizer": False, "load": True}


def test_what_is_not_here_is_no_failure_and_both_say_why(heard: list[Phase]) -> None:
    for name, told, lacks in (
        ("a", "no b\nc", LookupError),
        ("d", "", LookupError),
        ("e", "f", None),
    ):
        with pytest.raises(KeyError), phase(name, lacks=lacks):
            raise KeyError(told) if told else KeyError
    ends = {one.name: (one.failed, one.why) for one in heard if one.ended_s is not None}
    assert ends["d"] == (False, "not here") and ends["e"] == (True, "KeyError: 'f'")
    assert ends["a"][0] is False and "no b" in ends["a"][1]


def test_nobody_has_to_listen() -> None:
    with phase("load"):
        pass
