"""A plot of a result: rates over the loads or over time, and the distributions of latencies.

Drawn by matplotlib, from the extra `servekit[bench]`, without a display. An HTML page has the same
plot as SVG with the tables, and loads nothing from the network.
"""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from servekit.bench.output.report import load_text, result_tables
from servekit.bench.output.result import Result, Run, Spread
from servekit.errors import ConfigError, StartError

_LATENCIES = (
    ("Time to first token", "ttft_s"),
    ("Time between chunks of a stream", "itl_s"),
    ("End to end", "e2e_s"),
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>servekit bench: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; }}
pre {{ overflow-x: auto; font-size: 13px; line-height: 1.35; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style></head>
<body><h1>servekit bench</h1><p>{began}, servekit {version}</p>
<pre>{tables}</pre>
{picture}
</body></html>
"""


def check_plot(path: Path) -> None:
    """Check that such a file can be drawn here. Raises ConfigError."""
    if path.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--plot {path}: write FILE.png or FILE.html")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def draw_plot(result: Result, path: Path) -> None:
    """Write the file. Raises StartError."""
    if not result.runs:
        return
    form = "png" if path.suffix.lower() == ".png" else "svg"
    picture = io.BytesIO()
    make_figure(result).savefig(picture, format=form, dpi=130)
    content = picture.getvalue()
    if form == "svg":
        content = plot_page(result, content.decode()).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StartError(f"--plot {path}: {error.strerror}") from None


def plot_page(result: Result, svg: str) -> str:
    """Return an HTML page with the plot and the tables."""
    console = Console(file=io.StringIO(), width=140, markup=False, emoji=False, highlight=False)
    with console.capture() as told:
        for table in result_tables(result):
            console.print(table)
    return _PAGE.format(
        title=html.escape(result.url),
        began=html.escape(result.began_at),
        version=html.escape(result.servekit),
        tables=html.escape(told.get()),
        picture=svg[svg.index("<svg") :],
    )


def make_figure(result: Result) -> Any:
    """Return a matplotlib Figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 7.5), layout="constrained")
    about = result.asked
    drawn.suptitle(f"{about['model']} at {result.url} ({about['api']})", fontsize=11)
    rates, *others = drawn.subplots(2, 2).flat
    if len(result.runs) > 1:
        _by_load(rates, result.runs)
    else:
        _over_time(rates, result.runs[0])
    for axes, (name, field) in zip(others, _LATENCIES, strict=True):
        _draw_spreads(axes, name, [(load_text(run), getattr(run, field)) for run in result.runs])
    return drawn


def _by_load(axes: Any, runs: Sequence[Run]) -> None:
    """Plot the rates of the loads at even distances, whatever their values."""
    places = range(len(runs))
    title = "Requests/s"
    if any(run.goodput for run in runs):
        good = [run.goodput.requests_per_s if run.goodput else 0.0 for run in runs]
        axes.plot(places, [run.requests_per_s for run in runs], marker="o", label="all answered")
        axes.plot(places, good, marker="s", linestyle="--", label="within the SLO")
        axes.legend(fontsize=8)
    elif any(run.output_tokens_per_s for run in runs):
        title = "Output tokens/s"
        axes.plot(places, [run.output_tokens_per_s for run in runs], marker="o")
    else:
        axes.plot(places, [run.requests_per_s for run in runs], marker="o")
    axes.set_xticks(list(places), [load_text(run) for run in runs])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _over_time(axes: Any, run: Run) -> None:
    """Plot the requests answered in each second."""
    done, failed = ([getattr(at, name) for at in run.timeline] for name in ("requests", "failed"))
    axes.bar(range(len(done)), done, width=1.0, align="edge", alpha=0.7, label="answered")
    if run.failed:
        axes.bar(range(len(failed)), failed, width=0.5, align="edge", color="red", label="failed")
        axes.legend(fontsize=8)
    axes.axvline(run.duration_s, color="gray", linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds (dotted: no more requests from here)", fontsize=9)
    axes.set_title("Requests answered in each second", fontsize=10)
    axes.grid(alpha=0.3)


def _draw_spreads(axes: Any, name: str, found: Sequence[tuple[str, Spread | None]]) -> None:
    """Plot the distribution of a latency, one line per load."""
    axes.set_title(name, fontsize=10)
    known = [(label, spread) for label, spread in found if spread is not None]
    if not known:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    for label, spread in known:
        axes.plot([1000 * value for value in spread.percentiles], range(101), label=label)
    if all(spread.percentiles[1] > 0 for _, spread in known):
        _set_logarithmic(axes)
    axes.set_xlabel("milliseconds", fontsize=9)
    axes.set_ylabel("% of requests took at most", fontsize=9)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def _set_logarithmic(axes: Any) -> None:
    """Set a logarithmic axis with readable ticks (1, 2, 5, 10) instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
