"""`servekit up`: serve the models of a file, or models that are named, until told to stop."""

# No string annotations: typer evaluates each several times, which slows down --help.
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.options import RunDirectory
from servekit.errors import ConfigError, ServekitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from servekit.supervisor.deployments.plan import Plan, Source

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE | MODEL...]",
        help="The configuration file (YAML), or models to serve without a file: a folder, a .gguf"
        " file, a hub id (org/name), or demo.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="The configuration file (YAML). Where nothing is named: $SERVEKIT_CONFIG, then "
        "servekit.yaml here, then the one in $XDG_CONFIG_HOME/servekit.",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(envvar="SERVEKIT_HOST", help="Address to listen on, instead of the file's."),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on, instead of the file's; 0: a free port. Or $SERVEKIT_PORT.",
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME",
        envvar="SERVEKIT_PROFILE",
        help="Serve only the models of this profile of the file.",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the model, if one is given.")]
Engine = Annotated[
    str | None, typer.Option(help="Engine of the models that are given; by default auto.")
]
Gpus = Annotated[
    str | None,
    typer.Option(metavar="GPUS", help="GPUs for the models that are given: 0,1, all or none."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory of each GPU for each model that is given: 20GiB, 40%."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--max-context", min=16, metavar="TOKENS", help="Context of the models that are given."
    ),
]


def up(
    words: Words = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    profile: Profile = "",
    name: Name = None,
    engine: Engine = None,
    gpus: Gpus = None,
    memory: Memory = None,
    max_context: Context = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="SERVEKIT_INSECURE",
            help="Allow an address that others can reach without API keys.",
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            allow_from_autoenv=False,
            help="Serve in the background; return when the models are ready.",
        ),
    ] = False,
    run_dir: RunDirectory = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only warnings and errors; no banner.")
    ] = False,
    log_format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            envvar="SERVEKIT_LOG_FORMAT",
            help="pretty or json; by default as the file says.",
        ),
    ] = "",
    log_file: Annotated[Path | None, typer.Option(hidden=True, allow_from_autoenv=False)] = None,
    parent_pid: Annotated[int, typer.Option(hidden=True, allow_from_autoenv=False)] = 0,
) -> None:
    """Serve the models of a file, or models that are named here, until told to stop."""
    if parent_pid:
        from servekit.system.parent_death import die_with

        die_with(parent_pid)
    from servekit.system.python.lean_start import import_structlog

    import_structlog()
    from servekit.cli.up.sources import ModelOptions, find_source

    if log_format not in ("", "pretty", "json"):
        raise ConfigError(f"--log-format is pretty or json, not {log_format!r}")
    options = ModelOptions(name, engine, gpus, memory, max_context)
    path = find_source(words or (), config, options, os.environ)
    port = _read_port(os.environ.get("SERVEKIT_PORT", "")) if port is None else port
    source = make_source(path, host, port, insecure=insecure, profile=profile)
    plan, folder = _make_plan_as_before(source, run_dir)
    as_json = (log_format or plan.config.logging.format) == "json"
    if log_file is None:  # else the process that started this one has asked
        tell_fit(plan, quiet=quiet or as_json)
    if detach:
        flags = ["--insecure"] * insecure + ["--quiet"] * quiet
        given = {"--host": host, "--port": port, "--log-format": log_format or None}
        flags += _set_flags(given | {"--profile": profile or None})
        raise typer.Exit(_serve_in_background(plan, path, folder, flags))
    raise typer.Exit(_run_plan(plan, folder, quiet=quiet, as_json=as_json, log_file=log_file))


def _read_port(text: str) -> int | None:
    """Return the port of SERVEKIT_PORT, which may be absent.

    Kubernetes sets a variable of that name, with an address, for a service that is called servekit.
    """
    if not text or "://" in text:
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"SERVEKIT_PORT is a number up to 65535, not {text!r}")
    return int(text)


def _set_flags(options: "Mapping[str, object]") -> list[str]:
    given = ((flag, str(value)) for flag, value in options.items() if value is not None)
    return [word for pair in given for word in pair]


def _serve_in_background(plan: "Plan", path: Path, folder: Path | None, flags: list[str]) -> int:
    """Start an instance in the background; return 0 once it serves, 1 if a model has failed."""
    from servekit.cli.display.startup_display import BannerFacts, banner, format_link
    from servekit.cli.display.tables import print_tables
    from servekit.cli.up.background import Background
    from servekit.cli.up.link import request_link

    instance = Background.start(path, folder, flags)
    try:
        status = instance.until_started()
    except KeyboardInterrupt:
        pid, log = instance.process.pid, instance.log
        typer.echo(f"servekit (pid {pid}) goes on in the background; its log: {log}", err=True)
        return 130
    found = instance.find_instance()
    stop = _down_command(found.run_dir) if found is not None else "servekit down"
    facts = BannerFacts(plan.config.server.ui, stop, str(instance.log))
    print_tables(banner(status, facts, boxed=False))
    if found is not None and sys.stdout.isatty():
        with contextlib.suppress(ServekitError):  # the file wants none, or it cannot be safe
            typer.echo(format_link(request_link(found.run_dir)))
    return int(any(one.state == "failed" for model in status.models for one in model.replicas))


def make_source(
    path: Path,
    host: str | None = None,
    port: int | None = None,
    *,
    insecure: bool = False,
    profile: str = "",
) -> "Source":
    from servekit.supervisor.deployments.plan import Source

    given = {"host": host, "port": port}
    said = {key: value for key, value in given.items() if value is not None}
    return Source(path.absolute(), said, insecure, profile=profile, asked_profile=profile)


def make_plan(source: "Source") -> "Plan":
    from servekit.cli.up.sources import blame_options
    from servekit.system.gpu.gpus import find_gpus

    try:
        return source.plan(find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    except ConfigError as error:
        raise ConfigError(blame_options(source.path, error.message)) from None


def _make_plan_as_before(source: "Source", run_dir: Path | None) -> "tuple[Plan, Path | None]":
    """Return the plan and the run directory, with the profile that was in force before a crash."""
    from dataclasses import replace

    from servekit.config.load import load_config
    from servekit.config.schema import ALL_MODELS
    from servekit.supervisor.process.run_dir import find_switched_profile

    refusal = None
    try:
        plan = make_plan(source)
        config = plan.config
    except ConfigError as error:  # as where only the models of that profile fit
        refusal = error
        try:
            config = load_config(source.path)
        except ConfigError:
            raise error from None
    folder = run_dir or config.run_dir
    switched = find_switched_profile(folder, os.environ, source.profile)
    if switched != source.profile and switched in ("", *config.profiles):
        typer.echo(f"the profile is {switched or ALL_MODELS} again, as before", err=True)
        return make_plan(replace(source, profile=switched)), folder
    if refusal is not None:
        raise refusal
    return plan, folder


def tell_fit(plan: "Plan", *, quiet: bool = False) -> None:
    """Say what is to be fetched from the hub, and whether it fits.

    With `quiet` nothing is printed. Raises ConfigError if it cannot fit; all else is the matter of
    each model when it starts.
    """
    from servekit.cli.display.tables import fit_lines
    from servekit.config.load import error_at
    from servekit.supervisor.scheduling.fetch_checks import look_up, with_estimates

    findings = look_up(plan, sources=("hub",))
    for told in findings:
        if told.level == "error" and told.estimate is not None:
            raise error_at(plan.source.path, ("models", told.index, "path"), told.said)
        if not quiet:
            typer.echo(f"{told.place}: {told.said}", err=True)
    if quiet:
        return
    if names := [plan.config.models[told.index].name for told in findings if told.estimate]:
        for line in fit_lines(with_estimates(plan, findings), names):
            typer.echo(line.plain, err=True)


def _run_plan(
    plan: "Plan", run_dir: Path | None, *, quiet: bool, as_json: bool, log_file: Path | None
) -> int:
    from servekit.system.python.import_guard import guard_process

    with guard_process("supervisor"):
        return _run_supervisor(plan, run_dir, quiet=quiet, as_json=as_json, log_file=log_file)


def _run_supervisor(
    plan: "Plan", run_dir: Path | None, *, quiet: bool, as_json: bool, log_file: Path | None
) -> int:
    import asyncio

    from servekit import logging_config as logs
    from servekit.cli.display.startup_display import BannerFacts, watch
    from servekit.supervisor.startup_resources import StartupResources

    server = plan.config.server
    outlived = plan.config.launcher == "ray"
    resources = StartupResources.acquire(
        run_dir, server.host, server.port, server.legacy_port, inherits=outlived
    )
    from servekit.supervisor.supervisor import Supervisor  # slow; a busy port is reported first

    level = "warning" if quiet else "info"
    logs.configure("supervisor", json=as_json, level=level, file=log_file)

    words = BannerFacts(server.ui, _down_command(resources.run_dir.path))

    async def live() -> int:
        with watch(words, quiet=quiet, as_json=as_json) as display:
            supervisor = Supervisor(
                plan, resources, dict(os.environ), display.on_change, display.on_line
            )
            display.create_link = supervisor.create_link
            return await supervisor.run()

    return asyncio.run(live())


def _down_command(run_dir: Path) -> str:
    from servekit.supervisor.process.run_dir import default_paths

    if run_dir in default_paths(os.environ):
        return "servekit down"
    return f"servekit down --run-dir {shlex.quote(str(run_dir))}"
