"""The table of Operate: a row for each model and for each of several workers, with buttons.

A button that would be refused is marked as disabled, with the reason as its tooltip. It can still
be focused and pressed, so that a keyboard and a phone get the reason, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Literal

from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.status_html import MARK, state_words
from servekit.gateway.ui.widgets.machine_tables import render_reason, shorten_reason
from servekit.protocol.messages import ModelStatus, ReplicaStatus, Status
from servekit.protocol.residency import Residency
from servekit.units import format_bytes

Act = Literal["load", "unload", "sleep", "wake", "restart"]
ACTS: tuple[Act, ...] = ("load", "unload", "sleep", "wake", "restart")
_COLUMNS = ("model", "state", "now", "device", "memory", "actions")
_MARKS = {"resident": "good", "failed": "bad", "stopped": "off", "asleep": "off"}
#: Passes a press on a button of the table on to the page's event `click`. The second press of a
#: double click would be refused, as the first is being carried out.
ON_LOAD = (
    "element.addEventListener('click', (event) => {"
    "const button = event.target.closest('[data-act]');"
    "if (button && event.detail < 2) "
    "trigger('click', { act: button.dataset.act, name: button.dataset.name }); });"
)


def find_tier(model: ModelStatus) -> Residency:
    """Return where a model is, also for one that stays loaded."""
    if model.residence is not None:
        return model.residence.tier
    states = {replica.state for replica in model.replicas}
    if "ready" in states:
        return "resident"
    ended = states and states <= {"failed", "stopped"}  # there is none yet of one that comes back
    return "failed" if ended and not model.changing else "coming"


def explain_refusal(model: ModelStatus, act: Act, say: Say) -> str:
    """Return why the supervisor would refuse this now, or why it has no effect; or ""."""
    if model.left_out and act in ("load", "wake"):
        return say("operate.left_out", profile=model.left_out)
    tier = find_tier(model)
    state = say(f"tier.{tier}")
    able = {
        "load": tier not in ("resident", "coming"),
        "unload": tier not in ("stopped", "leaving"),
        "sleep": tier == "resident",
        "wake": tier == "asleep",
        "restart": tier not in ("stopped", "leaving") and not model.changing,
    }[act]
    if not able:
        return say("operate.not_while", state=say("operate.changing") if model.changing else state)
    if act == "sleep" and model.info is not None and not model.info.sleeps:
        return say("operate.sleepless")
    return ""


def render_models(
    models: Sequence[ModelStatus],
    queued: Mapping[str, int],
    chosen: str,
    forbidden: str,
    say: Say,
) -> str:
    """Return the table; on a phone, each row is a card.

    `queued` are the requests that wait in the gateways, by model; `forbidden` is why this visitor
    may press no button, or "".
    """
    rows = "".join(
        _render_model(one, queued.get(one.name, 0), chosen, forbidden, say) for one in models
    )
    heads = "".join(f'<th scope="col">{escape(say(f"operate.{name}"))}</th>' for name in _COLUMNS)
    caption = escape(say("operate.models"))
    return (
        f'<div class="sk-scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="sk-workers sk-operate"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def render_profiles(status: Status, forbidden: str, say: Say) -> str:
    """Return a button for each profile, and one for all models; "" where the file has none."""
    if not status.profiles:
        return ""
    off = f' aria-disabled="true" title="{escape(forbidden)}"' if forbidden else ""
    names = {"all": say("operate.all")} | {name: name for name in status.profiles}
    buttons = "".join(
        f'<button type="button" data-act="profile" data-name="{escape(name)}" '
        f'aria-pressed="{"true" if name == (status.profile or "all") else "false"}"{off}>'
        f"{escape(words)}</button>"
        for name, words in names.items()
    )
    label = escape(say("operate.profile"))
    return (
        f'<div class="sk-acts sk-profiles" role="group" aria-label="{label}">'
        f"<span>{label}</span>{buttons}</div>"
    )


def _render_model(model: ModelStatus, queued: int, chosen: str, forbidden: str, say: Say) -> str:
    tier, replicas = find_tier(model), model.replicas

    def refuse(act: Act) -> str:
        return forbidden or explain_refusal(model, act, say)

    pressed = "true" if model.name == chosen else "false"
    pick = (
        f'<button type="button" class="sk-pick" data-act="show" data-name="{escape(model.name)}" '
        f'aria-pressed="{pressed}">{escape(model.name)}</button>'
        f'<span class="sk-quiet">{escape(model.engine)}</span>'
    )
    cells = (
        _render_state(_MARKS.get(tier, "busy"), say(f"tier.{tier}")),
        escape(_describe_work(model, tier, queued, say)),
        escape(", ".join(dict.fromkeys(one.device for one in replicas if one.device)) or "–"),
        _render_memory(replicas),
        _render_buttons(model.name, ACTS, refuse, say),
    )
    row = _render_row(pick, cells, "", say)
    if len(replicas) > 1:
        row += "".join(_render_worker(one, refuse, say) for one in replicas)
    reasons = dict.fromkeys(one.reason or one.trouble for one in replicas)
    return row + "".join(render_reason(said, len(_COLUMNS), say) for said in reasons if said)


def _render_worker(one: ReplicaStatus, refuse: Callable[[Act], str], say: Say) -> str:
    cells = (
        _render_state(MARK.get(one.state, "busy"), state_words(one, say)),
        escape(_count_requests(one.running, one.waiting, say)),
        escape(one.device or "–"),
        _render_memory([one]),
        _render_buttons(one.name, ("restart",), refuse, say),
    )
    return _render_row(escape(one.name), cells, "sk-part", say)


def _render_row(head: str, cells: Sequence[str], style: str, say: Say) -> str:
    told = "".join(
        f'<td data-label="{escape(say(f"operate.{name}"))}">{cell}</td>'
        for name, cell in zip(_COLUMNS[1:], cells, strict=True)
    )
    return f'<tr class="{style}"><th scope="row">{head}</th>{told}</tr>'


def _render_state(mark: str, words: str) -> str:
    return f'<span class="sk-dot sk-{mark}"></span> {escape(words)}'


def _render_memory(replicas: Sequence[ReplicaStatus]) -> str:
    total = sum(one.gpu_bytes or one.rss_bytes for one in replicas)
    return format_bytes(total) if total else "–"


def _render_buttons(name: str, acts: Sequence[Act], refuse: Callable[[Act], str], say: Say) -> str:
    found = []
    for act in acts:
        verb, why = say(f"operate.{act}"), refuse(act)
        off = f' aria-disabled="true" title="{escape(why)}"' if why else ""
        found.append(
            f'<button type="button" data-act="{act}" data-name="{escape(name)}" '
            f'aria-label="{escape(say("operate.button", verb=verb, name=name))}"{off}>'
            f"{escape(verb)}</button>"
        )
    return f'<div class="sk-acts">{"".join(found)}</div>'


def _describe_work(model: ModelStatus, tier: Residency, queued: int, say: Say) -> str:
    """Return what a model does: its requests, the progress of its load, or why it is away."""
    loading = [one for one in model.replicas if one.state in ("loading", "starting")]
    waiting = queued + sum(one.waiting for one in model.replicas)
    running = sum(one.running for one in model.replicas)
    parts = [state_words(loading[0], say)] if loading else []
    if model.residence is not None and tier != "resident" and model.residence.reason:
        parts.append(shorten_reason(model.residence.reason, say))
    if running or waiting or (tier == "resident" and not parts):
        parts.append(_count_requests(running, waiting, say))
    return " · ".join(parts) or "–"


def _count_requests(running: int, waiting: int, say: Say) -> str:
    if not running and not waiting:
        return say("operate.idle")
    words = [say("running", count=running)]
    return ", ".join([*words, say("waiting", count=waiting)] if waiting else words)
