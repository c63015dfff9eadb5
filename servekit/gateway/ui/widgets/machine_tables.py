"""The dashboard's tables as HTML: GPUs, workers, gateways, and recent events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.status_html import MARK, state_words
from servekit.gateway.ui.widgets.answer_html import clean_text, format_moment
from servekit.gateway.ui.widgets.status_poller import Happening
from servekit.protocol.messages import GatewayStatus, GpuStatus, ModelStatus, ReplicaStatus
from servekit.units import format_bytes

#: The most characters of a reason: `servekit why` has the rest.
REASON_CHARS = 400
SHOWN_HAPPENINGS = 30
#: The number of colours for the workers on one GPU.
COLOURS = 5


def render_gpus(found: Sequence[GpuStatus], models: Sequence[ModelStatus], say: Say) -> str:
    """Return each GPU's memory by worker, and its utilisation; "" on a machine without GPUs."""
    workers = [one for model in models for one in (*model.replicas, *model.standbys)]
    return "".join(_render_gpu(gpu, workers, say) for gpu in found)


def _render_gpu(gpu: GpuStatus, workers: Iterable[ReplicaStatus], say: Say) -> str:
    held = [
        (worker.name, size)
        for worker in workers
        for uuid, size in zip(worker.gpus, worker.held_bytes, strict=False)
        if uuid == gpu.uuid and size
    ]
    rest = gpu.used_bytes - sum(size for _, size in held)
    held += [(say("gpu.others"), rest)] if rest > gpu.total_bytes // 200 else []
    bars = "".join(
        f'<span class="sk-share{at % COLOURS}" style="width:{100 * size / gpu.total_bytes:.2f}%">'
        "</span>"
        for at, (_, size) in enumerate(held)
    )
    names = "".join(
        f'<li><span class="sk-swatch sk-share{at % COLOURS}"></span>{escape(name)} '
        f"<b>{format_bytes(size)}</b></li>"
        for at, (name, size) in enumerate(held)
    )
    of = f"{format_bytes(gpu.used_bytes)} / {format_bytes(gpu.total_bytes)}"
    busy = "" if gpu.utilisation is None else say("gpu.busy", percent=round(100 * gpu.utilisation))
    kind = " · ".join(filter(None, (gpu.name, gpu.node)))
    return (
        f'<section class="sk-gpu"><h3>GPU {gpu.index} <span class="sk-quiet">{escape(kind)}'
        f'</span></h3><p class="sk-quiet">{of}{" · " if busy else ""}{escape(busy)}</p>'
        f'<div class="sk-memory" role="img" aria-label="{escape(say("gpu.label", of=of))}">{bars}'
        f"</div><ul>{names}</ul></section>"
    )


def render_workers(models: Sequence[ModelStatus], say: Say) -> str:
    """Return a table of all workers, one per row; on a phone, each row is a card."""
    names = ("worker", "state", "device", "requests", "cache", "memory", "restarts")
    heads = "".join(f'<th scope="col">{escape(say(f"workers.{name}"))}</th>' for name in names)
    rows = "".join(_render_worker(one, names, say) for model in models for one in model.replicas)
    rows += "".join(_render_away(model, len(names), say) for model in models if not model.replicas)
    caption = escape(say("workers.caption"))
    return (
        f'<div class="sk-scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="sk-workers"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _render_worker(one: ReplicaStatus, names: Sequence[str], say: Say) -> str:
    mark = MARK.get(one.state, "busy")
    memory = format_bytes(one.gpu_bytes or one.rss_bytes) if one.gpu_bytes or one.rss_bytes else "–"
    cells = (
        escape(one.name),
        f'<span class="sk-dot sk-{mark}"></span> {escape(state_words(one, say))}',
        escape(one.device or "–"),
        f"{one.running} + {one.waiting}",
        f"{100 * one.kv_used:.0f} %" if one.kv_used else "–",
        memory,
        str(one.restarts),
    )
    told = "".join(
        f'<td data-label="{escape(say(f"workers.{name}"))}">{cell}</td>'
        for name, cell in zip(names[1:], cells[1:], strict=True)
    )
    row = f'<tr class="sk-{mark}-row"><th scope="row">{cells[0]}</th>{told}</tr>'
    said = one.reason or one.trouble or one.stray or one.excess
    return row + (render_reason(said, len(names), say) if said else "")


def shorten_reason(reason: str, say: Say) -> str:
    """Return the beginning of a reason, as text without control characters."""
    told = clean_text(say.translate(reason))
    return told[:REASON_CHARS] + ("…" if len(told) > REASON_CHARS else "")


def render_reason(reason: str, width: int, say: Say) -> str:
    """Return a row beneath a worker's: why it has failed, or is in trouble."""
    short = shorten_reason(reason, say)
    return f'<tr class="sk-why"><td colspan="{width}">{escape(short)}</td></tr>'


def _render_away(model: ModelStatus, width: int, say: Say) -> str:
    tier = model.residence.tier if model.residence is not None else "stopped"
    words = f"{model.name}: {say(f'tier.{tier}')}"
    return f'<tr class="sk-away"><td colspan="{width}">{escape(words)}</td></tr>'


def render_gateways(found: Sequence[GatewayStatus], say: Say) -> str:
    """Return a list of the gateways, one per line."""
    rows = "".join(
        f'<li><span class="sk-dot sk-{MARK.get(one.state, "busy")}"></span> <b>{escape(one.name)}'
        f"</b> {escape(say(f'state.{one.state}'))} · "
        f"{escape(say('gateways.counts', requests=f'{one.requests:,}', open=one.in_flight))} · "
        f"{format_bytes(one.rss_bytes)} · {escape(say.count('restart', one.restarts))}"
        f"{' · ' if one.reason else ''}{escape(shorten_reason(one.reason, say))}</li>"
        for one in found
    )
    return f'<ul class="sk-gateways">{rows}</ul>'


def render_events(found: Sequence[Happening], say: Say) -> str:
    """Return the latest events, the newest first, in UTC: visitors' time zones are unknown."""
    if not found:
        return f'<p class="sk-quiet">{escape(say("events.none"))}</p>'
    rows = "".join(_render_event(one, say) for one in reversed(found[-SHOWN_HAPPENINGS:]))
    return f'<ol class="sk-events" aria-label="{escape(say("events.title"))}">{rows}</ol>'


def _render_event(one: Happening, say: Say) -> str:
    at = format_moment(one.at, time.time())
    detail = shorten_reason(one.detail, say)
    bad = " sk-bad-event" if one.kind in ("died", "state.failed", "trouble") else ""
    more = f' <span class="sk-detail-words">{escape(detail)}</span>' if detail else ""
    return (
        f'<li class="sk-event{bad}"><time>{at}</time> <b>{escape(one.name)}</b> '
        f"{escape(say(one.kind))}{more}</li>"
    )
