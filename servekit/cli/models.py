"""`servekit load`, `unload`, `sleep`, `wake`, `restart` and `profile`: what an instance serves."""

# No string annotations: typer evaluates each several times, which slows down --help.
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli import instance_lookup
from servekit.cli.instance_lookup import ask_instance
from servekit.cli.options import RunDirectory
from servekit.errors import ServekitError

if TYPE_CHECKING:
    from rich.table import Table

    from servekit.protocol.messages import ModelStatus, Status
    from servekit.protocol.residency import Want

_LOOK_EVERY_S = 0.2
#: Other models may first have to finish their requests, and a large model takes minutes.
_PATIENCE_S = 3600.0
#: A switch loads no model, but reads the file, after earlier reloads.
_SWITCH_S = 60.0

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name or alias of the model.",
        autocompletion=instance_lookup.complete_models,
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Return at once, without waiting for the end.")
]


def load(model: Model, run_dir: RunDirectory = None, no_wait: NoWait = False) -> None:
    """Load a model, or wake it; models on demand make room for it."""
    _set_residency(model, "load", run_dir, wait=not no_wait)


def unload(model: Model, run_dir: RunDirectory = None, no_wait: NoWait = False) -> None:
    """Unload a model, once its requests are done. On demand, the next request loads it."""
    _set_residency(model, "unload", run_dir, wait=not no_wait)


def sleep(model: Model, run_dir: RunDirectory = None, no_wait: NoWait = False) -> None:
    """Put a model to sleep, once its requests are done; a request wakes it."""
    _set_residency(model, "sleep", run_dir, wait=not no_wait)


def wake(model: Model, run_dir: RunDirectory = None, no_wait: NoWait = False) -> None:
    """Wake a model."""
    _set_residency(model, "wake", run_dir, wait=not no_wait)


def restart(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[/N]",
            help="Name or alias of the model, or one of its workers, such as MODEL/0.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ],
    run_dir: RunDirectory = None,
    no_wait: NoWait = False,
) -> None:
    """Replace the workers of a model, or one worker; a new worker comes first if memory allows."""
    from servekit.protocol.messages import Accepted, Restart

    folder = instance_lookup.find_instance(run_dir)
    began = time.monotonic()
    answer = ask_instance(folder, Restart(name, not no_wait), Accepted, _PATIENCE_S)
    took = "" if no_wait else f" after {time.monotonic() - began:.1f} s"
    typer.echo(f"{answer.message}{took}")


def _set_residency(model: str, want: "Want", run_dir: Path | None, *, wait: bool) -> None:
    import asyncio

    folder = instance_lookup.find_instance(run_dir)
    began = time.monotonic()
    said = asyncio.run(_await_residency(folder, model, want, wait=wait))
    took = wait and " is already " not in said
    typer.echo(f"{said} after {time.monotonic() - began:.1f} s" if took else said)


async def _await_residency(run_dir: Path, model: str, want: "Want", *, wait: bool) -> str:
    """Return the supervisor's final answer; progress until then goes to stderr."""
    import asyncio

    from servekit.protocol.messages import Accepted
    from servekit.protocol.residency import SetResidency
    from servekit.supervisor.admin.control_socket import request_answer

    asking = asyncio.create_task(
        request_answer(run_dir, SetResidency(model, want, wait), Accepted, _PATIENCE_S)
    )
    told = ""
    while not (await asyncio.wait((asking,), timeout=_LOOK_EVERY_S))[0]:
        if (news := _describe_progress(await _read_model(run_dir, model))) not in ("", told):
            told = news
            typer.echo(f"{model}: {news}", err=True)
    return (await asking).message


async def _read_model(run_dir: Path, model: str) -> "ModelStatus | None":
    status = await instance_lookup.status_soon(run_dir)
    return next((one for one in status.models if model in one.names), None)


def _describe_progress(found: "ModelStatus | None") -> str:
    """Return the model's tier, with the progress of its load or the reason of its wait."""
    from servekit.cli.display.tables import progress_text
    from servekit.protocol.residency import tier_text

    if found is None or found.residence is None:
        return ""
    steps = [progress_text(one.progress) for one in found.replicas if one.progress is not None]
    more, tier = steps[0] if steps else found.residence.reason, tier_text(found.residence.tier)
    return f"{tier}, {more}" if more else tier


def profile(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="The profile to switch to, or all; without it, the profiles are listed.",
            autocompletion=instance_lookup.complete_profiles,
        ),
    ] = "",
    run_dir: RunDirectory = None,
    no_wait: NoWait = False,
) -> None:
    """Switch to the models of a profile: the others are unloaded once their requests are done."""
    from servekit.cli.display.tables import print_tables
    from servekit.protocol.messages import Accepted, SetProfile

    path = instance_lookup.find_instance(run_dir)
    if not name:
        print_tables(_list_profiles(instance_lookup.read_status(path)))
        return
    began = time.monotonic()
    typer.echo(ask_instance(path, SetProfile(name), Accepted, _SWITCH_S).message)
    if no_wait:
        return
    from servekit.cli.display.startup_display import is_start_over

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


def _list_profiles(status: "Status") -> "Table":
    from rich.text import Text

    from servekit.cli.display.tables import new_table
    from servekit.config.schema import ALL_MODELS

    table = new_table("PROFILE", "IN FORCE", "MODELS")
    every = tuple(model.name for model in status.models)
    for name, models in {ALL_MODELS: every, **status.profiles}.items():
        mark = "yes" if name == (status.profile or ALL_MODELS) else ""
        table.add_row(Text(name), mark, Text(", ".join(models)))
    return table
