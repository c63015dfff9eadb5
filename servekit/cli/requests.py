"""`servekit requests`: the request log of an instance."""

# No string annotations: typer evaluates each several times, which slows down --help.
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import AsJsonLines, Follow, RunDirectory, Since, parse_span
from servekit.errors import StartError
from servekit.units import format_latency

if TYPE_CHECKING:
    from servekit.request_log import RequestRecord

_LOOK_EVERY_S = 0.25


def requests(
    follow: Follow = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Only requests for this model.",
            autocompletion=instance_lookup.complete_models,
        ),
    ] = "",
    key: Annotated[
        str, typer.Option("--key", "-k", metavar="NAME", help="Only requests of this API key.")
    ] = "",
    slow: Annotated[
        str, typer.Option(metavar="SPAN", help="Only requests that took this long: 5s, 500ms.")
    ] = "",
    errors: Annotated[
        bool, typer.Option("--errors", help="Only requests that failed, or whose client left.")
    ] = False,
    since: Since = "",
    most: Annotated[
        int, typer.Option("--tail", "-n", min=0, metavar="NUMBER", help="Number of last entries.")
    ] = 50,
    as_json: AsJsonLines = False,
    run_dir: RunDirectory = None,
) -> None:
    """Show the requests: time, key, model, endpoint, status, tokens, and where the time went.

    It has no prompts and no answers. A request appears when its answer has ended, within a second.
    """
    from servekit.request_log import FOLDER, parse_lines, read_records

    folder = instance_lookup.find_run_dir(run_dir)
    begin = time.time() - parse_span(since) if since else 0.0
    least_s = parse_span(slow) if slow else 0.0
    if model:  # the log has names; unknown ones may be of earlier lives
        model = instance_lookup.resolve_alias(folder, model)

    def wanted(one: "RequestRecord") -> bool:
        fits = model in ("", one.model) and key in ("", one.key) and one.total_s >= least_s
        return fits and one.at >= begin and (one.failed or not errors)

    if not follow and not (folder / FOLDER).is_dir():
        instance_lookup.read_status(folder)  # raises if no instance runs
        raise StartError(f"no request has been logged in {folder} (logging.requests)")
    news = _follow(folder) if follow else iter(())
    records = [one for one in read_records(folder) if wanted(one)]
    records = records[len(records) - min(most, len(records)) :]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    columns = None if as_json else choose_columns(width, records)
    if columns:
        heads = (f"{one.head:<{one.width}}" for one in columns)
        sys.stdout.write(f"{_GAP.join(heads).rstrip()}\n")
    _write(records, columns)
    for lines in news:
        _write(filter(wanted, parse_lines(lines)), columns)


def _follow(folder: Path) -> Iterator[list[bytes]]:
    """Return an iterator over new lines, from now on, also of gateways that come later."""
    from servekit.log_files import Tail
    from servekit.request_log import find_files

    tails = {path: Tail(path, from_start=False) for path in find_files(folder)}

    def read_lines() -> Iterator[list[bytes]]:
        while True:
            for path in find_files(folder):
                tails.setdefault(path, Tail(path, from_start=True))
            yield [line.encode() for tail in tails.values() for line in tail.lines()]
            time.sleep(_LOOK_EVERY_S)

    return read_lines()


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """A column of at least `width` cells; in a narrow window those that may go are left out."""

    head: str
    width: int
    text: "Callable[[RequestRecord], str]"
    goes: int = 0  # its turn to go; 0: it stays


_CLOCK = _Column("TIME", 8, lambda one: time.strftime("%H:%M:%S", time.localtime(one.at)))
_DAY = "%Y-%m-%d %H:%M:%S"
#: The last one is not padded.
_COLUMNS = (
    _Column("TIME", 19, lambda one: time.strftime(_DAY, time.localtime(one.at)), goes=1),
    _Column("STATUS", 6, lambda one: str(one.status)),
    _Column("KEY", 10, lambda one: one.key or "-", goes=6),
    _Column("MODEL", 20, lambda one: one.model or "-"),
    _Column("ENDPOINT", 20, lambda one: one.endpoint),
    _Column("PROMPT", 6, lambda one: str(one.prompt_tokens), goes=7),
    _Column("CACHED", 6, lambda one: str(one.cached_tokens), goes=3),
    _Column("OUTPUT", 6, lambda one: str(one.completion_tokens)),
    _Column("QUEUE", 7, lambda one: format_latency(one.queue_s or None), goes=4),
    _Column("TTFT", 7, lambda one: format_latency(one.first_s or None), goes=8),
    _Column("TOTAL", 7, lambda one: format_latency(one.total_s)),
    _Column("OUTCOME", 8, lambda one: one.outcome or "-", goes=5),
    _Column("ID", 19, lambda one: one.id, goes=2),
)
_GAP = "  "
#: A longer name breaks its line.
_MOST_WIDTH = 40


def choose_columns(
    width: int | None, records: "Sequence[RequestRecord]" = ()
) -> tuple[_Column, ...]:
    """Return the columns that a window of this width has room for; None: all.

    They are as wide as the names in `records` need, up to a limit: a path is the client's text.
    """
    columns = tuple(
        dataclasses.replace(
            one,
            width=max(
                [one.width, *(min(len(one.text(record)), _MOST_WIDTH) for record in records)]
            ),
        )
        for one in _COLUMNS
    )
    for goes in range(1, max(one.goes for one in _COLUMNS) + 1):
        if width is None or sum(one.width + len(_GAP) for one in columns) <= width + len(_GAP):
            break
        kept = tuple(one for one in columns if one.goes != goes)
        columns = (_CLOCK, *kept) if goes == _COLUMNS[0].goes else kept
    return columns


def format_record(record: "RequestRecord", columns: tuple[_Column, ...]) -> str:
    """Format a request as a line for people, in columns; longer values are not cut."""
    from servekit.sanitize import one_line

    cells = (f"{one_line(one.text(record), 200):<{one.width}}" for one in columns)
    return _GAP.join(cells).rstrip()


def _write(records: "Iterable[RequestRecord]", columns: tuple[_Column, ...] | None) -> None:
    """Write requests as lines; None: as JSON."""
    for record in records:
        if columns is None:
            sys.stdout.write(f"{json.dumps(dataclasses.asdict(record))}\n")
        else:
            sys.stdout.write(f"{format_record(record, columns)}\n")
    sys.stdout.flush()
