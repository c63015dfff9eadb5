"""`servekit profile`: the profiles of the file, and the one in force."""

# No string annotations: typer evaluates each several times, which slows down --help.
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.models import NoWait
from servekit.errors import ServekitError

if TYPE_CHECKING:
    from rich.table import Table

    from servekit.protocol.messages import Status

_LOOK_EVERY_S = 0.2
#: A switch loads no model, but reads the file, after earlier reloads.
_ANSWER_S = 60.0


def profile(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="The profile to switch to, or all; without it, the profiles are listed.",
            autocompletion=instance_lookup.complete_profiles,
        ),
    ] = "",
    run_dir: instance_lookup.RunDirectory = None,
    no_wait: NoWait = False,
) -> None:
    """Switch to the models of a profile: the others are unloaded once their requests are done."""
    import asyncio

    from servekit.cli.tables import print_tables

    path = instance_lookup.find_instance(run_dir)
    if not name:
        print_tables(_list_profiles(instance_lookup.read_status(path)))
        return
    began = time.monotonic()
    typer.echo(asyncio.run(_switch(path, name)))
    if no_wait:
        return
    from servekit.cli.startup_display import is_start_over

    status = instance_lookup.read_status(path)
    while any(model.changing for model in status.models) or not is_start_over(status):
        time.sleep(_LOOK_EVERY_S)
        status = instance_lookup.read_status(path)
    failed = [
        f"{replica.name}: {replica.reason}"
        for model in status.models
        for replica in model.replicas
        if replica.state == "failed" and not model.left_out
    ]
    if failed:
        raise ServekitError("\n".join(failed))
    typer.echo(f"ready after {time.monotonic() - began:.1f} s")


async def _switch(path: Path, name: str) -> str:
    from servekit.protocol.messages import Accepted, SetProfile
    from servekit.supervisor.admin.control_socket import query_supervisor

    answer = await query_supervisor(path / "control.sock", SetProfile(name), _ANSWER_S)
    if not isinstance(answer, Accepted):
        raise ServekitError("the supervisor sent an answer of an unexpected type")
    return answer.message


def _list_profiles(status: "Status") -> "Table":
    from rich.text import Text

    from servekit.cli.tables import new_table
    from servekit.config.schema import ALL_MODELS

    table = new_table("PROFILE", "IN FORCE", "MODELS")
    every = tuple(model.name for model in status.models)
    for name, models in {ALL_MODELS: every, **status.profiles}.items():
        mark = "yes" if name == (status.profile or ALL_MODELS) else ""
        table.add_row(Text(name), mark, Text(", ".join(models)))
    return table
