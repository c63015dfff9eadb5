"""The tools of MCP servers on the chat page: their list, and the question before each call.

All names and descriptions come from those servers or from the model, and are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from servekit.gateway.tool_servers.messages import Ready
from servekit.gateway.ui.conversation import StoredCall
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.status_html import error_note
from servekit.gateway.ui.widgets.answer_html import clean_text

_MOST_DESCRIPTION_CHARS = 300


def render_servers(listed: Mapping[str, Ready | str], say: Say) -> str:
    """Return the tools of each chosen server, or why it has none."""
    return "".join(
        error_note(
            say("mcp.unusable", server=clean_text(name), reason=clean_text(say.translate(found)))
        )
        if isinstance(found, str)
        else _render_tools(name, found, say)
        for name, found in listed.items()
    )


def _render_tools(name: str, found: Ready, say: Say) -> str:
    items = "".join(
        f"<li><b>{_clean(tool.name)}</b> {_clean(tool.description[:_MOST_DESCRIPTION_CHARS])}</li>"
        for tool in found.tools
    )
    left_out = "".join(f'<li class="sk-quiet">{_clean(one)}</li>' for one in found.left_out)
    summary = escape(f"{clean_text(name)} · {say.count('mcp.count', len(found.tools))}")
    return (
        f'<details class="sk-server"><summary>{summary}</summary>'
        f"<ul>{items}{left_out}</ul></details>"
    )


def render_question(call: StoredCall, say: Say) -> str:
    """Return whether the visitor allows a call, with buttons that chat.js handles."""
    tool, server = clean_text(call["tool"]), clean_text(call["server"])
    buttons = "".join(
        f'<button type="button" data-decide="{escape(call["id"])} {decision}">'
        f"{escape(say(f'mcp.{decision}', tool=tool))}</button>"
        for decision in ("allow", "always", "decline")
    )
    asks = escape(say("mcp.asks", tool=tool, server=server))
    return (
        f'<div class="sk-decide" role="group" aria-label="{asks}">'
        f'<p class="sk-note" role="alert">{asks}</p>{buttons}</div>'
    )


def _clean(text: str) -> str:
    return escape(clean_text(text))
