"""The parameter `keep_alive` of Ollama's API: how long a model stays loaded."""

from __future__ import annotations

from servekit.errors import RequestError
from servekit.units import parse_duration


def stay_s(keep_alive: float | str) -> float:
    """Return the seconds of a number or of a duration such as "5m" or "1h30m"; infinity below 0.

    Raises RequestError.
    """
    if not isinstance(keep_alive, str):
        return float("inf") if keep_alive < 0 else float(keep_alive)
    text = keep_alive.strip()
    below = text.startswith("-")
    try:
        total_s = parse_duration(text[1:] if below else text)
    except ValueError:
        raise RequestError(
            'keep_alive: expected a number of seconds, or a duration such as "5m"',
            param="keep_alive",
        ) from None
    return float("inf") if below and total_s else total_s
