"""`servekit link`: a one-time link that makes a browser the owner's."""

# No string annotations: typer evaluates each several times, which slows down --help.
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import RunDirectory

if TYPE_CHECKING:
    from servekit.protocol.messages import Link


def link(run_dir: RunDirectory = None) -> None:
    """Print a one-time link: the browser that opens it may administer on the pages."""
    made = request_link(instance_lookup.find_instance(run_dir))
    typer.echo(f"It may be opened once, within {made.life_s / 60:.0f} minutes.", err=True)
    typer.echo(made.url)


def request_link(run_dir: Path) -> "Link":
    """Return a new link to the instance in `run_dir`. Raises ServekitError if there is none."""
    from servekit.protocol.messages import CreateLink, Link

    return instance_lookup.ask_instance(run_dir, CreateLink(), Link)
