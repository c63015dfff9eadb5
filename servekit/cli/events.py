"""`servekit events`: past and new events of an instance."""

# No string annotations: typer evaluates each several times, which slows down --help.
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import AsJsonLines, Follow, RunDirectory, Since, parse_span
from servekit.errors import ServekitError, StartError, did_you_mean

if TYPE_CHECKING:
    from rich.text import Text

    from servekit.event_store import Event, EventFilter
    from servekit.protocol.messages import Why

_LOOK_EVERY_S = 0.25
#: Maximum events per query; a follower gets the rest with the next query.
_MOST = 10_000
#: Earlier exits that `why` shows.
_MOST_EARLIER = 5
_COLOURS = {
    "exit": "red",
    "crash": "red",
    "stalled": "red",
    "stray": "red",
    "gap": "red",
    "breaker": "yellow",
    "scale": "cyan",
    "quarantine": "yellow",
    "ready": "green",
    "up": "green",
}


def events(
    follow: Follow = False,
    as_json: AsJsonLines = False,
    name: Annotated[
        str,
        typer.Option(
            "--model",
            "--worker",
            "-m",
            metavar="NAME",
            help="Only events of this model or process.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ] = "",
    since: Since = "",
    most: Annotated[
        int, typer.Option("--tail", "-n", min=0, help="Number of last entries to print.")
    ] = 50,
    run_dir: RunDirectory = None,
) -> None:
    """Show the events: starts, exits and their causes, reloads, loads, breakers, adapters."""
    from servekit.event_store import FILE, EventFilter

    folder = instance_lookup.find_run_dir(run_dir)
    begin = time.time() - parse_span(since) if since else 0.0
    if not follow and not (folder / FILE).exists():
        instance_lookup.read_status(folder)  # raises if no instance runs
        raise StartError(f"no events in {folder}: the log says why events cannot be stored")
    wanted = EventFilter(_resolve_name(folder, name, follow=follow), begin)
    for event in _follow_events(folder, wanted, most, follow=follow):
        _write_event(event, as_json=as_json)


def _resolve_name(folder: Path, name: str, *, follow: bool) -> str:
    """Return the name used in events, resolving an alias.

    Raises StartError for an unknown name; a follower accepts it, unless a running instance does
    not know it.
    """
    from servekit.event_store import event_names

    before = event_names(folder) if name else []
    if not name or name in before:
        return name
    try:
        status = instance_lookup.read_status(folder)
    except ServekitError:
        if follow:
            return name
        known = {}
    else:
        known = {name: model.name for model in status.models for name in model.names}
        known |= {name: name for name in instance_lookup.process_names(status)}
    if name in known:
        return known[name]
    there = list(dict.fromkeys((*known, *before)))
    told = f"there are: {', '.join(there) or 'none yet'}{did_you_mean(name, there)}"
    raise StartError(f"no model or process is or was called {name!r}; {told}")


def _follow_events(
    folder: Path, wanted: "EventFilter", most: int, *, follow: bool
) -> "Iterator[Event]":
    from dataclasses import replace

    from servekit.event_store import EventFilter, newest_events

    last = 0
    if follow and not most:
        last = max((event.id for event in newest_events(folder, EventFilter(), 1)), default=0)
    for event in newest_events(folder, wanted, min(most, _MOST)) if most else []:
        last = event.id
        yield event
    while follow:
        time.sleep(_LOOK_EVERY_S)
        newer = newest_events(folder, replace(wanted, after=last), _MOST)
        latest = newest_events(folder, EventFilter(), 1)
        if not newer and latest and latest[0].id < last:
            last = 0  # the file was moved away, and a new one begun
        for event in newer:
            last = event.id
            yield event


def _write_event(event: "Event", *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(as_object(event))}\n")
    else:
        from rich.console import Console

        # soft_wrap: one line per event, also for grep
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(format_event(event), soft_wrap=True)
    sys.stdout.flush()


def as_object(event: "Event") -> dict[str, object]:
    """Return the object of `--json`; keys are only ever added."""
    return {
        "id": event.id,
        "at": event.at,
        "kind": event.kind,
        "model": event.model,
        "worker": event.worker,
        "what": event.what,
        "detail": event.detail,
    }


def format_event(event: "Event", *, day: bool = True) -> "Text":
    """Format an event as a line for people."""
    from rich.text import Text

    from servekit.sanitize import one_line

    form = "%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S"
    text = Text(time.strftime(form, time.localtime(event.at)), style="dim")
    text.append(f"  {one_line(event.kind, 20):<10}", style=_COLOURS.get(event.kind, "bold"))
    if name := event.worker or event.model:
        text.append(f"  {one_line(name, 100)}", style="bold")
    if shown := ", ".join(filter(None, (one_line(event.what), format_figures(event)))):
        text.append(f"  {shown}", style="")
    return text


def format_figures(event: "Event") -> str:
    """Format the figures of an event."""
    detail = event.detail
    parts = [f"pid {detail['pid']}"] if event.kind in ("started", "up") and "pid" in detail else []
    parts += [f"after {detail['after_s']} s"] if "after_s" in detail else []
    if event.kind == "exit":
        parts += [f"lived {detail.get('lived_s')} s", f"{detail.get('served')} served"]
        again = detail.get("again_in_s")
        parts.append("not started again" if again is None else f"again in {again} s")
    from servekit.sanitize import one_line

    return one_line(", ".join(parts), 200)


def post_mortem(folder: Path, name: str, nobody: ServekitError, *, as_json: bool) -> None:
    """Show, for `why` without a running instance, the exits of `name` and the end of the instance.

    Raises `nobody` if no event is about that name.
    """
    from servekit.event_store import EventFilter, newest_events

    exits = newest_events(folder, EventFilter(name, kinds=("exit",)), _MOST_EARLIER)
    if not exits:
        raise nobody
    ends = newest_events(folder, EventFilter(kinds=("down", "crash")), 1)
    if not as_json:
        sys.stdout.write(f"No servekit runs in {folder}; its last events:\n")
    for event in sorted((*exits, *ends), key=lambda event: event.id):
        _write_event(event, as_json=as_json)


def earlier_exits(folder: Path, name: str, why: "Why") -> "tuple[list[Event], list[Event]]":
    """Return the last exits that the answer of `why` lacks: since this start, and before it."""
    from servekit.event_store import EventFilter, newest_events

    began = newest_events(folder, EventFilter(kinds=("up",)), 1)
    if not began:
        return [], []
    about = name if name.startswith(f"{why.model}/") else why.model
    exits = newest_events(folder, EventFilter(about, kinds=("exit",)), _MOST_EARLIER * 4)
    told = {one.pid for replica in why.replicas for one in replica.exits}
    since = [one for one in exits if one.at >= began[0].at and one.detail.get("pid") not in told]
    before = [one for one in exits if one.at < began[0].at]
    return since[-_MOST_EARLIER:], before[-_MOST_EARLIER:]


def exit_lines(since: "Sequence[Event]", before: "Sequence[Event]") -> "Iterator[Text]":
    """Yield the lines of `why` on earlier exits."""
    from rich.text import Text

    heads = ("since this start of servekit:", since), ("before this start of servekit:", before)
    for head, exits in heads:
        if exits:
            yield Text(f"\n{head}")
            yield from map(format_event, exits)
