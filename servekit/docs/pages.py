"""All pages, in Markdown or as HTML that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import pairwise
from pathlib import Path

from servekit.docs.commands import anchor
from servekit.errors import ConfigError, StartError


def _configuration() -> str:
    from servekit.docs.configuration import page

    return page()


def _commands() -> str:
    from servekit.docs.commands import page

    return page()


def _api() -> str:
    from servekit.docs.api import page

    return page()


def _metrics() -> str:
    from servekit.metrics import reference

    return f"# Metrics\n\nOf `GET /metrics`, all of them.\n\n{reference()}\n"


#: By name: how each is made. Each imports what it is made from.
PAGES: dict[str, Callable[[], str]] = {
    "configuration": _configuration,
    "commands": _commands,
    "api": _api,
    "metrics": _metrics,
}

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 18%, transparent); }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1.25rem 4rem; font: 16px/1.55 system-ui; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding-bottom: .8rem;
  border-bottom: 1px solid var(--line); }
nav a[aria-current] { font-weight: 650; text-decoration: none; color: inherit; }
h1, h2, h3 { line-height: 1.25; scroll-margin-top: 1rem; } h2 { margin-top: 2.5rem; }
a { color: #0b67c2; } @media (prefers-color-scheme: dark) { a { color: #7eb6ff; } }
code, pre { font: .88em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { padding: .7rem 1rem; border: 1px solid var(--line); border-radius: .5rem; overflow: auto; }
td:first-child code { white-space: nowrap; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .4rem .8rem .4rem 0; text-align: left; vertical-align: top;
  border-top: 1px solid var(--line); } th { border: 0; font-size: .85rem; }
"""

#: At a running instance.
_TRY = '<a href="../docs">try the API</a><a href="../ui/">chat</a>'


def markdown(name: str) -> str:
    """One page. Raises ConfigError for one there is not."""
    if name not in PAGES:
        raise ConfigError(f"there is no page {name!r}; there are: {', '.join(PAGES)}")
    return PAGES[name]()


def html(name: str, suffix: str = "") -> str:
    """One page for a browser; its links to the others end with `suffix`. Raises ConfigError."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown(name))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", anchor(inline.content))
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    links = "".join(f'<a href="{page}{suffix}"{_mark(page == name)}>{page}</a>' for page in PAGES)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · servekit</title><style>{_STYLE}</style></head><body>"
        f'<nav aria-label="Pages"><b>servekit</b>{links}{_TRY if not suffix else ""}</nav><main>'
        f"{body.replace('</table>', '</table></div>')}</main></body></html>\n"
    )


def _mark(is_it: bool) -> str:
    return ' aria-current="page"' if is_it else ""


def write(folder: Path, *, as_html: bool) -> list[Path]:
    """All of them, in a folder that is made. Raises StartError where that cannot be."""
    suffix = ".html" if as_html else ".md"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in PAGES:
            path = folder / f"{name}{suffix}"
            path.write_text(html(name, suffix) if as_html else markdown(name))
            written.append(path)
    except OSError as error:
        raise StartError(f"cannot write {error.filename}: {error.strerror}") from None
    return written
