"""Ollama's durations."""

from __future__ import annotations

import math

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.ollama.keep_alive import stay_s


@pytest.mark.parametrize(
    ("said", "means_s"),
    [
        (0, 0.0),
        (2.5, 2.5),
        (-1, math.inf),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (" 1.5s ", 1.5),
        ("-1m", math.inf),
        ("-1", math.inf),
        ("30", 30.0),
    ],
)
def test_what_is_said_and_meant(said: float | str, means_s: float) -> None:
    assert stay_s(said) == means_s


@pytest.mark.parametrize("said", ["", "-", "soon", "m5", "5m!", "--1s"])
def test_what_is_no_duration(said: str) -> None:
    with pytest.raises(RequestError, match="keep_alive: expected a number of seconds"):
        stay_s(said)
