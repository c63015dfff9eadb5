"""What `servekit ps --timings` shows of the starts that it is told."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from rich.console import Console

from servekit.cli.display.startup_timings import covered_s, how_far, start_heading, timing_tables
from servekit.protocol.control.startup_messages import Phase, Start, Starts
from servekit.protocol.messages import Status

PHASES = (
    Phase("supervisor", 0.0, 1.0),
    Phase("import", 1.0, 3.0),
    Phase("torch", 1.0, 2.0, "import"),
    Phase("fetch", 1.5, 3.0),
    Phase("load", 3.0, 5.0),
    Phase("weights", 3.5, 4.0, "load"),
    Phase("warm-up", 5.0, 5.5),
    Phase("gateways", 5.5, 6.0),
)
START = Start("up", time.time() - 60, "up", PHASES, 6.0, 5.5)
DIED = Start("restart", time.time() - 90, "died", (*PHASES[:4], Phase("load", 3.0)), 4.0)


def shown(*starts: Start) -> dict[str, str]:
    """Rows by their first word."""
    status = Status("1", 1, "u", "c", 0.0, 0, (), (), False, (Starts("m/0", starts),))
    console = Console(width=200, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for renderable in timing_tables(status):
            console.print(renderable)
    lines = captured.get().splitlines()
    return {line.split()[0]: " ".join(line.split()) for line in lines if line.strip()}


def test_each_phase_has_its_time_its_share_and_what_ran_beside_it() -> None:
    rows = shown(START)
    assert "first token after 5.50 s from `servekit up`" in rows["m/0"]
    assert "requests reach it after 6.00 s" in rows["m/0"]
    assert rows["import"] == "import 1.00 2.00 33 % fetch"
    assert rows["torch"] == "torch 1.00 1.00 17 % fetch"
    assert rows["fetch"] == "fetch 1.50 1.50 25 % import, torch"
    assert rows["load"] == "load 3.00 2.00 33 %"
    assert "(between)" not in rows


def test_parts_follow_what_they_are_within() -> None:
    assert list(shown(START)) == [
        *("m/0", "PHASE", "supervisor", "import", "torch", "fetch", "load", "weights"),
        *("warm-up", "gateways"),
    ]


def test_the_life_before_stands_beside() -> None:
    assert shown(DIED, START)["torch"] == "torch 1.00 1.00 17 % 1.00 fetch"
    assert "warm-up 5.00 0.50 8 %" in shown(DIED, START)["warm-up"]


def test_what_no_phase_tells_of_has_a_line() -> None:
    gap = replace(START, phases=(Phase("load", 1.0, 3.0), Phase("warm-up", 2.0, 5.0)))
    assert covered_s(gap) == 4.0
    assert shown(gap)["(between)"] == "(between) 2.00 33 %"


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (DIED, "failed 1.00 s into load, 4.00 s from the previous exit"),
        (
            replace(DIED, phases=(*DIED.phases, Phase("weights", 3.5, 3.75, "load", True))),
            "failed 0.25 s into weights (within load), 4.00 s",
        ),
        (replace(DIED, phases=PHASES[:2]), "failed after import, 4.00 s"),
        (replace(DIED, phases=()), "failed 4.00 s from the previous exit"),
    ],
)
def test_how_far_a_start_came(start: Start, words: str) -> None:
    assert how_far(start).startswith(words)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (DIED, "did not come up: failed"),
        (replace(DIED, state="starting", cause="request"), "starting for 4.00 s from the request"),
        (replace(START, first_token_s=None, cause="reload"), "up after 6.00 s from the reload"),
    ],
)
def test_the_heading_says_how_it_stands(start: Start, words: str) -> None:
    assert words in start_heading(Starts("m/0", (start,))).plain


def test_phases_that_name_each_other_are_no_trap() -> None:
    astray = (Phase("a", 0.0, 1.0, "b"), Phase("b", 0.0, 1.0, "a"), Phase("c", 0.0, 1.0, "c"))
    assert "PHASE" in shown(replace(START, phases=astray))


def test_what_failed_and_what_is_not_here_say_why() -> None:
    phases = (
        Phase("a", 0.0, 1.0, "", True, "LoadError: no\x1b[2J weights"),
        Phase("b", 1.0, 2.0, "", False, "triton: ImportError"),
        Phase("c", 2.0, 3.0, "", False, "not here"),
    )
    rows = shown(replace(START, phases=phases))
    assert rows["a"].endswith("failed: LoadError: no weights")
    assert rows["b"].endswith("% not here: triton: ImportError") and rows["c"].endswith(
        "% not here"
    )
