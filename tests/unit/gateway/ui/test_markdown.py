"""Formulas between single dollars, and prices, which are none."""

from __future__ import annotations

import time

import pytest

from servekit.gateway.ui.markdown import mark_formulas


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("so $x_1^2$, ($y$) and 设$z$。", r"so \(x_1^2\), (\(y\)) and 设\(z\)。"),
        (r"$\text{\$5}$ and $$a$$ and $b$", r"\(\text{\$5}\) and $$a$$ and \(b\)"),
        ("`a$` and $b$ ``$c$``", r"`a$` and \(b\) ``$c$``"),
        ("```\n$a$\n```\n$b$", "```\n$a$\n```\n\\(b\\)"),
        (r"\($a$\) and \$5 for $b$", r"\($a$\) and \$5 for \(b\)"),
    ],
)
def test_formulas_are_marked_outside_of_code(text: str, marked: str) -> None:
    assert mark_formulas(text) == marked


@pytest.mark.parametrize(
    "text",
    [
        *("$5 and $10", "$5/$10", "US$5 and US$6", "from $1 to $2, or $3-$4", "$HOME/$USER"),
        *("$ a $", "$a\nb$", "~~~\n$a$", "an open `$a$"),
    ],
)
def test_prices_and_variables_stay(text: str) -> None:
    assert mark_formulas(text) == text


@pytest.mark.parametrize("part", [r"\( ", r"\[ ", "``` ", "$a ", "\n````", "`" * 9 + " `", "$$ "])
def test_what_is_never_closed_costs_no_time(part: str) -> None:
    """It runs on the gateway's event loop, several times a second."""
    began = time.process_time()
    mark_formulas("$ $" + part * 20_000)
    assert time.process_time() - began < 2.0
