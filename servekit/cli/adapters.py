"""`servekit adapter add`, `rm` and `ls`: adapters of a running instance.

`cli.main` registers the commands. They write their output to stdout themselves.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import sys
from pathlib import Path
from typing import Annotated

import typer

from servekit.cli.instance_lookup import (
    ask_instance,
    complete_adapters,
    complete_models,
    find_instance,
)
from servekit.cli.options import AsJson, RunDirectory, print_json
from servekit.errors import ServekitError

#: All workers verify the adapter, after earlier changes; the supervisor ends what hangs.
_CHANGE_S = 3600.0

Name = Annotated[str, typer.Argument(help="The name that requests use.")]
Served = Annotated[
    str,
    typer.Argument(help="The name that requests use.", autocompletion=complete_adapters),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Its base model; not needed if there is only one.",
        autocompletion=complete_models,
    ),
]


def add(
    name: Name,
    path: Annotated[str, typer.Argument(help="A folder with adapter_config.json, or a hub id.")],
    model: Model = "",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the adapter that has this name now.")
    ] = False,
    any_base: Annotated[
        bool, typer.Option("--any-base", help="Load it even if it names another base.")
    ] = False,
    run_dir: RunDirectory = None,
) -> None:
    """Load an adapter on all workers of a model, or on none."""
    from servekit.protocol.adapters import AdapterSpec, AddAdapter
    from servekit.protocol.messages import Accepted

    folder = Path(path).expanduser()
    is_local = path.startswith((".", "~", "/")) or folder.exists()
    spec = AdapterSpec(name, str(folder.absolute()) if is_local else path, revision, any_base)
    try:
        asked = AddAdapter(model, spec, in_place)
        done = ask_instance(find_instance(run_dir), asked, Accepted, _CHANGE_S)
    except ServekitError as error:  # the message names the API's parameter
        said = error.message.replace("set 'load_inplace' to True", "say --in-place")
        raise type(error)(said) from None
    sys.stdout.write(f"{done.message}\n")


def rm(name: Served, run_dir: RunDirectory = None) -> None:
    """Unload an adapter, once the requests for it are done."""
    from servekit.protocol.adapters import RemoveAdapter
    from servekit.protocol.messages import Accepted

    done = ask_instance(find_instance(run_dir), RemoveAdapter(name), Accepted, _CHANGE_S)
    sys.stdout.write(f"{done.message}\n")


def ls(
    model: Model = "",
    run_dir: RunDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Show the adapters: how each is run and why, or why it has failed."""
    from servekit.protocol.adapters import Adapters, GetAdapters

    answer = ask_instance(find_instance(run_dir), GetAdapters(model), Adapters)
    if as_json:
        print_json(answer.adapters)
        return
    from servekit.cli.display.tables import adapter_table, print_tables

    print_tables(adapter_table(answer.adapters))
