"""The dashboard's numbers, and a plot of each over the last minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import pairwise

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.metrics_history import Sample, Which, compute_rates, median_s
from servekit.gateway.ui.widgets.plots import STYLES, PlotLine, Point, format_number, render_chart
from servekit.gateway.ui.widgets.status_poller import SPAN_S
from servekit.protocol.messages import Status
from servekit.units import format_latency


def render_figures(samples: Sequence[Sample], status: Status | None, say: Say) -> str:
    """Return numbers and plots as HTML. Current numbers are those of the last sample."""
    now, tokens = time.time(), compute_rates(samples)

    def line(name: str, of: Callable[[Sample], float | None], style: int = 0) -> PlotLine:
        return PlotLine(name, [(now - one.at, of(one)) for one in samples], style)

    rate = [(now - one.at, value) for one, value in zip(samples, tokens, strict=True)]
    requests = [
        line(say("plot.running"), lambda one: one.running),
        line(say("plot.waiting"), lambda one: one.queued, 1),
    ]
    firsts = [PlotLine("", _list_firsts(samples, now))]
    plots = [
        render_chart(
            say("plot.tokens"), say("plot.tokens_unit"), [PlotLine("", rate)], SPAN_S, say
        ),
        render_chart(say("plot.requests"), "", requests, SPAN_S, say),
        render_chart(say("plot.ttft"), "ms", firsts, SPAN_S, say),
        *_plot_queues(samples, line, say),
        render_chart(say("plot.restarts"), "", [line("", lambda one: one.restarts)], SPAN_S, say),
        *_plot_gpus(samples, line, say),
    ]
    return (
        f'<div class="sk-tiles">{"".join(_render_tiles(samples, tokens, status, say))}</div>'
        f'<div class="sk-plots">{"".join(plots)}</div>'
    )


MakeLine = Callable[[str, Callable[[Sample], float | None], int], PlotLine]


def _plot_queues(samples: Sequence[Sample], line: MakeLine, say: Say) -> Iterable[str]:
    """Yield a plot of the queues by model, for the models that waited most; none for one model."""
    names = {name for one in samples for name in one.waiting}
    most = {name: max(one.waiting.get(name, 0) for one in samples) for name in names}
    first = sorted(names, key=lambda name: (-most[name], name))[:STYLES]
    if len(first) > 1:
        lines = [line(name, partial(_get_waiting, name), style) for style, name in enumerate(first)]
        yield render_chart(say("plot.queues"), "", lines, SPAN_S, say)


def _get_waiting(name: str, one: Sample) -> float:
    return one.waiting.get(name, 0)


def _plot_gpus(samples: Sequence[Sample], line: MakeLine, say: Say) -> Iterable[str]:
    """Yield plots of the utilisation and memory of the first GPUs."""
    kinds: dict[str, Callable[[Sample], dict[Which, float]]] = {
        "plot.busy": lambda one: one.busy,
        "plot.memory": lambda one: one.used,
    }
    for key, shares in kinds.items():
        known = sorted({which for one in samples for which in shares(one)})[:STYLES]
        lines = [
            line(" · ".join(filter(None, (f"GPU {index}", node))), of, style)
            for style, (node, index) in enumerate(known)
            for of in (partial(_get_percent, shares, (node, index)),)
        ]
        if lines:
            yield render_chart(say(key), "%", lines, SPAN_S, say)


def _get_percent(
    shares: Callable[[Sample], dict[Which, float]], which: Which, one: Sample
) -> float | None:
    share = shares(one).get(which)
    return None if share is None else 100 * share


def _list_firsts(samples: Sequence[Sample], now: float) -> list[Point]:
    """Return the points of TTFT without idle samples, so that the line has no gaps."""
    points: list[Point] = []
    for before, one in pairwise(samples):
        if (found_s := median_s(before, one)) is not None:
            points.append((now - one.at, 1000 * found_s))
    return points


def _render_tiles(
    samples: Sequence[Sample], tokens: Sequence[float], status: Status | None, say: Say
) -> list[str]:
    last = samples[-1] if samples else Sample(0.0)
    first_s = median_s(samples[0], last) if samples else None
    replicas = [one for model in status.models for one in model.replicas] if status else []
    requests = f"{sum(one.requests for one in status.gateways):,}" if status else "–"
    ready = sum(one.state == "ready" for one in replicas)
    return [
        _render_tile(say("tile.tokens"), format_number(tokens[-1] if tokens else 0.0)),
        _render_tile(say("tile.running"), str(last.running)),
        _render_tile(say("tile.waiting"), str(last.queued)),
        _render_tile(say("tile.ttft"), "–" if first_s is None else format_latency(first_s)),
        _render_tile(say("tile.requests"), requests),
        _render_tile(say("tile.workers"), f"{ready} / {len(replicas)}" if status else "–"),
        _render_tile(
            say("tile.restarts"), str(sum(one.restarts for one in replicas)) if status else "–"
        ),
    ]


def _render_tile(name: str, value: str) -> str:
    return f'<div class="sk-tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>'
