"""`servekit docs`: the reference, printed or written."""

# No annotations as text: typer reads each several times, which takes most of the time of --help.
import sys
from pathlib import Path
from typing import Annotated

import typer


def docs(
    page: Annotated[
        str, typer.Argument(help="configuration, commands, api or metrics; by default all.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write all there.")
    ] = None,
    as_html: Annotated[bool, typer.Option("--html", help="For a browser, not Markdown.")] = False,
) -> None:
    """Print the reference of the file, the commands, HTTP and metrics, made from the code."""
    from servekit.docs import pages

    if output is not None:
        for path in pages.write(output, as_html=as_html):
            sys.stdout.write(f"wrote {path}\n")
        return
    for name in (page,) if page else pages.PAGES:
        sys.stdout.write(pages.html(name) if as_html else pages.markdown(name))
