"""What `servekit why` shows of an answer."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from rich.console import Console

from servekit.cli.why import explain_state, why_tables
from servekit.protocol.adapters import AdapterInfo, AdapterStatus
from servekit.protocol.control.startup_messages import Phase, Start
from servekit.protocol.messages import ReplicaHistory, Why
from servekit.protocol.types import ExitRecord
from servekit.sanitize import strip_controls

EXIT = ExitRecord(
    time.time() - 5, 7, 1.5, "killed by SIGKILL", None, 9, "ready", "", 3, 2, 2**20, 0, ("one",), ()
)


def of(*exits: ExitRecord, state: str = "ready", next_s: float | None = None) -> Why:
    return Why("m", "closed", (ReplicaHistory("m/0", state, "", 1, next_s, exits),))


def shown(why: Why) -> str:
    console = Console(width=300, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for renderable in why_tables(why):
            console.print(renderable)
    return captured.get()


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (of(), "no process of it has died"),
        (of(EXIT), "s ago: killed by SIGKILL. It was started again"),
        (of(replace(EXIT, tail=())), "a user, or the kernel, killed it"),
        (of(replace(EXIT, out_of_memory="host")), "ran out of memory"),
        (of(replace(EXIT, out_of_memory="gpu")), "lower max_context"),
        (of(replace(EXIT, what="stalled: no progress", stacks=("x",))), "say where it hung"),
        (of(EXIT, state="failed"), "correct the reported problem, then run `servekit reload`"),
        (of(EXIT, state="failed", next_s=3.0), "last lines below; `servekit reload` tries again"),
        (
            of(replace(EXIT, tail=()), state="failed", next_s=3.0),
            "SIGKILL. `servekit reload` tries",
        ),
        (of(EXIT, state="backoff", next_s=3.0), "It is tried again by itself"),
        (of(), "m: 1 of 1 ready; no process"),
        (replace(of(), model="m/0"), "m/0: ready; no process"),
    ],
)
def test_the_diagnosis_is_a_sentence_with_the_next_step(why: Why, words: str) -> None:
    assert words in explain_state(why)


def test_the_newest_death_is_last_and_told_in_full() -> None:
    lines = tuple(f"line {n}" for n in range(9))
    old = replace(EXIT, what="first", tail=lines)
    new = replace(EXIT, what="second", at=time.time(), tail=lines, stacks=("  File x",))
    text = shown(of(old, new, next_s=2.0))
    first, second = text.split("second", 2)[-2:]
    assert "first" in first
    assert first.count("| line") == 3
    assert second.count("| line") == 9
    assert "File x" in second
    assert "next attempt in 2.0 s" in text
    assert "3 requests served, 2 running; 1 MiB of memory" in text


def test_what_would_move_the_cursor_is_left_out() -> None:
    evil = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\u202ee\rf\tg"
    assert strip_controls(evil) == "abc31mdef\tg"
    assert "\x1b" not in shown(of(replace(EXIT, tail=(evil,), what=evil, stacks=(evil,))))


def test_adapters_are_told_with_how_they_run_and_why_or_why_not() -> None:
    info = AdapterInfo(
        "x", "LORA", "mixed", "all of it mixes", 8, 1200, 2**20, {"against float32": 0.0012}
    )
    why = replace(
        of(),
        adapters=(
            AdapterStatus("x", "/x", "serving", "", info),
            AdapterStatus("y", "/y", "failed", "its rank is 512"),
        ),
    )
    told = shown(why)
    assert "adapter x serving, from /x" in told
    assert "LORA, rank 8, mixed: all of it mixes" in told
    assert "1200 parameters, 1 MiB, against float32 0.0012" in told
    assert "adapter y failed, from /y" in told
    assert "its rank is 512" in told


def test_a_death_before_it_was_ready_says_how_far_it_came() -> None:
    phases = (Phase("import", 0.5, 2.0), Phase("load", 2.0))
    start = Start("up", time.time(), "died", phases, 3.5)
    assert "failed 1.50 s into load, 3.50 s from `servekit up`" in shown(
        of(replace(EXIT, phase="loading", start=start))
    )


def test_one_is_not_told_as_several_and_log_lines_as_logs_shows_them() -> None:
    said = '{"event": "loaded", "level": "info", "timestamp": "2026-01-01", "process": "w", "x": 1}'
    text = shown(of(replace(EXIT, served=1, tail=(said, "as it is", '{"half'))))
    assert "1 restart\n" in text or "1 restart," in text
    assert "1 request served" in text
    assert "| loaded x=1\n" in text and "| as it is\n" in text and '| {"half\n' in text
