"""`servekit logs`: past and new output of the processes of an instance."""

# No string annotations: typer evaluates each several times, which slows down --help.
import heapq
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.instance_lookup import RunDirectory
from servekit.errors import ConfigError, ServekitError, StartError, meant

if TYPE_CHECKING:
    from rich.text import Text

    from servekit.log_files import Line, Tail

_LOOK_EVERY_S = 0.2
_ANSWER_S = 5.0
_COLOURS = ("cyan", "magenta", "blue", "yellow", "green", "bright_black")
_LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new entries until Ctrl-C.")
    ] = False,
    worker: Annotated[
        str,
        typer.Option(
            "--worker",
            "--model",
            "-w",
            metavar="NAME",
            help="Only this process, or all processes of this model.",
            autocompletion=instance_lookup.workers,
        ),
    ] = "",
    most: Annotated[
        int, typer.Option("-n", min=0, max=100_000, help="Number of last entries to print.")
    ] = 100,
    run_dir: RunDirectory = None,
) -> None:
    """Show what workers and gateways have written, those of before included, and when each was
    started, was ready and ended, and why.

    The supervisor's own log goes to stderr of `servekit up`.
    """
    from servekit.cli.process_events import Follower

    folder = instance_lookup.folder(run_dir)
    worker = _unaliased(folder, worker)
    _check(folder, worker, follow=follow)
    tails = _tails(folder, worker) if follow else {}
    noted = Follower(folder, worker)
    _show(_last(folder, worker, most))
    while follow:
        _show(noted.lines())
        _show(_news(folder, worker, tails))
        time.sleep(_LOOK_EVERY_S)


def _unaliased(folder: Path, worker: str) -> str:
    """Resolve an alias to the model's name, which its log files have."""
    from servekit.log_files import files, is_of

    if not worker or any(is_of(name, worker) for name in files(folder)):
        return worker
    try:
        models = instance_lookup.status(folder, _ANSWER_S).models
    except ServekitError:
        return worker
    return next((model.name for model in models if worker in model.aliases), worker)


def _check(folder: Path, worker: str, *, follow: bool) -> None:
    from servekit.cli import process_events
    from servekit.log_files import files, is_of

    names = list(files(folder))
    if any(is_of(name, worker) for name in names) or process_events.lines(folder, worker, 1):
        return
    if follow:
        _check_known(folder, worker)
    elif not names:
        instance_lookup.status(folder)  # raises if no instance runs
        raise StartError(f"nothing has been written in {folder}/logs yet")
    else:
        others = f"others have: {', '.join(names)}{meant(worker, names)}"
        raise ConfigError(f"{worker!r} has written nothing here; {others}")


def _check_known(folder: Path, worker: str) -> None:
    """Accept a process without output yet, unless a running instance does not know its name."""
    try:
        status = instance_lookup.status(folder, _ANSWER_S)
    except ServekitError:
        return
    known = [*(model.name for model in status.models), *instance_lookup.processes(status)]
    if worker and worker not in known:
        there = f"there are: {', '.join(known)}{meant(worker, known)}"
        raise ConfigError(f"nothing here is called {worker!r}; {there}")


def _last(folder: Path, worker: str, most: int) -> "Iterable[Line]":
    """Return the last lines of all processes together, by their times."""
    from servekit.cli import process_events
    from servekit.log_files import files, is_of, last

    each = [last(name, path, most) for name, path in files(folder).items() if is_of(name, worker)]
    each.append(process_events.lines(folder, worker, most))
    merged = list(heapq.merge(*(_ascending(lines) for lines in each), key=lambda line: line.at))
    return merged[len(merged) - min(most, len(merged)) :]


def _ascending(lines: "list[Line]") -> "list[Line]":
    """Keep the order of one file even if the clock was set back in between."""
    from dataclasses import replace

    at = ""
    ordered = []
    for line in lines:
        at = max(at, line.at)
        ordered.append(line if line.at == at else replace(line, at=at))
    return ordered


def _tails(folder: Path, worker: str) -> "dict[str, Tail]":
    from servekit.log_files import Tail, files, is_of

    found = files(folder).items()
    return {name: Tail(path, from_start=False) for name, path in found if is_of(name, worker)}


def _news(folder: Path, worker: str, tails: "dict[str, Tail]") -> "Iterator[Line]":
    from servekit.log_files import Line, Tail, files, is_of

    for name, path in files(folder).items():
        if name not in tails and is_of(name, worker):
            tails[name] = Tail(path, from_start=True)
    for name, tail in tails.items():
        for text in tail.lines():
            yield Line("", name, text)


def _show(lines: "Iterable[Line]") -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    for line in lines:
        console.print(told(line), soft_wrap=True)
    sys.stdout.flush()


def told(line: "Line") -> "Text":
    """Format a line with its process's name; servekit's own log lines look as in `servekit up`."""
    from rich.text import Text

    from servekit.cli.startup_display import read_line
    from servekit.log_events import sentence
    from servekit.log_files import stamp
    from servekit.sanitize import plain

    colour = _COLOURS[sum(line.name.encode()) % len(_COLOURS)]
    text = Text(f"{plain(line.name)} | ", style=colour)
    level, event, fields = read_line(line.text)
    if at := stamp(line.text):
        text.append(f"{plain(at)} ", style="dim")
    style = _LEVELS.get(level, "")
    for number, part in enumerate(plain(sentence(event, fields)).split("\n")):
        text.append(f"\n{'':4}{part}" if number else part, style=style)
    return text
