"""The pages as HTML: a sidebar, a search over all pages, light and dark, without external
resources.

`python -m servekit.docs.site NAME` prints one file of the site, for a gateway, which keeps neither
Markdown nor its parser in memory (`servekit.gateway.api.openapi.docs_pages`).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.docs.pages import (
    FOLDER,
    INDEX,
    Page,
    find_page,
    list_pages,
    make_anchor,
    read_markdown,
)
from servekit.errors import StartError

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

SCRIPT, SEARCH = "site.js", "search.js"
_HERE = Path(__file__).parent
#: Other pages of a running instance.
_BESIDE = (("/docs/swagger", "Try the API"), ("/ui/", "Chat"), ("/ui/dashboard", "Dashboard"))
_ICON = (  # inline, so that the browser asks for no favicon
    '<link rel="icon" href="data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 '
    "viewBox=%220 0 16 16%22><rect width=%2216%22 height=%2216%22 rx=%224%22 fill=%22%2314b8a6%22/>"
    '<path d=%22M4 5h8M4 8h8M4 11h5%22 stroke=%22white%22 stroke-width=%221.6%22/></svg>">'
)
#: Maximum length of a search result's text.
_MOST_CHARS = 4000


def make_html(name: str, *, is_live: bool) -> str:
    """Return a page as HTML. Raises ConfigError for an unknown page.

    If live, it is under /docs of a running instance; else beside the others in a folder.
    """
    page = find_page(name)
    parser = _make_parser()
    tokens = parser.parse(read_markdown(page))
    headings = _mark_headings(tokens)
    for token in tokens:
        for child in token.children or ():
            _point_to_site(child, is_live)
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<pre>", '<pre tabindex="0">')  # the keyboard can scroll long lines
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    body = body.replace("</table>", "</table></div>")
    beside = "".join(f'<a href="{to}">{text}</a>' for to, text in _BESIDE if is_live)
    style = (_HERE / "site.css").read_text("utf-8")
    title = "servekit: documentation" if page.name == INDEX else f"{page.title} · servekit"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>{_ICON}<style>{style}</style>"
        f'<script src="{_file_address(SCRIPT, is_live)}" '
        f'data-search="{_file_address(SEARCH, is_live)}" '
        f'data-page="{escape(_page_address("NAME", is_live))}"></script></head>'
        '<body><a class="skip" href="#content">Skip to the text</a><header>'
        f'<a class="brand" href="{_page_address(INDEX, is_live)}">servekit <span>docs</span></a>'
        '<input type="search" id="search" placeholder="Search" autocomplete="off" '
        'aria-label="Search the documentation" aria-controls="results">'
        f'<span class="beside">{beside}</span>'
        '<button type="button" id="menu" aria-expanded="false" aria-controls="pages">Pages</button>'
        '</header><div class="columns"><nav id="pages" aria-label="Pages">'
        f'{_make_sidebar(page, headings, is_live)}</nav><main id="content" tabindex="-1">'
        '<section id="results" aria-label="Search results" aria-live="polite" hidden></section>'
        f"<article>{body}</article>{_make_neighbours(page, is_live)}</main></div></body></html>\n"
    )


def make_search_index() -> str:
    """Return the script that holds the text of each section of each page."""
    parser = _make_parser()
    found: list[list[str]] = []
    for page in list_pages().values():
        if page.name == INDEX:
            continue
        tokens = parser.parse(read_markdown(page))
        _mark_headings(tokens)
        found += [[page.name, page.title, *one] for one in _page_sections(tokens)]
    return f"window.servekitSearch = {json.dumps(found, ensure_ascii=False)};\n"


def write_site(folder: Path, *, as_html: bool) -> list[Path]:
    """Write all pages into a folder, which is created. Raises StartError on failure.

    Markdown pages keep their folders, so that their links work there, too.
    """
    try:
        if not as_html:
            shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
            return [folder / page.path.relative_to(FOLDER) for page in list_pages().values()]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(FOLDER / "images", folder / "images", dirs_exist_ok=True)
        (folder / SCRIPT).write_bytes((_HERE / SCRIPT).read_bytes())
        (folder / SEARCH).write_text(make_search_index(), "utf-8")
        written = []
        for name in list_pages():
            path = folder / f"{name}.html"
            path.write_text(make_html(name, is_live=False), "utf-8")
            written.append(path)
    except OSError as error:
        raise StartError(f"cannot write {error.filename}: {error.strerror}") from None
    return written


# ---------------------------------------------------------------- parts of a page


def _make_parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False, "highlight": _highlight_code}).enable("table")


def _highlight_code(code: str, language: str, _attributes: str) -> str:
    """Return code with the classes of Pygments; "" leaves it to the renderer."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    if not language:
        return ""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return ""
    marked: str = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return marked


def _mark_headings(tokens: Sequence[Token]) -> list[tuple[int, str, str]]:
    """Give each heading a unique anchor; return levels, anchors and texts."""
    seen: dict[str, int] = {}
    found = []
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            text = _plain_text(tokens[at + 1])
            anchor = make_anchor(text)
            count = seen[anchor] = seen.get(anchor, -1) + 1
            token.attrSet("id", f"{anchor}-{count}" if count else anchor)
            found.append((int(token.tag[1]), str(token.attrGet("id")), text))
    return found


def _plain_text(inline: Token) -> str:
    """Return the text of an inline token without its markup."""
    return "".join(" " if one.type == "softbreak" else one.content for one in inline.children or ())


def _point_to_site(token: Token, is_live: bool) -> None:
    """Turn a relative path between Markdown files into the address of the file in the site."""
    kind = {"link_open": "href", "image": "src"}.get(token.type)
    target = str(token.attrGet(kind) or "") if kind else ""
    if kind is None or "://" in target or target.startswith(("#", "mailto:")):
        return
    path, _, anchor = target.partition("#")
    if path.endswith(".md"):
        path = _page_address(Path(path).stem, is_live)
    else:
        path = _file_address(f"images/{Path(path).name}", is_live)
    token.attrSet(kind, f"{path}#{anchor}" if anchor else path)


def _file_address(file: str, is_live: bool) -> str:
    return f"/docs/{file}" if is_live else file


def _page_address(name: str, is_live: bool) -> str:
    if is_live:
        return "/docs" if name == INDEX else f"/docs/{name}"
    return f"{name}.html"


def _make_sidebar(page: Page, headings: list[tuple[int, str, str]], is_live: bool) -> str:
    """Return the list of pages, with the sections of the open page below it."""
    parts = []
    for section, group in groupby(list_pages().values(), key=lambda one: one.section):
        if section:
            parts.append(f"<h2>{escape(section)}</h2>")
        parts.append("<ul>")
        for one in group:
            current = ' aria-current="page"' if one.name == page.name else ""
            to = _page_address(one.name, is_live)
            parts.append(f'<li><a href="{to}"{current}>{escape(one.title)}</a>')
            if current and page.name != INDEX:
                parts.append(_make_contents(headings))
            parts.append("</li>")
        parts.append("</ul>")
    return "".join(parts)


def _make_contents(headings: list[tuple[int, str, str]]) -> str:
    second = [(anchor, text) for level, anchor, text in headings if level == 2]
    if len(second) < 2:
        return ""
    links = "".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in second)
    return f"<ul>{links}</ul>"


def _make_neighbours(page: Page, is_live: bool) -> str:
    """Return links to the page before and the page after this one."""
    pages = list(list_pages().values())
    at = pages.index(page)
    links = []
    if at > 0:
        before, to = pages[at - 1], _page_address(pages[at - 1].name, is_live)
        links.append(f'<a rel="prev" href="{to}">← {escape(before.title)}</a>')
    if at + 1 < len(pages):
        after, to = pages[at + 1], _page_address(pages[at + 1].name, is_live)
        links.append(f'<a rel="next" href="{to}">{escape(after.title)} →</a>')
    return f'<footer class="neighbours">{"".join(links)}</footer>'


def _page_sections(tokens: Sequence[Token]) -> Iterator[list[str]]:
    """Yield anchor, heading and text of each part of a page that has a heading."""
    anchor, heading, texts = "", "", list[str]()
    opens = False
    for token in tokens:
        if token.type == "heading_open":
            if heading:
                yield [anchor, heading, " ".join(texts)[:_MOST_CHARS]]
            anchor, texts, opens = str(token.attrGet("id") or ""), [], True
        elif token.type == "inline" and opens:
            heading, opens = _plain_text(token), False
        elif token.type == "inline":
            texts.append(_plain_text(token))
        elif token.type == "fence":
            texts.append(token.content)
    if heading:
        yield [anchor, heading, " ".join(texts)[:_MOST_CHARS]]


if __name__ == "__main__":
    wanted = sys.argv[1]
    made = make_search_index() if wanted == SEARCH else make_html(wanted, is_live=True)
    sys.stdout.write(made)
