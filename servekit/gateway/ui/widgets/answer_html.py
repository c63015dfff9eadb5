"""Answers as HTML: text as it was said, thoughts folded away. Everything in them is data."""

from __future__ import annotations

import re
from html import escape

from servekit.gateway.generation.generation import Choice
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.request_runner import Shown

#: Characters of one answer that are shown; the rest is only counted.
MOST_CHARS = 200_000
#: Escape sequences of terminals: CSI, OSC and the two-character ones; source: ECMA-48.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without what terminals obey, and what turns the reading order."""
    return _CONTROLS.sub("�", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def answer(shown: Shown, say: Say) -> str:
    """An answer so far.

    Its last element is left open, which browsers close: so what is said next only adds to the
    HTML, and only the addition is sent to the page.
    """
    choice = shown.choice
    text = f'<div class="sk-text" tabindex="0" role="region" aria-label="{escape(say("answer"))}">'
    return thoughts(choice, say) + text + clipped(choice.text, say)


def thoughts(choice: Choice, say: Say) -> str:
    """What the model thought, to unfold."""
    if not choice.reasoning:
        return ""
    summary = escape(say("thoughts"))
    said = clipped(choice.reasoning, say)
    return f'<details class="sk-thoughts"><summary>{summary}</summary><div>{said}</div></details>'


def clipped(text: str, say: Say) -> str:
    """Text as HTML, so much of it as a page can bear."""
    shown = escape(plain(text[:MOST_CHARS]), quote=False)
    left = len(text) - MOST_CHARS
    return shown if left <= 0 else f"{shown}\n… {escape(say.count('more', left))}"
