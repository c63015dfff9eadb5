"""The list of a browser's conversations, as HTML that conversations.js fills in.

The browser alone has the conversations: the page only brings the words and the places.
"""

from __future__ import annotations

import json
from html import escape

from servekit.gateway.ui.conversation import NOT_MADE, THOUGHTS
from servekit.gateway.ui.pages.language import Say

#: The texts of conversations.js, with the names of their fields.
_TEXTS = {
    "none": (),
    "none_fits": (),
    "more": ("title",),
    "sure": ("title",),
    "image": (),
    "full": (),
    "unkept": (),
    "fork": (),
    "you": (),
    "model": (),
    "call": ("tool", "server"),
}
#: Icons: a list, and sliders.
_LIST = "M2.5 4h11M2.5 8h11M2.5 12h7"
_SLIDERS = "M2.5 5h5M11.5 5h2M2.5 11h2M8.5 11h5M9.5 3.2v3.6M6.5 9.2v3.6"


def render_tools(say: Say) -> str:
    """Return the buttons of narrow screens: for the list, and to the settings.

    They also bring the names of the buttons that Gradio leaves without.
    """
    return (
        f'<div class="sk-chat-tools" data-send="{escape(say("chat.send"))}" '
        f'data-stop="{escape(say("stop"))}">'
        f'<button type="button" class="sk-drawer-button" aria-expanded="false" '
        f'aria-label="{escape(say("kept"))}" title="{escape(say("kept"))}">{_draw(_LIST)}</button>'
        f'<a class="sk-side-link" href="#sk-side" aria-label="{escape(say("chat.settings"))}" '
        f'title="{escape(say("chat.settings"))}">{_draw(_SLIDERS)}</a></div>'
    )


def render_drawer(say: Say) -> str:
    """Return the list, and the dialog that renames, exports and deletes one of it."""
    texts = {
        name: say(f"kept.{name}", **{field: f"{{{field}}}" for field in fields})
        for name, fields in _TEXTS.items()
    }
    texts["not_made"] = NOT_MADE  # as the model was told
    return (
        f'<section class="sk-kept" aria-label="{escape(say("kept"))}" lang="{say.language}" '
        f'data-texts="{escape(json.dumps(texts))}" data-thoughts="{escape(json.dumps(THOUGHTS))}">'
        f'<h2>{escape(say("kept"))}</h2><input type="search" autocomplete="off" '
        f'placeholder="{escape(say("kept.search"))}" aria-label="{escape(say("kept.search"))}">'
        '<ul role="list"></ul><p class="sk-quiet" role="status"></p>'
        f'<dialog class="sk-edit" aria-label="{escape(say("kept.title"))}"><div class="sk-choices">'
        f'<label>{escape(say("kept.title"))}<input type="text" maxlength="200"></label>'
        f"{_render_buttons(say, 'rename', 'markdown', 'json', 'delete', 'close')}</div>"
        f'<div class="sk-sure" hidden><p></p>{_render_buttons(say, "delete_it", "cancel")}</div>'
        "</dialog></section>"
    )


def render_alert(say: Say) -> str:
    """Return the page's heading, and the place for what goes wrong with the store."""
    heading = f'<h1 class="sk-unseen">{escape(say("nav.chat"))}</h1>'
    return f'{heading}<p class="sk-note sk-error" role="alert"></p>'


def render_gone(say: Say) -> str:
    """Return the place for the words that stand for the status while no server answers."""
    return f'<p class="sk-note sk-error" role="alert" data-text="{escape(say("chat.gone"))}"></p>'


def _render_buttons(say: Say, *acts: str) -> str:
    return "".join(
        f'<button type="button" data-act="{act}">{escape(say(f"kept.{act}"))}</button>'
        for act in acts
    )


def _draw(path: str) -> str:
    return (
        '<svg viewBox="0 0 16 16" width="18" height="18" fill="none" stroke="currentColor" '
        f'stroke-width="1.4" stroke-linecap="round" aria-hidden="true"><path d="{path}"/></svg>'
    )
