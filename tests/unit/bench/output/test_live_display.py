"""What is shown while a load runs: lines in a file, a picture on a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from servekit.bench.aggregator import Tally
from servekit.bench.client.client_protocol import Asking, Record, Report, Target
from servekit.bench.lengths import Lengths
from servekit.bench.options import Load, Options
from servekit.bench.output import live_display
from servekit.bench.output.live_display import Display
from servekit.bench.percentiles import bucket_of
from tests.unit.bench.results import answered, result

LOAD = Load(users=4)


def options(requests: int | None = None, duration_s: float | None = None) -> Options:
    lengths = Lengths("fixed", 8)
    return Options(
        target=Target("127.0.0.1", 1, "/v1"),
        asking=Asking("chat", "m", True, lengths, lengths, Lengths("fixed", 1)),
        loads=(LOAD,),
        requests=requests,
        duration_s=duration_s,
        warmup=0,
        seed=0,
        timeout_s=1.0,
        processes=None,
        slo={},
    )


def make_tally(began: float) -> Tally:
    """8 answers of 0.2 s, 2 that failed, 3 on their way, 50 chunks."""
    tally = Tally(began, {})
    records = [answered(0.0, 1, stream=True) for _ in range(8)]
    records += [Record("http", 100.0, 101.0, status=429) for _ in range(2)]
    tally.report(0, Report(records, {bucket_of(0.01): 40}, 13, 3, 50))
    return tally


def display(found: Options, *, terminal: bool) -> tuple[Display, Console]:
    file = io.StringIO()
    console = Console(file=file, width=150, force_terminal=terminal, color_system=None)
    return Display(found, console), console


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show at each look, not only every few seconds."""
    monkeypatch.setattr(live_display, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(live_display, "_DRAW_EVERY_S", 0.0)


def test_in_a_file_a_line_tells_how_far_it_is() -> None:
    shown, console = display(options(requests=20), terminal=False)
    shown.show_warmup(LOAD)
    shown.looked()
    assert told(console) == "", "nothing is measured yet"
    tally = make_tally(time.monotonic() - 10)
    shown.began(LOAD, tally)
    shown.looked()
    line = told(console)
    assert line.startswith("4 at once: 10 of 20 requests, 10 s, 8 done, 2 failed, 3 under way, ")
    assert " 0.8 requests/s, 5 chunks/s, first token after 50 ms (p50)" in line
    shown.looked()
    again = told(console).splitlines()[1]
    assert " 0 requests/s, 0 chunks/s" in again, "rates are of the time since the last line"


def test_a_line_is_shown_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_display, "_TELL_EVERY_S", 60.0)
    shown, console = display(options(requests=20), terminal=False)
    shown.began(LOAD, make_tally(time.monotonic()))
    shown.looked()
    assert told(console) == ""


def test_a_duration_is_told_until_it_is_over() -> None:
    shown, console = display(options(duration_s=30.0), terminal=False)
    shown.show_warmup(LOAD)
    shown.began(LOAD, Tally(time.monotonic() - 10, {}))
    shown.looked()
    shown.began(LOAD, Tally(time.monotonic() - 31, {}))
    shown.looked()
    first, second = told(console).splitlines()
    assert first.startswith("4 at once: 10 of 30 s, 0 done, ")
    assert "first token" not in first
    assert second.startswith("4 at once: 30 s are over, waiting for the last answers, ")


def test_the_end_of_a_load_is_a_line_that_stays() -> None:
    for terminal in (False, True):
        shown, console = display(options(requests=20), terminal=terminal)
        shown.finish(result(1).runs[0])
        assert "1 at once: 50 requests in 6 s, 1 failed\n" in told(console).replace("\r", "")


def test_on_a_terminal_there_is_a_picture_that_goes_away() -> None:
    shown, console = display(options(requests=20), terminal=True)
    shown.show_warmup(LOAD)
    assert "4 at once: warming up" in told(console)
    shown.began(LOAD, make_tally(time.monotonic() - 10))
    shown.looked()
    picture = told(console).split("warming up")[1]
    for part in ("10 of 20 requests, 10 s", "8 done", "2 failed", "3 under way", "0.8 requests/s"):
        assert part in picture
    lines = [line.strip() for line in picture.splitlines()]
    assert any(line.startswith("first token") and "p50 50 ms" in line for line in lines)
    assert any(line.startswith("end to end") and "p99 200 ms" in line for line in lines)
    assert any(line.startswith("between chunks") and "p50 10" in line for line in lines)
    assert any(line.endswith("429: 2") for line in lines), "errors by kind"
    shown.close()
    shown.close()
    assert shown._live is None


def test_lines_come_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the usual times
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown, console = display(options(requests=20), terminal=False)
    shown.began(LOAD, make_tally(100.0))
    lines = []
    for now[0] in (104.9, 105.0, 105.1, 109.9, 110.1):
        shown.looked()
        lines.append(len(told(console).splitlines()))
    assert lines == [0, 1, 1, 1, 2]
