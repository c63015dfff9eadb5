"""Images in the chat: the part of the page that adds them.

The browser holds the files: images.js picks, checks, shows and keeps them, and sends them with each
question. Gradio's own fields would store them on the gateway's disk instead.
"""

from __future__ import annotations

import json
from html import escape

from servekit.gateway.api.images import MAX_PIXELS
from servekit.gateway.ui.pages.language import Say

#: The share of a request's body that images may take; in base64 they are a third larger.
_SHARE = 2 / 3
#: The sentences of images.js, with the names of their fields.
_TEXTS = {
    "kind": ("name",),
    "broken": ("name",),
    "large": ("name", "size", "most"),
    "pixels": ("name", "size", "most"),
    "many": ("most",),
    "unkept": ("name",),
    "lost": (),
    "added": ("name",),
    "remove": ("name",),
    "removed": ("name",),
}
#: An icon: a picture.
_PICTURE = (
    '<svg viewBox="0 0 16 16" width="18" height="18" fill="none" stroke="currentColor" '
    'stroke-width="1.3" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">'
    '<rect x="2" y="2.5" width="12" height="11" rx="2"/><circle cx="5.7" cy="6" r="1.1"/>'
    '<path d="M2.5 11.5l3.2-2.8 2.3 1.8 2.7-3 3 2.8"/></svg>'
)


def render_picker(say: Say, max_body_bytes: int) -> str:
    """Return the list of picked images, the line for what is wrong, and the button, as HTML.

    images.js fills it in, so the page never updates it.
    """
    texts = {
        name: say(f"images.{name}", **{field: f"{{{field}}}" for field in fields})
        for name, fields in _TEXTS.items()
    }
    add = escape(say("images.add"))
    return (
        f'<div class="sk-images" data-most-bytes="{int(max_body_bytes * _SHARE)}" '
        f'data-most-pixels="{MAX_PIXELS}" data-texts="{escape(json.dumps(texts))}">'
        f'<ul class="sk-picked" role="list" aria-label="{escape(say("images.picked"))}"></ul>'
        '<p class="sk-note sk-error" role="alert"></p><p class="sk-unseen" role="status"></p>'
        f'<button type="button" class="sk-attach" aria-label="{add}" title="{add}" '
        f'aria-disabled="false">{_PICTURE}</button><input type="file" multiple hidden '
        'accept="image/png,image/jpeg,image/webp,image/gif"></div>'
    )


def render_sight(blind: str = "", most: int | None = None) -> str:
    """Return what images.js has to know of the model and the server, as HTML.

    `blind` is why the model takes no images; `most` is the limit of a conversation, if it is known.
    """
    limit = "" if most is None else f' data-most="{most}"'
    return f'<div class="sk-sight" hidden data-blind="{escape(blind)}"{limit}></div>'
