"""The Typer application: it parses and delegates.

Heavy imports stand inside the commands, so that `servekit --help` is fast. Exit codes: 0 success, 1
an error of the machine, 2 an error of the input, 130 interrupted.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from servekit.cli import (
    adapters,
    bench,
    diagnostics,
    docs,
    events,
    instance_lookup,
    keys,
    logs,
    models,
    requests,
    usage,
)
from servekit.cli.chat import command as chat
from servekit.cli.display.help_format import Command, make_app
from servekit.cli.engine import command as environments
from servekit.cli.init import command as init
from servekit.cli.model_files import command as model_files
from servekit.cli.options import AsJson, RunDirectory, print_json
from servekit.cli.service import command as service
from servekit.cli.top import command as top
from servekit.cli.up import command as serve
from servekit.cli.up import link
from servekit.cli.up import run as conversation
from servekit.cli.up.command import ConfigFile
from servekit.errors import ConfigError, NobodyRuns, ServekitError

#: A reload reads the file, after earlier reloads.
_RELOAD_S = 60.0

app = make_app(
    "Serve your own models on your own GPUs: one command, every GPU pinned, nothing lost."
)


@app.callback(
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        # each option can be set by SERVEKIT_COMMAND_OPTION
        "auto_envvar_prefix": "SERVEKIT",
    },
)
def servekit(
    ctx: typer.Context,
    version: Annotated[
        bool,
        # SERVEKIT_VERSION is a likely variable of containers, and means something else there
        typer.Option("--version", "-V", help="Print the version.", allow_from_autoenv=False),
    ] = False,
) -> None:
    if version:
        print_version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def print_version() -> None:
    """Print the version."""
    from servekit import __version__

    print(f"servekit {__version__}")


def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="The configuration file (YAML); by default as for `servekit up`."
        ),
    ] = None,
    config: ConfigFile = None,
    profile: serve.Profile = "",
) -> None:
    """Check a file and show what would run where; start nothing."""
    from dataclasses import replace

    from servekit.cli.display.tables import plan_tables, print_tables
    from servekit.cli.up.sources import ModelOptions, find_source
    from servekit.config.engines.installed import Machine
    from servekit.config.load import error_at, suggest_engines
    from servekit.supervisor.scheduling.fetch_checks import look_up, with_estimates
    from servekit.supervisor.scheduling.model_files import list_blind, problems

    if file is None or config is not None:
        words = [str(file)] if file is not None else []
        file = find_source(words, config, ModelOptions(), os.environ)
    source = serve.make_source(file, profile=profile)
    plan = serve.make_plan(source)
    for other in () if profile else plan.config.profiles:
        try:
            serve.make_plan(replace(source, profile=other))
        except ConfigError as error:
            raise ConfigError(f"--profile {other}: {error.message}") from None
    looked_up = look_up(plan)
    plan = with_estimates(plan, looked_up)
    print_tables(*plan_tables(plan))
    machine = Machine(bool(plan.gpus), environ=source.environ)
    for name, choice in suggest_engines(plan.config, file.absolute().parent, machine):
        print(f"{name}: `engine: auto` would choose {choice}", file=sys.stderr)
    for blind in list_blind(plan):
        print(f"warning: {blind}", file=sys.stderr)
    found = [f"{file}: {problem}" for problem in problems(plan)]
    for told in looked_up:
        if told.level == "error":
            found.append(error_at(file, ("models", told.index, "path"), told.said).message)
        else:
            mark = "warning: " if told.level == "warning" else ""
            print(f"{mark}{told.place}: {told.said}", file=sys.stderr)
    if found:
        raise ConfigError("\n".join(found))


def ps(
    run_dir: RunDirectory = None,
    as_json: AsJson = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="Show the phases of each process's start.")
    ] = False,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready", help="Print only the reason if /readyz returns 503, and exit with 1."
        ),
    ] = False,
) -> None:
    """Show the processes of a running instance."""
    status = instance_lookup.read_status(instance_lookup.find_instance(run_dir))
    if ready:
        from servekit.supervisor.admin.systemd import refuse_unready

        refuse_unready(status)
        return
    if as_json:
        print_json(status)
        return
    from servekit.cli.display.startup_timings import timing_tables
    from servekit.cli.display.tables import print_tables, status_tables

    print_tables(*(timing_tables(status) if timings else status_tables(status)))
    if run_dir is None:
        _tell_others(status.pid)


def why(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[/N]",
            help="A model, an alias, or a process such as MODEL/0.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ],
    run_dir: RunDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Show the history of a model: its last deaths, their causes, the next attempt."""
    from servekit.protocol.messages import GetWhy, Why

    folder = instance_lookup.find_run_dir(run_dir)
    try:
        answer = instance_lookup.ask_instance(folder, GetWhy(name), Why)
    except NobodyRuns as error:
        events.post_mortem(folder, name, error, as_json=as_json)
        return
    if as_json:
        print_json(answer)
        return
    from servekit.cli.display.tables import print_tables
    from servekit.cli.why import why_tables

    since, before = events.earlier_exits(folder, name, answer)
    tables = why_tables(answer, had_others=bool(since))
    print_tables(*tables, *events.exit_lines(since, before))


def reload(run_dir: RunDirectory = None) -> None:
    """Make a running instance read its file again; only what changed is touched."""
    from servekit.protocol.messages import Accepted, Reload

    folder = instance_lookup.find_instance(run_dir)
    print(instance_lookup.ask_instance(folder, Reload(), Accepted, _RELOAD_S).message)


def down(
    run_dir: RunDirectory = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests in flight.")] = False,
) -> None:
    """Stop a running instance; returns when all of it is gone."""
    from servekit.supervisor.admin.control_socket import shut_down

    pid = shut_down(instance_lookup.find_instance(run_dir), now=now)
    print(f"servekit (pid {pid}) has stopped")


def chaos(
    url: Annotated[str, typer.Option(help="Address of the instance.")] = "http://127.0.0.1:8000",
    run_dir: RunDirectory = None,
    model: Annotated[str | None, typer.Option(help="Model to test; by default the first.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Seconds of load after each fault.")
    ] = 5.0,
    only: Annotated[str, typer.Option(help="Names of experiments, separated by commas.")] = "",
    memory: Annotated[int, typer.Option(min=0, metavar="MB", help="Memory to occupy.")] = 0,
    kill_supervisor: Annotated[
        bool,
        typer.Option(
            "--kill-supervisor",
            help="Also kill the supervisor, as the last experiment; this ends the instance.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Break a running instance of yours on purpose and check its promises."""
    from servekit.chaos import command
    from servekit.chaos.run import RunOptions

    names = [name.strip() for name in only.split(",") if name.strip()]
    options = RunOptions(
        seconds, names, memory_bytes=memory * 2**20, kill_supervisor=kill_supervisor
    )
    here = instance_lookup.find_instance(run_dir)
    if not yes:
        typer.confirm(f"Kill and stop processes of the instance in {here}?", abort=True)
    findings = command.run_chaos(url, here, model, options)
    print(command.format_findings(findings, as_json=as_json))
    raise typer.Exit(any(finding.verdict == "broken" for finding in findings))


def schema() -> None:
    """Print the JSON schema of the configuration file, for editors."""
    from servekit.config.load import json_schema

    print_json(json_schema())


def reference() -> None:
    """Print all metrics of /metrics with their labels, as a Markdown table."""
    from servekit import metrics

    print(metrics.metrics_reference())


#: What pathlib raises for `~` where HOME is not set, and the user is in no list of users.
_NO_HOME = "Could not determine home directory."
#: The characters of a name that an error shows.
_LONGEST_NAME = 500


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn our own errors, and those of a user's paths, into a sentence and an exit code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see `__main__`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except ServekitError as error:
        print(error.message, file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        if not (said := _explain_path_error(error)):
            raise
        print(said, file=sys.stderr)
        raise typer.Exit(1) from None
    except RuntimeError as error:
        if str(error) != _NO_HOME:
            raise
        print(f"user {os.getuid()} has no home directory: set HOME", file=sys.stderr)
        raise typer.Exit(1) from None
    except UnicodeEncodeError as error:
        print(f"{error.object[:_LONGEST_NAME]!a} is not UTF-8", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _explain_path_error(error: OSError) -> str:
    """Return a sentence on a path or an output that cannot be used; "" for any other error."""
    if error.filename is not None:
        is_of_path = error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
        return f"{error.filename}: {error.strerror}" if is_of_path else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the output cannot be written: {error.strerror}"
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the working directory does not exist any more; change to another one"
    return ""


def _register(
    group: typer.Typer, panel: str, commands: dict[str, Callable[..., Any]], *, hidden: bool = False
) -> None:
    for name, command in commands.items():
        wrapped = _one_sentence()(command)
        group.command(name, cls=Command, rich_help_panel=panel, hidden=hidden)(wrapped)


_register(
    app,
    "Serve",
    {
        "up": serve.up,
        "run": conversation.run_model,
        "down": down,
        "reload": reload,
        "restart": models.restart,
        "profile": models.profile,
        "link": link.link,
    },
)
_register(
    app,
    "Watch",
    {
        "ps": ps,
        "top": top.top,
        "why": why,
        "requests": requests.requests,
        "usage": usage.usage,
        "events": events.events,
        "logs": logs.logs,
    },
)
_register(
    app,
    "Models",
    {
        "ls": model_files.ls,
        "pull": model_files.pull,
        "rm": model_files.rm,
        "load": models.load,
        "unload": models.unload,
        "sleep": models.sleep,
        "wake": models.wake,
        "chat": chat.chat,
    },
)
_register(
    app,
    "Prepare",
    {
        "init": init.init,
        "check": check,
        "doctor": diagnostics.doctor,
        "schema": schema,
        "docs": docs.docs,
    },
)
_register(
    app,
    "Measure and test",
    {
        "bench": bench.bench,
        "metrics": reference,
        "chaos": chaos,
        "trace-cuda": diagnostics.trace_cuda,
    },
)
#: Words of other programs.
_register(
    app,
    "Aliases",
    {
        "serve": serve.up,
        "stop": down,
        "status": ps,
        "list": model_files.ls,
        "version": print_version,
    },
    hidden=True,
)

_GROUPS: dict[str, tuple[str, str, dict[str, Callable[..., Any]]]] = {
    "adapter": (
        "Models",
        "Load, unload and list adapters of a running instance.",
        {"add": adapters.add, "rm": adapters.rm, "ls": adapters.ls},
    ),
    "key": (
        "Prepare",
        "Make, list and remove API keys.",
        {"new": keys.new, "ls": keys.ls, "rm": keys.rm},
    ),
    "engine": (
        "Prepare",
        "Install, list and remove Python environments of engines.",
        {
            "install": environments.install,
            "list": environments.list_environments,
            "remove": environments.remove,
        },
    ),
    "service": ("Prepare", "Serve at each boot, by systemd.", {"install": service.install}),
}
for _name, (_panel, _help, _commands) in _GROUPS.items():
    _group = make_app(_help)
    _register(_group, "Commands", _commands)
    app.add_typer(_group, name=_name, rich_help_panel=_panel)


def _tell_others(pid: int) -> None:
    """Print the running instances other than the one of that PID."""
    from servekit.supervisor.process.instances import list_instances, listing

    if others := [one for one in list_instances() if one.record.pid != pid]:
        print(f"Other running instances:\n{listing(others)}", file=sys.stderr)
