"""`servekit run`: serve a model for one conversation."""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.chat import command as chat
from servekit.cli.up.command import (
    Context,
    Engine,
    Gpus,
    Memory,
    make_plan,
    make_source,
    tell_fit,
)
from servekit.errors import ConfigError, ServekitError

if TYPE_CHECKING:
    from types import FrameType

    from servekit.cli.up.background import Background

#: A path of 107 bytes less /servekit-run-12345678/run/control.sock (see `supervisor.run_dir`).
_LONGEST_ROOT_BYTES = 68

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a .gguf file, a hub id (org/name), demo, or a model that is served.",
    ),
]


def run_model(
    model: Model,
    engine: Engine = None,
    gpus: Gpus = None,
    memory: Memory = None,
    max_context: Context = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message.")] = "",
) -> None:
    """Talk to a model: serve it on a free port, and stop it when the conversation is over.

    A model that a running instance serves is used there.
    """
    from servekit.cli.up.sources import ModelOptions, find_source

    options = ModelOptions(None, engine, gpus, memory, max_context)
    served = _find_served(model)
    if served is not None:
        if flags := options.given():
            said = f"{flags[0]}: the instance in {served} serves {model} already, as its file says"
            raise ConfigError(said)
        chat.talk_to(model, served, system)
        return
    from servekit.cli.up.background import Background

    path = find_source((model,), None, options, os.environ)
    tell_fit(make_plan(make_source(path)))
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="servekit-run-", dir=_find_root()) as folder:
        flags = ["--port", "0", "--parent-pid", str(os.getpid())]
        instance = Background.start(path, Path(folder) / "run", flags)
        try:
            _serve(instance, Path(folder) / "run", system)
        finally:
            instance.stop_instance()


def _find_root() -> str:
    """Return the folder of temporary ones, or another where paths of sockets would be too long."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= _LONGEST_ROOT_BYTES else "/tmp"


def end_on_signals() -> None:
    """Let a hangup, as when the terminal is closed, and SIGTERM end what this process has begun."""

    def end(number: int, frame: "FrameType | None") -> None:
        sys.exit(128 + number)

    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def _serve(instance: "Background", run_dir: Path, system: str) -> None:
    status = instance.until_started()
    failed = [one for one in status.models[0].replicas if one.state == "failed"]
    if failed and len(failed) == len(status.models[0].replicas):
        raise ServekitError(f"{status.models[0].name}: {failed[0].reason}")
    chat.talk_to(status.models[0].name, run_dir, system)


def _find_served(model: str) -> Path | None:
    """Return the run directory of an instance that serves the model, by any of its names."""
    from servekit.cli.instance_lookup import read_status
    from servekit.supervisor.process.instances import list_instances

    for one in list_instances():
        try:
            models = read_status(one.run_dir).models
        except ServekitError:
            continue
        if any(model in found.names for found in models):
            return one.run_dir
    return None
