"""The picture of `servekit top`, as lines of limited width and number."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from servekit.cli.display.responsive_table import shorten_text
from servekit.cli.display.tables import (
    format_size,
    gateway_note,
    replica_note,
    replica_span,
    state_text,
)
from servekit.cli.events import format_event
from servekit.cli.top.sampler import View, count_queued
from servekit.protocol.messages import GatewayStatus, ModelStatus, ReplicaStatus, Status
from servekit.protocol.types import GpuStatus
from servekit.sanitize import one_line
from servekit.units import format_duration

_HEAD = ("NAME", "STATE", "QUEUE", "RUN", "WAIT", "KV", "TOK/S", "REST", "MEMORY", "NOTE")
_WIDTHS = (18, 9, 5, 4, 4, 4, 7, 4, 8)
_RIGHT = range(2, 9)
#: Minimum width of a window with notes in the rows.
_WITH_NOTES = 100
#: Width that long notes keep beside long names.
_LEAST_NOTES = 24
_BAR = 16
_MOST_NAME = 40
#: Minimum and maximum number of events shown.
_LEAST_EVENTS, _MOST_EVENTS = 4, 40


def draw_view(view: View, width: int, height: int | None) -> list[Text]:
    """Return the picture in at most `height` lines; None: without limit."""
    status = view.status
    wide = max((len(gpu.node) for gpu in status.gpus), default=0)
    body = [*(_gpu(gpu, status, wide) for gpu in status.gpus), *_table(view, width)]
    head = [_head(view, width)]
    if view.trouble:
        head.append(Text(one_line(view.trouble), style="bold red"))
    events = [format_event(event, day=height is None) for event in view.events[-_MOST_EVENTS:]]
    if height is not None:
        body, events = _fit_lines(body, events, max(0, height - len(head) - 3))
    shown = [*head, *body, Text(), Text("EVENTS", style="bold"), *events]
    if height is not None:
        shown = shown[: max(1, height - 1)]
        shown += [Text() for _ in range(height - 1 - len(shown))]
        shown.append(Text("q quit", style="dim"))
    return [_cut_lines(text, width, dim=bool(view.trouble)) for text in shown]


def _fit_lines(
    body: Sequence[Text], events: Sequence[Text], room: int
) -> tuple[list[Text], list[Text]]:
    """Fit both into `room` lines; the body ends with the number of omitted lines."""
    for_body = max(room - min(_LEAST_EVENTS, len(events)), 1)
    shown = list(body)
    if len(shown) > for_body:
        left_out = len(shown) - for_body + 1
        shown = [*shown[: for_body - 1], Text(f"… {left_out} more lines; a taller window has them")]
    rest = max(0, room - len(shown))
    return shown, list(events[len(events) - min(rest, len(events)) :])


def _cut_lines(text: Text, width: int, *, dim: bool) -> Text:
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    if dim and not text.style:
        text.stylize("dim")
    return text


def _head(view: View, width: int) -> Text:
    status = view.status
    told = [
        (f"  {status.url}", ""),
        ("  draining" if status.draining else "", "yellow"),
        (f"  up {format_duration(max(0.0, view.at - status.started_at))}", ""),
        (f"  pid {status.pid}", "dim"),
        (f"  {format_size(status.rss_bytes)}", "dim"),
    ]
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    text = Text(f"servekit {status.version}", style="bold")
    for more, style in told:  # the first parts are dropped last
        if cell_len(text.plain) + cell_len(more) + 2 + len(clock) > width:
            break
        text.append(more, style=style)
    gap = width - cell_len(text.plain) - len(clock)
    return text.append(f"{' ' * max(2, gap)}{clock}", style="dim")


def _gpu(gpu: GpuStatus, status: Status, wide: int) -> Text:
    """Return the line of a GPU; `wide` is the length of the longest node name."""
    share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else 0.0
    full = round(min(1.0, share) * _BAR)
    text = Text(f"{gpu.node:<{wide}} " if wide else "", style="dim")
    text.append(f"GPU {gpu.index} ", style="bold")
    text.append("█" * full, style="red" if share > 0.95 else "cyan")
    text.append("░" * (_BAR - full), style="dim")
    text.append(f" {format_size(gpu.used_bytes)} of {format_size(gpu.total_bytes)}", style="")
    busy = "-" if gpu.utilisation is None else f"{gpu.utilisation * 100:.0f}%"
    text.append(f"  busy {busy:>4}", style="bold" if gpu.utilisation else "dim")
    held = ", ".join(f"{name} {format_size(held)}" for name, held in _held(gpu, status))
    return text.append(f"  {one_line(held)}", style="dim")


def _held(gpu: GpuStatus, status: Status) -> Iterator[tuple[str, int]]:
    for model in status.models:
        for replica in (*model.replicas, *model.standbys):
            for uuid, held in zip(replica.gpus, replica.held_bytes, strict=False):
                if uuid == gpu.uuid and held:
                    yield replica.name, held


def _table(view: View, width: int) -> Iterator[Text]:
    models = [(model, _model(view, model)) for model in view.status.models]
    workers = {
        replica.name: _worker(model, replica)
        for model, _ in models
        for replica in (*model.replicas, *model.standbys)
    }
    gateways = [_gateway(gateway) for gateway in view.status.gateways]
    rows = [*(cells for _, cells in models), *workers.values(), *gateways]
    name = _name_width(rows, width)
    yield _row([Text(name, style="bold") for name in _HEAD], width, name)
    for model, cells in models:
        yield from (_row(cells, width, name), *_below(cells[-1], width))
        for replica in (*model.replicas, *model.standbys):
            yield _row(workers[replica.name], width, name)
            if replica.state != "ready" or replica.reason or replica.trouble:
                yield from _below(Text(one_line(replica_note(model, replica)), style="dim"), width)
    yield from (_row(cells, width, name) for cells in gateways)


def _below(told: Text, width: int) -> Iterator[Text]:
    """Yield the note as an extra line, if the window is too narrow for notes in rows."""
    if width < _WITH_NOTES and told.plain:
        yield Text("    ").append_text(told)


def _model(view: View, model: ModelStatus) -> list[Text]:
    replicas = model.replicas
    rate = view.rates.get(model.name)
    kv = max((one.kv_used for one in replicas if one.state == "ready"), default=0.0)
    reason = model.residence.reason if model.residence is not None else ""
    if (scale := model.scale) is not None:
        reason = "; ".join(filter(None, (replica_span(model), reason, scale.waits or scale.reason)))
    return [
        Text(one_line(model.name), style="bold"),
        _standing(model),
        _count(count_queued(view.status, model)),
        _count(sum(one.running for one in replicas)),
        _count(sum(one.waiting for one in replicas)),
        Text(f"{kv * 100:.0f}%" if kv else "-"),
        Text("-" if rate is None else f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"),
        _count(sum(one.restarts for one in replicas)),
        Text(format_size(sum(one.gpu_bytes or one.rss_bytes for one in replicas))),
        Text(one_line(reason), style="dim"),
    ]


def _standing(model: ModelStatus) -> Text:
    """Return "ready 1/2" if replicas serve; else the state of the model, or its first replica."""
    serving = sum(one.state == "ready" for one in model.replicas)
    if serving:
        text = state_text("ready")
        if serving < len(model.replicas):
            text = Text(f"ready {serving}/{len(model.replicas)}", style="yellow")
        return text
    if model.residence is not None:
        return state_text(model.residence.tier)
    return state_text(model.replicas[0].state if model.replicas else "stopped")


def _worker(model: ModelStatus, replica: ReplicaStatus) -> list[Text]:
    serves = replica.state == "ready" and replica not in model.standbys
    return [
        Text(f"  {one_line(replica.name)}"),
        state_text(replica.state),
        Text(),
        _count(replica.running) if serves else Text(),
        _count(replica.waiting) if serves else Text(),
        Text(f"{replica.kv_used * 100:.0f}%" if serves and replica.kv_used else ""),
        Text(),
        _count(replica.restarts),
        Text(format_size(replica.gpu_bytes or replica.rss_bytes)),
        Text(one_line(f"{replica.device}  {replica_note(model, replica)}"), style="dim"),
    ]


def _gateway(gateway: GatewayStatus) -> list[Text]:
    told = gateway_note(gateway) or f"requests so far: {gateway.requests}"
    return [
        Text(gateway.name, style="bold"),
        state_text(gateway.state),
        Text(),
        _count(gateway.in_flight),
        *(Text() for _ in range(3)),
        _count(gateway.restarts),
        Text(format_size(gateway.rss_bytes)),
        Text(one_line(told), style="dim"),
    ]


def _count(number: int) -> Text:
    return Text(str(number), style="" if number else "dim")


def _name_width(rows: Sequence[Sequence[Text]], width: int) -> int:
    """Return the width of the name column: the remaining width in a narrow window; in a wide one
    the width of the names, as far as the notes leave it or keep `_LEAST_NOTES`.
    """
    left = width - sum(_WIDTHS[1:]) - len(_WIDTHS)
    if width < _WITH_NOTES:
        return min(_MOST_NAME, max(_WIDTHS[0], left))
    names = max((cell_len(cells[0].plain) for cells in rows), default=0)
    notes = max((cell_len(cells[-1].plain) for cells in rows), default=0)
    room = left - min(notes, _LEAST_NOTES)
    return min(_MOST_NAME, max(_WIDTHS[0], min(names, room)))


def _row(cells: Sequence[Text], width: int, name: int) -> Text:
    """Arrange cells in columns, the first `name` wide; the last takes the remaining width.

    In a narrow window the last cell is left out.
    """
    text = Text()
    for number, (found, own) in enumerate(zip(cells, _WIDTHS, strict=False)):
        room = own if number else name
        found = found.copy()
        if number in _RIGHT:
            found.align("right", room)
        if not number:
            found = Text(shorten_text(found.plain, room), style=found.style)
        found = _sized(found, room)
        text.append_text(found).append(" ")
    return text.append_text(cells[-1]) if width >= _WITH_NOTES else text


def _sized(text: Text, room: int) -> Text:
    """Cut or pad text to exactly this width on a terminal, whatever its characters."""
    style = text.style or (text.spans[0].style if text.spans else "")
    shown = text.plain
    if cell_len(shown) > room:
        shown = f"{set_cell_size(shown, room - 1)}…"
    return Text(set_cell_size(shown, room), style=style)
