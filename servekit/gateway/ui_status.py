"""What the page shows beside the conversation: workers, and where an answer is. HTML, escaped."""

from __future__ import annotations

from html import escape

from servekit.gateway.adapted import AdapterRoute
from servekit.gateway.router import Route, Router, describe
from servekit.gateway.ui_chat import Progress
from servekit.wire.messages import ReplicaStatus

MARK = {"ready": "good", "failed": "bad", "stopped": "bad", "backoff": "bad"}


def workers(router: Router) -> str:
    """Every model with its workers, as HTML."""
    if router.draining:
        return '<p class="sk-quiet" role="status">servekit is shutting down.</p>'
    if not router.routes:
        return '<p class="sk-quiet">Waiting for the first model…</p>'
    return "".join(_model(route) for route in router.routes.values())


def choices(router: Router) -> list[tuple[str, str]]:
    """The models to choose from: (label, name)."""
    named = ((one.status.name, one) for r in router.routes.values() for one in (r, *r.adapters))
    return [(_label(route), name) for name, route in named]


def progress_note(progress: Progress, *, busy: bool) -> str:
    """One line beneath the conversation, as HTML."""
    return f'<p class="sk-note" role="status">{escape(_sentence(progress, busy))}</p>'


def error_note(message: str) -> str:
    """A sentence about what went wrong, as HTML."""
    sentence = message[:1].upper() + message[1:]
    return f'<p class="sk-note sk-error" role="alert">{escape(sentence)}</p>'


# ---------------------------------------------------------------- workers


def _label(route: Route) -> str:
    name = route.status.name
    if route.ready:
        return name
    if isinstance(route, AdapterRoute) and route.adapter.state != "serving":
        return f"{name} · {route.adapter.state}"
    states = {replica.state for replica in route.status.replicas}
    first = next(iter(route.status.replicas), None)
    residence = route.status.residence
    if residence is not None and residence.tier in ("stopped", "asleep"):
        return f"{name} · {residence.tier}"
    if first is None or states <= {"ready"}:
        return f"{name} · starting"
    coming = [r for r in route.status.replicas if r.state in ("loading", "starting")]
    if coming:
        return f"{name} · {describe(coming[0])}"
    return f"{name} · {first.state}"


def _model(route: Route) -> str:
    info = route.status.info
    facts = [route.status.engine]
    if info is not None:
        facts += [info.dtype] if info.dtype != "none" else []
        facts.append(f"{info.max_context:,} tokens of context".replace(",", " "))
    waiting = f" · <b>{len(route.queue)} waiting</b>" if len(route.queue) else ""
    replicas = "".join(map(_replica, route.status.replicas))
    residence = route.status.residence
    if residence is not None and residence.tier != "resident":
        facts.append(residence.reason or residence.tier)
    return (
        f'<section class="sk-model"><h3>{escape(route.status.name)}</h3>'
        f'<p class="sk-quiet">{escape(" · ".join(facts))}{waiting}</p>{_adapters(route)}'
        f"<ul>{replicas}</ul></section>"
    )


def _adapters(route: Route) -> str:
    """Its adapters, with what keeps those from serving that do not."""
    if not route.status.adapters:
        return ""
    told = [
        one.name if one.state == "serving" else f"{one.name} ({one.reason or one.state})"
        for one in route.status.adapters
    ]
    return f'<p class="sk-quiet">adapters: {escape(", ".join(told))}</p>'


def _replica(replica: ReplicaStatus) -> str:
    mark = MARK.get(replica.state, "busy")
    facts = [replica.device] if replica.device else []
    if replica.state == "ready":
        facts.append(f"{replica.running} running")
        facts += [f"{replica.waiting} waiting"] if replica.waiting else []
    if used_bytes := replica.gpu_bytes or replica.rss_bytes:
        facts.append(_size(used_bytes))
    if replica.restarts:
        facts.append(f"{replica.restarts} restart{'s' if replica.restarts > 1 else ''}")
    return (
        f'<li><span class="sk-dot sk-{mark}"></span><span class="sk-name">{escape(replica.name)}'
        f'</span><span class="sk-state">{escape(_state(replica))}</span>'
        f'<span class="sk-facts">{escape(" · ".join(facts))}</span>'
        f"{_bar(replica)}{_reason(replica)}</li>"
    )


def _state(replica: ReplicaStatus) -> str:
    if replica.state == "loading":
        return describe(replica)
    return "restarting" if replica.state == "backoff" else replica.state


def _bar(replica: ReplicaStatus) -> str:
    if replica.state not in ("loading", "starting"):
        return ""
    progress = replica.progress
    if progress is None or not progress.total:
        return "<progress></progress>"
    return f'<progress value="{progress.done}" max="{progress.total}"></progress>'


def _reason(replica: ReplicaStatus) -> str:
    if not replica.reason:
        return ""
    return f'<span class="sk-reason">{escape(replica.reason)}</span>'


# ---------------------------------------------------------------- where an answer is


def _sentence(progress: Progress, busy: bool) -> str:
    if progress.waiting is not None:
        return _queue_sentence(progress.waiting)
    if not progress.tokens:
        return "Reading the prompt…" if busy else "Stopped"
    parts = [_count(progress.tokens, "token")]
    if progress.rate is not None:
        parts.append(f"{progress.rate:.1f} tokens/s")
    if progress.first_s is not None:
        parts.append(f"first after {_duration(progress.first_s)}")
    if progress.finish == "cancelled":
        parts.append("stopped")
    if progress.finish == "length":
        parts.append("length limit reached")
    return " · ".join(parts)


def _queue_sentence(before: int) -> str:
    return f"{_count(before, 'request')} before yours" if before else "Yours is next"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
