"""The pages of documentation: Markdown files in `pages/`, listed by `pages/index.md`.

The index is the only list of pages: the sidebar and `servekit docs` have its sections and order. A
page is identified by its file's name, which is unique.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from servekit.errors import ConfigError

FOLDER = Path(__file__).with_name("pages")
INDEX = "index"

_SECTION = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"^- \[(.+?)\]\(([\w/-]+\.md)\): (.+)$")
#: A link or an image whose target is a file of this folder, relative to the page.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:)[^)#\s]*)(#[^)\s]*)?\)")
_COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """A page, as listed in the index."""

    name: str
    title: str
    section: str
    summary: str
    path: Path


@cache
def list_pages() -> dict[str, Page]:
    """Return all pages by name, in the index's order; the index itself is the first."""
    pages = {INDEX: Page(INDEX, "Overview", "", "", FOLDER / f"{INDEX}.md")}
    section = ""
    for line in pages[INDEX].path.read_text("utf-8").splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif entry := _ENTRY.match(line):
            path = FOLDER / entry[2]
            pages[path.stem] = Page(path.stem, entry[1], section, entry[3], path)
    return pages


def find_page(name: str) -> Page:
    """Return the page of a name. Raises ConfigError, with a suggestion, for an unknown name."""
    pages = list_pages()
    page = pages.get(name.removesuffix(".md").rpartition("/")[2])
    if page is None:
        near = get_close_matches(name, pages, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`servekit docs` lists the pages"
        raise ConfigError(f"there is no page {name!r}; {hint}")
    return page


def read_markdown(page: Page) -> str:
    """Return a page's text without the comments that mark its generated parts."""
    return _COMMENT.sub("", page.path.read_text("utf-8"))


def read_for_terminal(page: Page) -> str:
    """Return a page's text with names of pages in place of links.

    `[the guide](../guides/gpus.md#memory)` becomes `the guide (→ gpus)`, since a terminal follows
    it with `servekit docs gpus`.
    """

    def name_target(link: re.Match[str]) -> str:
        image, text, target, _ = link.groups()
        if image:
            return f"*(picture: {text})*"
        return f"{text} (→ `{Path(target).stem}`)" if target else text

    return replace_outside_code(_LINK, name_target, read_markdown(page))


def replace_outside_code(
    pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str
) -> str:
    """Substitute a pattern everywhere except in fenced code."""
    parts: list[str] = []
    start = 0
    for block in _FENCED.finditer(text):
        parts += [pattern.sub(replacement, text[start : block.start()]), block[0]]
        start = block.end()
    return "".join([*parts, pattern.sub(replacement, text[start:])])


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    kept = "".join(one for one in heading.lower() if one.isalnum() or one in " -_")
    return kept.replace(" ", "-")
