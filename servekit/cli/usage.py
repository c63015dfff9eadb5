"""`servekit usage`: requests and tokens by day or month, API key and model."""

# No string annotations: typer evaluates each several times, which slows down --help.
import csv
import dataclasses
import sys
from datetime import date
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import AsJson, RunDirectory, print_json
from servekit.errors import ConfigError, StartError

if TYPE_CHECKING:
    from servekit.usage_store import Usage

_COLUMNS = ("key", "model")


def usage(
    by: Annotated[
        str, typer.Option(metavar="COLUMNS", help="key, model, or key,model; none: all together.")
    ] = "key,model",
    month: Annotated[bool, typer.Option("--month", help="A line for each month.")] = False,
    day: Annotated[bool, typer.Option("--day", help="A line for each day; the default.")] = False,
    since: Annotated[
        str,
        typer.Option(
            metavar="DAY", help="The first day, 2026-11-01; by default the first of this month."
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All days that are kept.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
    run_dir: RunDirectory = None,
) -> None:
    """Show the requests and tokens of each API key and model, by day or month of the local time."""
    import sqlite3

    from servekit.usage_store import FILE, Usage, read_usage

    if month and day:
        raise ConfigError("give --day or --month, not both")
    folder = instance_lookup.find_run_dir(run_dir)
    if not (folder / FILE).exists():
        instance_lookup.read_status(folder)  # raises if no instance runs
        raise StartError(f"no request has been counted in {folder} yet")
    columns, begin = _parse_columns(by), _begin(since, everything)
    try:
        rows = read_usage(folder, by=columns, monthly=month, since=begin)
    except sqlite3.DatabaseError as error:
        said = (
            f"{folder / FILE} is damaged ({error}); the next request that is counted begins another"
        )
        raise StartError(said) from None
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    elif as_csv:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerow([one.name for one in dataclasses.fields(Usage)])
        lines.writerows(_harmless(dataclasses.astuple(row)) for row in rows)
    else:
        _print_table(rows)


def _parse_columns(by: str) -> tuple[str, ...]:
    columns = tuple(part.strip() for part in by.split(",") if part.strip() not in ("", "none"))
    if unknown := [one for one in columns if one not in _COLUMNS]:
        raise ConfigError(f"--by is key, model, or key,model, not {unknown[0]!r}")
    return columns


def _begin(since: str, everything: bool) -> str:
    if everything:
        return ""
    if not since:
        return date.today().replace(day=1).isoformat()
    try:
        return date.fromisoformat(since).isoformat()
    except ValueError:
        raise ConfigError(f"--since is a day, such as 2026-11-01, not {since!r}") from None


def _harmless(row: tuple[object, ...]) -> list[object]:
    """Keep a spreadsheet from taking a name for a formula."""
    texts = ("=", "+", "-", "@")
    return [f"'{one}" if isinstance(one, str) and one.startswith(texts) else one for one in row]


def _print_table(rows: "list[Usage]") -> None:
    from rich.text import Text

    from servekit.cli.display.responsive_table import Fitted
    from servekit.cli.display.tables import new_table, print_tables

    table = new_table("PERIOD", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT", "TOKENS")
    for row in rows:
        tokens = row.prompt_tokens + row.completion_tokens
        figures = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        names = (row.period, row.key or "-", row.model or "-")
        table.add_row(*map(Text, names), *(f"{one:,}" for one in (*figures, tokens)))
    print_tables(Fitted(table) if rows else "nothing has been used in this time")
