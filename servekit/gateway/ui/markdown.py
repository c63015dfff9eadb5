"""What the chat's Markdown renderer does not read by itself: formulas between single dollars."""

from __future__ import annotations

import re

#: What no formula begins in: code, other formulas, escaped characters. Then a formula, by the rule
#: of Pandoc, which leaves prices alone: no space inside of its dollars, no letter or digit outside.
#: What is never closed ends with its paragraph: so the time is proportional to the text's length.
_FORMULA = re.compile(
    r"""
    (?: ^|(?<=\n)) [ ]{0,3} (?P<fence>```+|~~~+) .*? (?: \n[ ]{0,3}(?P=fence) | \Z )
    | (?P<ticks>`+) .*? (?: (?<!`)(?P=ticks)(?!`) | \n\n | \Z )
    | \\\[ .*? (?: \\\] | \n\n | \Z )
    | \\\( .*? (?: \\\) | \n\n | \Z )
    | \$\$ .*? (?: \$\$ | \n\n | \Z )
    | \\.
    | (?<![A-Za-z0-9]) \$ (?![\s$]) (?P<formula> (?: [^$\n\\`] | \\. )+ )(?<!\s)\$ (?![A-Za-z0-9$])
    """,
    re.VERBOSE | re.DOTALL,
)


def mark_formulas(text: str) -> str:
    r"""Return Markdown with `\(x\)` for `$x$`."""
    if text.count("$") < 2:
        return text
    return _FORMULA.sub(_mark, text)


def _mark(found: re.Match[str]) -> str:
    formula = found["formula"]
    return found[0] if formula is None else rf"\({formula}\)"
