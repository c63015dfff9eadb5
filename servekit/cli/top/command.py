"""`servekit top`: a running instance, live in the terminal. q quits."""

# No string annotations: typer evaluates each several times, which slows down --help.
from typing import Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import RunDirectory


def top(
    run_dir: RunDirectory = None,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600.0, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print once and exit, as if the output were not a terminal."),
    ] = False,
) -> None:
    """Watch a running instance: GPUs, models, queues, tokens per second, restarts, events."""
    import asyncio

    from rich.console import Console

    from servekit.cli.top import loop

    folder = instance_lookup.find_run_dir(run_dir)
    console = Console(markup=False, emoji=False, highlight=False)
    live = console.is_terminal and not once
    asyncio.run(
        loop.watch_instance(folder, console, every) if live else loop.print_once(folder, console)
    )
