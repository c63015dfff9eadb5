"""The parameter `keep_alive` of Ollama's API: how long a model stays loaded."""

from __future__ import annotations

import re

from servekit.errors import RequestError

_PART = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>ns|us|µs|ms|s|m|h|$)")
_UNITS_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "": 1.0,
    "m": 60.0,
    "h": 3600.0,
}


def stay_s(keep_alive: float | str) -> float:
    """Return the seconds of a number or of a duration such as "5m" or "1h30m"; infinity below 0.

    Raises RequestError. Source: Go's time.ParseDuration, except that a number without a unit means
    seconds here.
    """
    if not isinstance(keep_alive, str):
        return float("inf") if keep_alive < 0 else float(keep_alive)
    text = keep_alive.strip()
    below = text.startswith("-")
    text = text[1:] if below else text
    parts = list(_PART.finditer(text))
    if not text or "".join(part[0] for part in parts) != text:
        raise RequestError(
            'keep_alive: expected a number of seconds, or a duration such as "5m"',
            param="keep_alive",
        )
    total_s = sum(float(part["number"]) * _UNITS_S[part["unit"]] for part in parts)
    return float("inf") if below and total_s else total_s
