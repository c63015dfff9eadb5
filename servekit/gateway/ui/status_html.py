"""The HTML beside the conversation: workers, and the progress of an answer. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from servekit.gateway.api.audio.endpoints import TRANSCRIPTIONS
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.adapter_route import AdapterRoute, base_of
from servekit.gateway.routing.router import ModelQueue, Router
from servekit.gateway.routing.task_check import MOST_NAMES, known_info, serves_any
from servekit.gateway.ui.pages.language import SAY_ENGLISH, Say
from servekit.gateway.ui.widgets.request_runner import Progress
from servekit.protocol.messages import ReplicaStatus
from servekit.protocol.types import Capability
from servekit.units import format_bytes, format_latency

#: Endpoints that servers behind a model may have, by task.
_ENDPOINTS = {"transcribe": TRANSCRIPTIONS}
MARK = {"ready": "good", "failed": "bad", "stopped": "bad", "backoff": "bad"}


def render_status(
    router: Router, model: str | None, say: Say = SAY_ENGLISH, caller: ApiKey | None = None
) -> str:
    """Return the state of a model and its workers as HTML; "" for one that nobody serves.

    Of a preset or an adapter, that of its model. `caller` as in `list_choices`.
    """
    if router.draining:
        return f'<p class="sk-quiet" role="status">{escape(say("draining"))}</p>'
    if not router.routes:
        return f'<p class="sk-quiet">{escape(say("no_models"))}</p>'
    if not model or not router.serves(model):
        return ""
    route = router.find(model).base
    return _render_model(route, say) if may_see(router, caller, route.status.name) else ""


def may_see(router: Router, caller: ApiKey | None, model: str) -> bool:
    """Return whether a visitor may see a model, by its own name. Without keys, all may."""
    return not router.access.closed or (caller is not None and caller.may_use(model))


def list_choices(
    router: Router, say: Say = SAY_ENGLISH, caller: ApiKey | None = None, task: str = ""
) -> list[tuple[str, str]]:
    """Return the models, presets and adapters that a visitor may use for `task`: (label, name).

    With keys, `caller` is the visitor's key; an unknown visitor sees none. Those that are known to
    serve the task come first: a page begins with the first one.
    """
    found = [route for route in _list_usable(router, caller) if _can_serve(route, task)]
    found.sort(key=lambda route: bool(task) and not _is_known_to_serve(route, task))
    return [(_make_label(route, say), route.status.name) for route in found]


def explain_unable(
    router: Router, say: Say, caller: ApiKey | None, model: str | None, what: Capability
) -> str:
    """Return why a model takes no "images" or calls no "tools", with the models that do; else "".

    `caller` as in `list_choices`.
    """
    if not model or not router.serves(model):
        return ""
    info = known_info(router.find(model))
    if info is None or what in info.serves:
        return ""
    usable = _list_usable(router, caller)
    able = [route.status.name for route in usable if serves_any(route, (what,))]
    if not able:
        return say(f"{what}.unable_all", model=model)
    return say(f"{what}.unable", model=model, names=", ".join(able[:MOST_NAMES]))


def _list_usable(router: Router, caller: ApiKey | None) -> Iterator[ModelQueue]:
    """Yield the models, presets and adapters that a visitor may use."""
    for model in router.routes.values():
        if model.status.left_out:
            continue
        for route in (model, *model.presets, *model.adapters):
            if not router.access.closed or _may_use(caller, route):
                yield route


def _may_use(caller: ApiKey | None, route: ModelQueue) -> bool:
    return caller is not None and caller.may_use(route.status.name, base_of(route))


def _can_serve(route: ModelQueue, task: str) -> bool:
    """Return whether a model serves `task`; a model not loaded yet counts as serving."""
    return not task or route.status.info is None or _is_known_to_serve(route, task)


def _is_known_to_serve(route: ModelQueue, task: str) -> bool:
    """Return whether a model, or the server behind it by its endpoints, serves `task`."""
    info = route.status.info
    has_endpoint = _ENDPOINTS.get(task) in route.status.endpoints
    return has_endpoint or (info is not None and task in info.serves)


def progress_note(progress: Progress, *, busy: bool, say: Say = SAY_ENGLISH) -> str:
    """Return the line beneath the conversation, as HTML."""
    return render_note(_describe_progress(progress, busy, say))


def render_note(sentence: str) -> str:
    """Return a sentence as a line of HTML."""
    return f'<p class="sk-note" role="status">{escape(sentence)}</p>'


def error_note(message: str, say: Say = SAY_ENGLISH) -> str:
    """Return an error's sentence, as HTML."""
    sentence = say.translate(message)
    sentence = sentence[:1].upper() + sentence[1:]
    return f'<p class="sk-note sk-error" role="alert">{escape(sentence)}</p>'


def retry_note(note: str, say: Say) -> str:
    """Return a note with a button that asks the last question again, which ui.js presses."""
    button = f'<button type="button" class="sk-retry">{escape(say("chat.retry"))}</button>'
    return f'<div class="sk-failed">{note}{button}</div>'


# ---------------------------------------------------------------- workers


def _make_label(route: ModelQueue, say: Say) -> str:
    name = route.status.name
    if route.ready:
        return name
    if isinstance(route, AdapterRoute) and route.adapter.state != "serving":
        return f"{name} · {say(f'adapter.{route.adapter.state}')}"
    states = {replica.state for replica in route.status.replicas}
    first = next(iter(route.status.replicas), None)
    residence = route.status.residence
    if residence is not None and residence.tier in ("stopped", "asleep"):
        return f"{name} · {say(f'tier.{residence.tier}')}"
    if first is None or states <= {"ready"}:
        return f"{name} · {say('state.starting')}"
    coming = [r for r in route.status.replicas if r.state in ("loading", "starting")]
    return f"{name} · {state_words(coming[0] if coming else first, say)}"


def _render_model(route: ModelQueue, say: Say) -> str:
    info = route.status.info
    facts = [route.status.engine]
    if info is not None:
        facts += [info.dtype] if info.dtype != "none" else []
        facts.append(say("context", count=f"{info.max_context:,}".replace(",", " ")))
    waiting = f" · <b>{escape(say('waiting', count=len(route.queue)))}</b>"
    replicas = "".join(_render_replica(replica, say) for replica in route.status.replicas)
    residence = route.status.residence
    if residence is not None and residence.tier != "resident":
        facts.append(say.translate(residence.reason) or say(f"tier.{residence.tier}"))
    return (
        f'<section class="sk-model"><h2>{escape(route.status.name)}</h2><p class="sk-quiet">'
        f"{escape(' · '.join(facts))}{waiting if len(route.queue) else ''}</p>"
        f"{_render_presets(route, say)}{_render_adapters(route, say)}<ul>{replicas}</ul></section>"
    )


def _render_presets(route: ModelQueue, say: Say) -> str:
    """Return the names of the model's presets."""
    if not route.status.presets:
        return ""
    names = ", ".join(preset.name for preset in route.status.presets)
    return f'<p class="sk-quiet">{escape(say("presets", names=names))}</p>'


def _render_adapters(route: ModelQueue, say: Say) -> str:
    """Return the model's adapters, with the reason for each that does not serve."""
    if not route.status.adapters:
        return ""
    told = [
        one.name
        if one.state == "serving"
        else f"{one.name} ({say.translate(one.reason) or say(f'adapter.{one.state}')})"
        for one in route.status.adapters
    ]
    return f'<p class="sk-quiet">{escape(say("adapters", names=", ".join(told)))}</p>'


def _render_replica(replica: ReplicaStatus, say: Say) -> str:
    mark = MARK.get(replica.state, "busy")
    facts = [replica.device] if replica.device else []
    if replica.state == "ready":
        facts.append(say("running", count=replica.running))
        facts += [say("waiting", count=replica.waiting)] if replica.waiting else []
    if used_bytes := replica.gpu_bytes or replica.rss_bytes:
        facts.append(format_bytes(used_bytes))
    if replica.restarts:
        facts.append(say.count("restart", replica.restarts))
    return (
        f'<li><span class="sk-dot sk-{mark}"></span><span class="sk-name">{escape(replica.name)}'
        f'</span><span class="sk-state">{escape(state_words(replica, say))}</span>'
        f'<span class="sk-facts">{escape(" · ".join(facts))}</span>'
        f"{_render_bar(replica)}{_render_reason(replica, say)}</li>"
    )


def state_words(replica: ReplicaStatus, say: Say) -> str:
    """Return a worker's state or load progress in a few words."""
    progress = replica.progress
    if replica.state not in ("loading", "starting") or progress is None:
        return say(f"state.{replica.state}")
    phase = say.name_phase(progress.phase)
    return f"{phase}, {100 * progress.done // progress.total} %" if progress.total else phase


def _render_bar(replica: ReplicaStatus) -> str:
    if replica.state not in ("loading", "starting"):
        return ""
    progress = replica.progress
    name = f'aria-label="{escape(replica.name)}"'
    if progress is None or not progress.total:
        return f"<progress {name}></progress>"
    return f'<progress {name} value="{progress.done}" max="{progress.total}"></progress>'


def _render_reason(replica: ReplicaStatus, say: Say) -> str:
    """Return why a worker does not serve; once it is ready, how its last life ended is over."""
    reason = replica.trouble if replica.state == "ready" else replica.reason
    return f'<span class="sk-reason">{escape(say.translate(reason))}</span>' if reason else ""


# ---------------------------------------------------------------- progress of an answer


def _describe_progress(progress: Progress, busy: bool, say: Say) -> str:
    if progress.waiting is not None:
        return _describe_wait(progress.waiting, progress.route, say)
    if not progress.tokens and (busy or progress.finish in (None, "cancelled")):
        return say("reading") if busy else say("stopped")
    parts = [say.count("token", progress.tokens)]
    if progress.rate is not None:
        parts.append(say("rate", rate=f"{progress.rate:.1f}"))
    if progress.first_s is not None:
        parts.append(say("first", after=format_latency(progress.first_s)))
    if progress.finish == "cancelled":
        parts.append(say("cancelled"))
    if progress.finish == "length":
        parts.append(say("length"))
    return " · ".join(parts)


def _describe_wait(ahead: int, route: ModelQueue | None, say: Say) -> str:
    """Return what a request waits for: its model, or those ahead of it."""
    if route is None or route.ready:
        return say.count("queue", ahead) if ahead else say("queue.next")
    coming = [one for one in route.status.replicas if one.state in ("loading", "starting")]
    words = [state_words(one, say) for one in coming if one.progress is not None]
    parts = [say("queue.model", model=route.status.name), *words[:1]]
    return " · ".join([*parts, say.count("queue", ahead)] if ahead else parts)
