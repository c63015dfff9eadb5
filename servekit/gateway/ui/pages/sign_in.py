"""The form for the API key, and a notice: pages that need neither Gradio nor any other file."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

from servekit.gateway.ui.pages.language import NAMES, Say, get_root

ICON = (  # inline, so that the browser asks for no favicon
    '<link rel="icon" href="data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 '
    "viewBox=%220 0 16 16%22><rect width=%2216%22 height=%2216%22 rx=%224%22 fill=%22%2314b8a6%22/>"
    '<path d=%22M4 5h8M4 8h8M4 11h5%22 stroke=%22white%22 stroke-width=%221.6%22/></svg>">'
)
STYLE = Path(__file__).parents[1].joinpath("sign_in.css").read_text()
#: Applies the theme chosen on the other pages.
SCRIPT = (
    'const theme = localStorage.getItem("servekit.theme");'
    "if (theme) document.documentElement.dataset.theme = theme;"
)


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash_source(STYLE)}; script-src {_hash_source(SCRIPT)}; "
    "img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def render_form(say: Say, page: str, problem: str = "") -> bytes:
    """Return the form. `page` is the page to go on to; `problem` is shown above the form."""
    here = f"{get_root(say.language)}/login"
    alert = f'<p role="alert" id="problem">{escape(problem)}</p>' if problem else ""
    marks = ' aria-invalid="true" aria-describedby="problem hint"' if problem else ""
    title = escape(say("login.title"))
    return _render_page(
        say,
        page,
        title,
        f'<p id="hint">{escape(say("login.lead"))}</p><form method="post" action="{here}">{alert}'
        f'<label for="key">{escape(say("login.key"))}</label>'
        '<input id="key" name="key" type="password" required autofocus maxlength="512" '
        'autocomplete="current-password" autocapitalize="none" spellcheck="false"'
        f"{marks or ' aria-describedby=hint'}>"
        f'<input type="hidden" name="to" value="{escape(page)}">'
        f"<button>{title}</button></form>",
    )


def render_notice(say: Say, page: str, problem: str) -> bytes:
    """Return a page that says what is wrong with a link, and leads to the page without it."""
    where = f'<a href="{get_root(say.language)}/{page}">{escape(say("login.go_on"))}</a>'
    text = f'<p role="alert" id="problem">{escape(problem)}</p><p>{where}</p>'
    return _render_page(say, page, escape(say("login.title")), text)


def _render_page(say: Say, page: str, title: str, main: str) -> bytes:
    others = "".join(
        f'<a lang="{other}" hreflang="{other}" '
        f'href="{get_root(other)}/login?lang={other}&amp;to={page}">{name}</a>'
        for other, name in NAMES.items()
        if other != say.language
    )
    return (
        f'<!doctype html><html lang="{say.language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · servekit</title>{ICON}<style>{STYLE}</style><script>{SCRIPT}</script>"
        f"</head><body><header><b>servekit</b>{others}</header><main><h1>{title}</h1>"
        f"{main}</main></body></html>"
    ).encode()
