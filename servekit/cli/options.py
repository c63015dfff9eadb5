"""Options that several commands have, and the readers of their values."""

# No string annotations: typer evaluates each several times, which slows down --help.
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from servekit.errors import ConfigError
from servekit.units import parse_duration

RunDirectory = Annotated[
    Path | None,
    typer.Option("--run-dir", envvar="SERVEKIT_RUN_DIR", help="Run directory of the instance."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
    """Print a value, which may have structs, as `--json` asks."""
    from servekit.protocol.types import as_builtins

    sys.stdout.write(f"{json.dumps(as_builtins(value), indent=2)}\n")


# ---- of commands that show entries

AsJsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, one object on each line.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Keep printing new entries until Ctrl-C.")
]
Since = Annotated[str, typer.Option(metavar="SPAN", help="Oldest age to show: 90s, 10m, 2h, 1d.")]


def parse_span(text: str) -> float:
    """Return the seconds of a duration. Raises ConfigError if it is none."""
    try:
        return parse_duration(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a duration; write 90s, 10m, 2h or 1d") from None


# ---- of commands that use a server over HTTP

ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="NAME",
        help="The environment variable with the key; by default SERVEKIT_API_KEY, then "
        "OPENAI_API_KEY.",
    ),
]
Authority = Annotated[Path | None, typer.Option(help="PEM file of an authority to trust.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Accept any certificate of the server.")]
