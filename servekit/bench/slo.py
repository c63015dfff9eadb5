"""Service level objectives: limits on one request, and the requests that meet them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from servekit.bench.client.client_protocol import Record
from servekit.bench.timing import Timing
from servekit.errors import ConfigError
from servekit.units import parse_duration

#: The possible limits, with their meanings for one request.
MEANINGS = {
    "ttft": "time to the first token",
    "itl": "mean time between two chunks of its stream",
    "gap": "longest time between two chunks of its stream",
    "tpot": "time per output token after the first",
    "e2e": "time to the last byte",
}

Slo = Mapping[str, float]


def parse_slo(text: str) -> dict[str, float]:
    """Parse `ttft=0.5,itl=0.05,e2e=10`, in seconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in MEANINGS:
            raise ConfigError(f"--slo {part!r}: write one of {', '.join(MEANINGS)}, as in ttft=0.5")
        if name in limits:
            raise ConfigError(f"--slo says {name} twice")
        limits[name] = _parse_seconds(part, value)
    if not limits:
        raise ConfigError("--slo is empty: write a limit in seconds, as in ttft=0.5,e2e=10")
    return limits


def _parse_seconds(part: str, value: str) -> float:
    seconds = 0.0
    with contextlib.suppress(ValueError):
        seconds = parse_duration(value)
    if not seconds > 0 or math.isinf(seconds):
        raise ConfigError(f"--slo {part!r}: write a time in seconds above 0, as in ttft=0.5")
    return seconds


def is_good(record: Record, timing: Timing, slo: Slo) -> bool:
    """Return whether a request was answered and met every applicable limit.

    An answer of one chunk has no gaps, and one without streaming has no first token: limits on
    missing times are met.
    """
    if record.outcome != "ok":
        return False
    found = {
        "ttft": timing.ttft_s,
        "itl": timing.itl_s,
        "gap": record.longest_gap_s,
        "tpot": timing.tpot_s,
        "e2e": timing.e2e_s,
    }
    return all((value := found[name]) is None or value <= limit for name, limit in slo.items())
