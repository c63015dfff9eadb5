"""`servekit logs`: past and new output of the processes of an instance."""

# No string annotations: typer evaluates each several times, which slows down --help.
import heapq
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import Follow, RunDirectory, Since, parse_span
from servekit.errors import ConfigError, ServekitError, StartError, did_you_mean

if TYPE_CHECKING:
    from rich.text import Text

    from servekit.log_files import LogLine, Tail

_LOOK_EVERY_S = 0.2
_ANSWER_S = 5.0
_COLOURS = ("cyan", "magenta", "blue", "yellow", "green", "bright_black")
_LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}


def logs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="Only this process, or all processes of this model.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ] = "",
    follow: Follow = False,
    worker: Annotated[
        str,
        typer.Option(
            "--worker",
            "--model",
            "-w",
            metavar="NAME",
            help="The same, as an option.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ] = "",
    most: Annotated[
        int,
        typer.Option(
            "--tail",
            "-n",
            min=0,
            max=100_000,
            metavar="NUMBER",
            help="Number of last entries to print; with --since, of those.",
        ),
    ] = 100,
    since: Since = "",
    run_dir: RunDirectory = None,
) -> None:
    """Show what workers and gateways have written, those of before included, and when each was
    started, was ready and ended, and why.

    The supervisor's own log goes to stderr of `servekit up`.
    """
    from servekit.cli.display.process_events import Follower

    folder = instance_lookup.find_run_dir(run_dir)
    if name and worker and name != worker:
        raise ConfigError(f"give {name} or --worker {worker}, not both")
    begin = _parse_begin(since)
    worker = _resolve_alias(folder, name or worker)
    _check_names(folder, worker, follow=follow)
    tails = _open_tails(folder, worker) if follow else {}
    noted = Follower(folder, worker)
    _show_lines(line for line in _last_lines(folder, worker, most) if line.at >= begin)
    while follow:
        _show_lines(noted.lines())
        _show_lines(_read_news(folder, worker, tails))
        time.sleep(_LOOK_EVERY_S)


def _parse_begin(since: str) -> str:
    """Return the time of the oldest line to show, as lines have it; "" for all lines."""
    if not since:
        return ""
    begin = max(time.time() - parse_span(since), 0.0)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(begin))


def _resolve_alias(folder: Path, worker: str) -> str:
    """Resolve an alias to the model's name, which its log files have."""
    from servekit.log_files import find_log_files, is_of

    if not worker or any(is_of(name, worker) for name in find_log_files(folder)):
        return worker
    return instance_lookup.resolve_alias(folder, worker, _ANSWER_S)


def _check_names(folder: Path, worker: str, *, follow: bool) -> None:
    from servekit.cli.display import process_events
    from servekit.log_files import find_log_files, is_of

    names = list(find_log_files(folder))
    if any(is_of(name, worker) for name in names) or process_events.last_lines(folder, worker, 1):
        return
    if follow:
        _check_known(folder, worker)
    elif not names:
        instance_lookup.read_status(folder)  # raises if no instance runs
        raise StartError(f"there are no log files in {folder}/logs yet")
    else:
        others = f"there are logs of: {', '.join(names)}{did_you_mean(worker, names)}"
        raise ConfigError(f"{worker!r} has no log here; {others}")


def _check_known(folder: Path, worker: str) -> None:
    """Accept a process without output yet, unless a running instance does not know its name."""
    try:
        status = instance_lookup.read_status(folder, _ANSWER_S)
    except ServekitError:
        return
    known = [*(model.name for model in status.models), *instance_lookup.process_names(status)]
    if worker and worker not in known:
        there = f"there are: {', '.join(known)}{did_you_mean(worker, known)}"
        raise ConfigError(f"no model or process is called {worker!r}; {there}")


def _last_lines(folder: Path, worker: str, most: int) -> "Iterable[LogLine]":
    """Return the last lines of all processes together, by their times."""
    from servekit.cli.display import process_events
    from servekit.log_files import find_log_files, is_of, last_lines

    each = [
        last_lines(name, path, most)
        for name, path in find_log_files(folder).items()
        if is_of(name, worker)
    ]
    each.append(process_events.last_lines(folder, worker, most))
    merged = list(heapq.merge(*(_order_by_time(lines) for lines in each), key=lambda line: line.at))
    return merged[len(merged) - min(most, len(merged)) :]


def _order_by_time(lines: "list[LogLine]") -> "list[LogLine]":
    """Keep the order of one file even if the clock was set back in between."""
    from dataclasses import replace

    at = ""
    ordered = []
    for line in lines:
        at = max(at, line.at)
        ordered.append(line if line.at == at else replace(line, at=at))
    return ordered


def _open_tails(folder: Path, worker: str) -> "dict[str, Tail]":
    from servekit.log_files import Tail, find_log_files, is_of

    found = find_log_files(folder).items()
    return {name: Tail(path, from_start=False) for name, path in found if is_of(name, worker)}


def _read_news(folder: Path, worker: str, tails: "dict[str, Tail]") -> "Iterator[LogLine]":
    from servekit.log_files import LogLine, Tail, find_log_files, is_of

    for name, path in find_log_files(folder).items():
        if name not in tails and is_of(name, worker):
            tails[name] = Tail(path, from_start=True)
    for name, tail in tails.items():
        for text in tail.lines():
            yield LogLine("", name, text)


def _show_lines(lines: "Iterable[LogLine]") -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    for line in lines:
        console.print(format_line(line), soft_wrap=True)
    sys.stdout.flush()


def format_line(line: "LogLine") -> "Text":
    """Format a line with its process's name; servekit's own log lines look as in `servekit up`."""
    from rich.text import Text

    from servekit.cli.display.startup_display import read_line
    from servekit.log_events import sentence
    from servekit.log_files import timestamp_of
    from servekit.sanitize import strip_controls

    colour = _COLOURS[sum(line.name.encode()) % len(_COLOURS)]
    text = Text(f"{strip_controls(line.name)} | ", style=colour)
    level, event, fields = read_line(line.text)
    if at := _to_local_time(timestamp_of(line.text)):
        text.append(f"{at} ", style="dim")
    style = _LEVELS.get(level, "")
    for number, part in enumerate(strip_controls(sentence(event, fields)).split("\n")):
        text.append(f"\n{'':4}{part}" if number else part, style=style)
    return text


def _to_local_time(timestamp: str) -> str:
    """Return a line's time as `servekit events` has it; "" if it has none."""
    try:
        return datetime.fromisoformat(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""
