"""Sizes, counts and durations as text, as messages state them and as options take them."""

from __future__ import annotations

import re

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_DURATION_PART = re.compile(_NUMBER + r"\s*(?P<unit>ns|us|µs|ms|s|min|m|h|d)\s*")
_UNITS_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


def format_bytes(size_bytes: float) -> str:
    """Format a size: "512 B", "64 MiB", "3.4 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1023.5:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def format_duration(time_s: float) -> str:
    """Format a long time by its two largest units: "5 s", "3 min 5 s", "2 d 7 h".

    A negative time, since a moment before the clock was set back, is shown as "0 s".
    """
    minutes, seconds = divmod(max(0, int(time_s)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_latency(time_s: float | None) -> str:
    """Format a short time with three digits: "85 µs", "1.25 ms", "2.5 s"; "-" for None."""
    if time_s is None:
        return "-"
    if time_s >= 0.9995:
        return f"{format_number(time_s)} s"
    if time_s >= 0.0001:
        return f"{format_number(time_s * 1000)} ms"
    return f"{time_s * 1e6:.0f} µs"


def format_number(value: float) -> str:
    """Format a number with three digits, or all digits before the point of a large one."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def count_noun(number: int, what: str) -> str:
    """Return a number with its noun: "1 restart", "2 restarts", "2 processes"."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def parse_duration(text: str) -> float:
    """Return the seconds of "90", "90s", "500ms", "10m", "1h30m" or "2d".

    Raises ValueError. Source: Go's time.ParseDuration, except for days, "min" for minutes, and a
    number without a unit, which means seconds.
    """
    text = text.strip().lower()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    parts = list(_DURATION_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise ValueError(f"{text!r} is not a duration")
    return sum(float(part["number"]) * _UNITS_S[part["unit"]] for part in parts)
