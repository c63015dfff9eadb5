"""Plots as SVG, made by the gateway: a page loads no script for them and stores no figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from servekit.gateway.ui.pages.language import Say

WIDTH, HEIGHT = 300.0, 90.0
GRID = (0.5, HEIGHT / 2, HEIGHT - 0.5)
STYLES = 6
#: The steps of a scale, times a power of ten.
_STEPS = (1.0, 2.0, 5.0, 10.0)

Point = tuple[float, float | None]  # seconds ago, value; None leaves a gap


@dataclass(frozen=True, slots=True)
class PlotLine:
    """A curve; `style` is the index of its colour and dashes, below `STYLES`."""

    name: str
    points: Sequence[Point]
    style: int = 0


def round_up(most: float) -> float:
    """Return the least round number that is not below `most`; 1 if `most` is 0."""
    if most <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= most:
        power *= 10
    while power > most:
        power /= 10
    return next(step * power for step in _STEPS if step * power >= most * 0.9999)


def render_chart(title: str, unit: str, lines: Sequence[PlotLine], span_s: float, say: Say) -> str:
    """Return a figure with its title, last values, and curves over `span_s` seconds."""
    values = [value for line in lines for _, value in line.points if value is not None]
    top = round_up(max(values, default=0.0))
    keys = "".join(_render_key(line, unit, single=len(lines) == 1) for line in lines)
    label = escape(_describe_chart(title, unit, lines, say))
    curves = "".join(_render_curve(line, span_s, top) for line in lines)
    grid = "".join(f'<line x1="0" x2="{WIDTH:g}" y1="{y:g}" y2="{y:g}"/>' for y in GRID)
    return (
        f'<figure class="sk-plot"><figcaption><span>{escape(title)}</span>{keys}</figcaption>'
        '<div class="sk-plot-area">'
        f'<span class="sk-top-value">{format_number(top)} {escape(unit)}</span>'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><g class="sk-grid">{grid}</g>{curves}</svg></div>'
        f'<div class="sk-axis"><span>{escape(say("plot.ago", minutes=f"{span_s / 60:g}"))}</span>'
        f"<span>{escape(say('plot.now'))}</span></div></figure>"
    )


def format_number(value: float) -> str:
    """Return a short number with the significant digits."""
    if value >= 10_000:
        return f"{value / 1000:.4g}k"
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _get_last(line: PlotLine) -> float | None:
    return next((value for _, value in reversed(line.points) if value is not None), None)


def _render_key(line: PlotLine, unit: str, *, single: bool) -> str:
    last = _get_last(line)
    told = "–" if last is None else f"{format_number(last)} {unit}"
    name = "" if single else f"{escape(line.name)} "
    return f'<span class="sk-key sk-line{line.style}">{name}<b>{escape(told)}</b></span>'


def _describe_chart(title: str, unit: str, lines: Sequence[PlotLine], say: Say) -> str:
    parts = []
    for line in lines:
        values = [value for _, value in line.points if value is not None]
        last = _get_last(line)
        if last is not None:
            words = say(
                "plot.words", now=format_number(last), most=format_number(max(values)), unit=unit
            )
            parts.append(f"{line.name}: {words}" if len(lines) > 1 else words)
    return f"{title}. {'; '.join(parts) or say('plot.empty')}"


def _render_curve(line: PlotLine, span_s: float, top: float) -> str:
    pieces: list[list[str]] = [[]]
    for ago_s, value in line.points:
        if value is None:
            pieces.append([])
        elif ago_s <= span_s:
            x, y = WIDTH * (1 - ago_s / span_s), (HEIGHT - 2) * (1 - value / top) + 1
            pieces[-1].append(f"{x:.1f} {y:.1f}")
    path = "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)
    dots = "".join(f"M{piece[0]}h0.01" for piece in pieces if len(piece) == 1)
    return f'<path class="sk-line{line.style}" d="{path}{dots}"/>'
