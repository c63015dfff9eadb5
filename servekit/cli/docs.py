"""`servekit docs`: the documentation in the terminal, or written as files."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from servekit.docs.pages import Page


def _complete_pages(incomplete: str) -> list[str]:
    from servekit.docs.pages import list_pages

    return [name for name in list_pages() if name.startswith(incomplete)]


def docs(
    page: Annotated[
        str,
        typer.Argument(
            help="The page to print, by its name; the index lists them.",
            autocompletion=_complete_pages,
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write all pages to this folder."),
    ] = None,
    as_html: Annotated[
        bool, typer.Option("--html", help="Write HTML for a browser, instead of Markdown.")
    ] = False,
) -> None:
    """Print the documentation: an index of its pages, or a page.

    On a terminal it is formatted and shown in a pager; elsewhere it is printed as Markdown. A
    running instance has the same pages at /docs.
    """
    from servekit.docs import pages, site

    if output is not None:
        for path in site.write_site(output, as_html=as_html):
            sys.stdout.write(f"wrote {path}\n")
        return
    found = pages.find_page(page or pages.INDEX)
    if as_html:
        sys.stdout.write(site.make_html(found.name, is_live=False))
    elif sys.stdout.isatty():
        _show_page(found)
    elif found.name == pages.INDEX:
        sys.stdout.write(_make_index())
    else:
        sys.stdout.write(pages.read_markdown(found))


def _show_page(page: "Page") -> None:
    """Format a page for the terminal and show it in the user's pager."""
    from rich.console import Console
    from rich.markdown import Markdown

    from servekit.docs import pages

    text = _make_index() if page.name == pages.INDEX else pages.read_for_terminal(page)
    os.environ.setdefault("LESS", "-FRX")  # colours, and no pager for short text
    console = Console(width=min(Console().width, 110))
    with console.pager(styles=True):
        console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))


def _make_index() -> str:
    """Return the index for a terminal: names that `servekit docs NAME` accepts."""
    from itertools import groupby

    from servekit.docs.pages import list_pages

    parts = [
        "# servekit",
        "`servekit docs PAGE` prints a page. A running instance has the same pages at /docs.",
    ]
    listed = [one for one in list_pages().values() if one.section]
    for section, group in groupby(listed, key=lambda one: one.section):
        rows = [f"| `{one.name}` | {one.summary} |" for one in group]
        parts += [f"## {section}", "\n".join(["| page | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"
