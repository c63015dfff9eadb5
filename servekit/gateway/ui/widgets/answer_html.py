"""Answers as HTML: the text as generated, with folded reasoning. All text is escaped."""

from __future__ import annotations

import re
import time
from html import escape

from servekit.gateway.generation.generation import Choice
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.request_runner import Shown

#: The most characters shown of one answer; the rest is only counted.
MOST_CHARS = 200_000
#: Escape sequences of terminals: CSI, OSC and the two-character ones. Source: ECMA-48.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean_text(text: str) -> str:
    """Return text without terminal escape sequences, control characters and bidi overrides."""
    return _CONTROLS.sub("�", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def format_moment(at: float, now: float) -> str:
    """Return a Unix time in UTC, with its date unless that is today's."""
    then = time.gmtime(at)
    is_today = then[:3] == time.gmtime(now)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


def render_answer(shown: Shown, say: Say) -> str:
    """Return an answer so far.

    The last element stays open, and browsers close it. Thus new text only extends the HTML, and
    only the extension is sent to the page.
    """
    choice = shown.choice
    text = f'<div class="sk-text" tabindex="0" role="region" aria-label="{escape(say("answer"))}">'
    return render_thoughts(choice, say) + text + clip_text(choice.text, say)


def render_thoughts(choice: Choice, say: Say) -> str:
    """Return the model's reasoning as an element to unfold."""
    if not choice.reasoning:
        return ""
    summary = escape(say("thoughts"))
    said = clip_text(choice.reasoning, say)
    return f'<details class="sk-thoughts"><summary>{summary}</summary><div>{said}</div></details>'


def clip_text(text: str, say: Say) -> str:
    """Return text as HTML, at most MOST_CHARS characters of it."""
    shown = escape(clean_text(text[:MOST_CHARS]), quote=False)
    left = len(text) - MOST_CHARS
    return shown if left <= 0 else f"{shown}\n… {escape(say.count('more', left))}"
