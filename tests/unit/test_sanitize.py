"""What others wrote, as a terminal may show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.sanitize import one_line, show_controls, strip_controls

EVIL = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\u202ee\rf\tg\nh\x00\x7f"


def test_sequences_are_removed_and_newlines_stay() -> None:
    assert strip_controls(EVIL) == "abc31mdef\tg\nh"
    assert strip_controls("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\") == "link"


def test_on_one_line_and_not_for_ever() -> None:
    assert one_line(EVIL) == "abc31mdef g h"
    assert one_line("x" * 10_000, 10) == "xxxxxxxxxx …"
    assert one_line("\x1b[0m" * 10_000 + "x", 10).endswith("…"), "what is cut is told to be"


def test_pieces_are_made_visible_one_for_one() -> None:
    assert show_controls("\x1b[31m\r\n\t\x7f\x9b\u202e") == "␛[31m␍\n\t␡\ufffd\ufffd"


@pytest.mark.parametrize("shown", [strip_controls, show_controls])
@given(text=st.text(st.characters(codec=None), max_size=50))
def test_nothing_is_left_that_moves_a_cursor(shown: object, text: str) -> None:
    found = shown(text)  # type: ignore[operator]
    forbidden = {*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066} - {0x09, 0x0A}
    assert not {ord(char) for char in found} & forbidden
    found.encode()


@given(st.lists(st.text(st.sampled_from("\x1b[]0;m\x07ab"), max_size=4), max_size=8))
def test_pieces_are_shown_as_their_whole_is(pieces: list[str]) -> None:
    assert "".join(map(show_controls, pieces)) == show_controls("".join(pieces))
