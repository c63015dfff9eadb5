"""Sanitizing of untrusted text for terminals.

Text of models and workers is data: an escape sequence in it could clear the screen, rename the
window or hide text, and a bidirectional mark could change the displayed order.
"""

from __future__ import annotations

import re

#: Escape sequences, and characters that move a cursor or hide text (C0, C1, bidi, surrogates).
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]|[\ud800-\udfff]"
)
#: C0 and DEL have control pictures (U+2400); C1, bidi marks and surrogates become U+FFFD.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_PICTURES |= dict.fromkeys(
    (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)), 0xFFFD
)
_PICTURES |= dict.fromkeys((*range(0xFFF9, 0xFFFC), *range(0xD800, 0xE000)), 0xFFFD)


def strip_controls(text: str) -> str:
    """Remove escape sequences, control characters and bidi marks; keep newlines and tabs."""
    return _CONTROL.sub("", text)


def one_line(text: str, most: int = 2000) -> str:
    """Return sanitized text on one line, truncated to `most` characters."""
    shown = " ".join(strip_controls(text[: 4 * most]).split())
    return shown if len(shown) <= most and len(text) <= 4 * most else f"{shown[:most]} …"


def show_controls(text: str) -> str:
    """Replace each character that `strip_controls` removes by a picture, one for one.

    Suitable for streamed text: no sequence has to be awaited, and none can slip through
    between two pieces.
    """
    return text.translate(_PICTURES)
