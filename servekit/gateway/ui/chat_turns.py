"""A conversation as messages of Gradio's chatbot: texts, images and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from servekit.gateway.ui.conversation import StoredCall, StoredImage, StoredMessage
from servekit.gateway.ui.markdown import mark_formulas
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets.answer_html import clip_text


def show_turns(turns: Sequence[StoredMessage], say: Say) -> list[dict[str, Any]]:
    """Return a conversation as messages: images before their text, calls after it."""
    shown: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn["role"], turn["content"]
        images, calls = turn.get("images", []), turn.get("calls", [])
        if images:
            shown.append({"role": role, "content": _make_component(_show_images(images))})
        if role == "assistant":  # what the user wrote can be edited where it is shown
            content = mark_formulas(content)
        if content or not (images or calls):
            shown.append({"role": role, "content": content})
        if calls:
            html = "".join(_show_call(call, say) for call in calls)
            shown.append({"role": role, "content": _make_component(html)})
    return shown


def _make_component(html: str) -> dict[str, Any]:
    return {
        "type": "component",
        "component": "html",
        "value": html,
        "constructor_args": {},
        "props": {"apply_default_css": False},
    }


def _show_images(images: Sequence[StoredImage]) -> str:
    """Return the images of a turn; images.js loads each by its id."""
    html = "".join(
        f'<img data-image="{escape(one["id"])}" alt="{escape(one["name"])}" '
        f'title="{escape(one["name"])}">'
        for one in images
    )
    return f'<div class="sk-sent">{html}</div>'


def _show_call(call: StoredCall, say: Say) -> str:
    """Return a call with its arguments and its result; unfolded until it has been made."""
    outcome = call.get("outcome", "asked")
    parts = [_show_text(say("mcp.arguments"), _lay_out(call["arguments"]), say)]
    if "result" in call:
        parts.append(_show_text(say("mcp.result"), call["result"], say))
    is_open = " open" if outcome == "asked" else ""
    server = f"<span>{clip_text(call['server'], say)}</span>" if call["server"] else ""
    return (
        f'<details class="sk-call" data-outcome="{escape(outcome)}"{is_open}><summary>'
        f"<b>{clip_text(call['tool'], say)}</b>{server}"
        f"<i>{escape(say(f'mcp.outcome.{outcome}'))}</i></summary>{''.join(parts)}</details>"
    )


def _show_text(title: str, text: str, say: Say) -> str:
    label = escape(title)
    return (
        f'<p>{label}</p><pre tabindex="0" role="region" aria-label="{label}">'
        f"{clip_text(text, say)}</pre>"
    )


def _lay_out(arguments: str) -> str:
    """Return JSON with a line for each field; other text as it is."""
    try:
        return json.dumps(json.loads(arguments or "{}"), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
