"""Tokens with their probabilities: what is shown, said and escaped."""

from __future__ import annotations

import html
import itertools
import json
import math
import re

import pytest

from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.widgets.token_html import (
    format_percent,
    get_level,
    get_probability,
    render_legend,
    render_spans,
    show_token,
    summarize_tokens,
)
from servekit.protocol.messages import TokenLogprob


def one(token: bytes, p: float, *best: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(token, math.log(p), tuple((t, math.log(q)) for t, q in best))


def test_levels_cover_all_probabilities_in_order() -> None:
    assert [get_level(p) for p in (1.0, 0.9, 0.89, 0.6, 0.3, 0.1, 0.099, 0.0)] == [
        *(0, 0, 1, 1, 2, 3, 4, 4)
    ]
    assert get_probability(0.0001) == 1.0  # an engine's rounding
    assert get_probability(-math.inf) == 0.0


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "100 %"), (0.415, "41.5 %"), (0.0001, "< 0.1 %"), (0.0, "0 %")]
)
def test_percent(p: float, text: str) -> None:
    assert format_percent(p) == text


def test_a_token_says_in_words_what_its_colour_says() -> None:
    made = render_spans("Say", [one(b" yes", 0.2, (b" no", 0.7), (b" yes", 0.2))], SAY_ENGLISH)
    assert 'class="sk-token sk-p3" role="button" tabindex="0"' in made
    assert 'aria-label=" yes: 20.0 %. Alternatives:  no 70.0 %"' in made
    rows = json.loads(html.unescape(re.findall('data-rows="([^"]*)"', made)[0]))
    assert [row[0] for row in rows] == [" yes", " no"]
    assert rows[0][3] is True


def test_only_the_first_is_a_stop_for_the_tab_key() -> None:
    made = render_spans("", [one(b"a", 0.5)] * 3, SAY_ENGLISH)
    assert re.findall(r'tabindex="(-?\d)"', made) == ["0", "-1", "-1"]


def test_more_tokens_only_add_to_the_html() -> None:
    tokens = [one(b"a", 0.5), one(b"<b>", 0.4), one(b"\n", 0.1)]
    parts = [render_spans("p", tokens[:count], SAY_ENGLISH) for count in range(4)]
    assert all(more.startswith(less) for less, more in itertools.pairwise(parts))


def test_hostile_tokens_are_text() -> None:
    bad = b'"><script>alert(1)</script>\x1b[31m'
    made = render_spans("<img src=x>", [one(bad, 0.5, (bad, 0.5))], SAY_ENGLISH)
    assert "<script" not in made
    assert "<img" not in made
    assert "\x1b" not in made
    assert made.count('"') % 2 == 0


def test_what_cannot_be_seen_is_shown_as_a_sign() -> None:
    assert [show_token(t) for t in (b"\n", b"\t", b"", b"\xe4\xb8", b"\x00")] == [
        "↵",
        "⇥",
        "∅",
        "�",
        "�",
    ]
    assert "␣␣" in render_spans("", [one(b"  ", 0.5)], SAY_ENGLISH)
    assert len(show_token(b"x" * 10_000)) == 80


def test_summary_and_legend() -> None:
    said = summarize_tokens([one(b"a", 0.5), one(b"b", 0.125)], SAY_ENGLISH)
    assert said == "Perplexity 4.00. The least likely token was b, at 12.5 %."
    assert summarize_tokens([], SAY_ENGLISH) == ""
    assert summarize_tokens([TokenLogprob(b"x", -math.inf)], SAY_ENGLISH).startswith("Perplexity")
    assert [f"sk-p{at}" in render_legend(SAY_ENGLISH) for at in range(5)] == [True] * 5
