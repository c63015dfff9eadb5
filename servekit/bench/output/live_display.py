"""The live display of a measurement on stderr: a picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from servekit.bench.aggregator import Tally
from servekit.bench.options import Load, Options
from servekit.bench.output.report import load_text
from servekit.bench.output.result import Run
from servekit.units import format_latency, format_number

_DRAW_EVERY_S = 0.25
_TELL_EVERY_S = 5.0


@contextlib.contextmanager
def watch_load(options: Options) -> Iterator[Display]:
    """Provide a display during the measurement."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    display = Display(options, console)
    try:
        yield display
    finally:
        display.close()


class Display:
    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._live: Live | None = None
        self._load = ""
        self._tally: Tally | None = None
        self._shown_at = 0.0
        self._before = (0.0, 0, 0)  # at the last update: time, requests ended, chunks

    def show_warmup(self, load: Load) -> None:
        self._load, self._tally = str(load), None
        if self._console.is_terminal:
            self._draw(Text(f"{self._load}: warming up"))

    def began(self, load: Load, tally: Tally) -> None:
        self._tally, self._before = tally, (tally.began, 0, 0)
        self._shown_at = time.monotonic()

    def looked(self) -> None:
        every_s = _DRAW_EVERY_S if self._console.is_terminal else _TELL_EVERY_S
        if self._tally is None or time.monotonic() - self._shown_at < every_s:
            return
        self._shown_at = time.monotonic()
        if self._console.is_terminal:
            self._draw(self._picture(self._tally))
        else:
            self._console.print(self._line(self._tally), soft_wrap=True)

    def finish(self, run: Run) -> None:
        self.close()
        self._console.print(
            f"{load_text(run)}: {run.completed} requests in {format_latency(run.duration_s)}, "
            f"{run.failed} failed",
            soft_wrap=True,
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, picture: RenderableType) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        self._live.update(picture, refresh=True)

    def _line(self, tally: Tally) -> str:
        requests, chunks = self._rates(tally)
        recent = tally.ttft.last_values()
        ttft = (
            f", first token after {format_latency(recent.percentile_value(50))} (p50)"
            if recent
            else ""
        )
        return (
            f"{self._load}: {self._progress(tally)[2]}, {tally.completed} done, {tally.failed} "
            f"failed, {tally.in_flight} under way, {format_number(requests)} requests/s, "
            f"{format_number(chunks)} chunks/s{ttft}"
        )

    def _picture(self, tally: Tally) -> RenderableType:
        requests, chunks = self._rates(tally)
        done, total, text = self._progress(tally)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(self._load, style="bold"), ProgressBar(total, done, width=40), Text(text))
        figures = Table.grid(padding=(0, 3))
        failed = Text(f"{tally.failed} failed", style="red" if tally.failed else "")
        figures.add_row(f"{tally.completed} done", failed, f"{tally.in_flight} under way")
        figures.add_row(
            f"{format_number(requests)} requests/s", f"{format_number(chunks)} chunks/s", ""
        )
        latencies = Table.grid(padding=(0, 3))
        for name, all_of_it in (("first token", tally.ttft), ("end to end", tally.e2e)):
            if found := all_of_it.last_values():
                values = (
                    f"{p} {format_latency(found.percentile_value(at))}"
                    for p, at in (("p50", 50), ("p99", 99))
                )
                latencies.add_row(name, *values)
        if tally.gaps.counts:
            gaps = (
                f"{p} {format_latency(tally.gaps.percentile_value(at))}"
                for p, at in (("p50", 50), ("p99", 99))
            )
            latencies.add_row("between chunks", *gaps)
        errors = [Text(f"{kind}: {n}", style="red") for kind, n in tally.failures.most_common(5)]
        return Group(bar, figures, latencies, *errors)

    def _rates(self, tally: Tally) -> tuple[float, float]:
        """Return requests and chunks per second since the last update."""
        now, ended, chunks = time.monotonic(), tally.completed, tally.chunks
        then, ended_then, chunks_then = self._before
        self._before = now, ended, chunks
        took_s = max(1e-9, now - then)
        return (ended - ended_then) / took_s, (chunks - chunks_then) / took_s

    def _progress(self, tally: Tally) -> tuple[float, float, str]:
        """Return the progress, its total, and both in words."""
        took_s = max(0.0, time.monotonic() - tally.began)
        if self._options.requests is not None:
            ended = tally.completed + tally.failed
            words = f"{ended} of {self._options.requests} requests, {took_s:.0f} s"
            return ended, self._options.requests, words
        total_s = self._options.duration_s or 1.0
        if took_s > total_s:
            return total_s, total_s, f"{total_s:g} s are over, waiting for the last answers"
        return took_s, total_s, f"{took_s:.0f} of {total_s:g} s"
