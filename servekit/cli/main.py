"""The Typer application: it parses and delegates.

Heavy imports stand inside the commands, so that `servekit --help` is fast. Exit codes: 0 success, 1
an error of the machine, 2 an error of the input, 130 interrupted.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from servekit.cli import adapters, bench, diagnostics, docs, events, instance_lookup, logs, models
from servekit.cli.chat import command as chat
from servekit.cli.engine import command as environments
from servekit.cli.init import command as init
from servekit.cli.instance_lookup import RunDirectory
from servekit.cli.top import command as top
from servekit.errors import ConfigError, NobodyRuns, ServekitError

if TYPE_CHECKING:
    from servekit.protocol.messages import ToSupervisor
    from servekit.supervisor.deployments.plan import Plan, Source

A = TypeVar("A")

app = typer.Typer(
    help="Serve your own models on your own GPUs: one command, every GPU pinned, nothing lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help is twice as slow as plain help
)

key = typer.Typer(help="API keys.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(key, name="key")
adapter = typer.Typer(
    help="Adapters of a running instance.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(adapter, name="adapter")
engine = typer.Typer(
    help="Python environments of engines.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(engine, name="engine")

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file (YAML).")]


@app.callback(invoke_without_command=True)
def servekit(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from servekit import __version__

        print(f"servekit {__version__}")
        raise typer.Exit


@app.command()
def up(
    config: ConfigFile,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, instead of the file's.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to listen on, instead of the file's; 0: a free port."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="SERVEKIT_INSECURE",
            help="Allow an address that others can reach without API keys.",
        ),
    ] = False,
    run_dir: RunDirectory = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only warnings and errors; no banner.")
    ] = False,
    log_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="pretty or json; by default as the file says.")
    ] = "",
) -> None:
    """Serve the models of a file until told to stop."""
    with _one_sentence():
        if log_format not in ("", "pretty", "json"):
            raise ConfigError(f"--log-format is pretty or json, not {log_format!r}")
        plan = _make_plan(_make_source(config, host, port, insecure=insecure))
        as_json = (log_format or plan.config.logging.format) == "json"
        folder = run_dir or plan.config.run_dir
        raise typer.Exit(_run_plan(plan, folder, quiet=quiet, as_json=as_json))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The configuration file (YAML).")],
) -> None:
    """Check a file and show what would run where; start nothing."""
    with _one_sentence():
        from servekit.cli.tables import plan_tables, print_tables
        from servekit.config.load import error_at
        from servekit.supervisor.scheduling.fetch_checks import look_up
        from servekit.supervisor.scheduling.model_files import problems

        plan = _make_plan(_make_source(file))
        print_tables(*plan_tables(plan))
        found = [f"{file}: {problem}" for problem in problems(plan)]
        for told in look_up(plan):
            if told.level == "error":
                found.append(error_at(file, ("models", told.index, "path"), told.said).message)
            else:
                mark = "warning: " if told.level == "warning" else ""
                print(f"{mark}{told.place}: {told.said}", file=sys.stderr)
        if found:
            raise ConfigError("\n".join(found))


@app.command()
def ps(
    run_dir: RunDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    with _one_sentence():
        from servekit.protocol.messages import GetStatus, Status

        status = _ask_supervisor(instance_lookup.find_instance(run_dir), GetStatus(), Status)
        if ready:
            from servekit.supervisor.admin.systemd import refuse_unready

            refuse_unready(status)
            return
        if as_json:
            import json

            from servekit.protocol.types import as_builtins

            print(json.dumps(as_builtins(status), indent=2))
            return
        from servekit.cli.startup_timings import timing_tables
        from servekit.cli.tables import print_tables, status_tables

        print_tables(*(timing_tables(status) if timings else status_tables(status)))
        if run_dir is None:
            _tell_others(status.pid)


@app.command()
def why(
    name: Annotated[
        str,
        typer.Argument(
            help="A model, an alias, or a process such as MODEL/0.",
            autocompletion=instance_lookup.complete_workers,
        ),
    ],
    run_dir: RunDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the history of a model: its last deaths, their causes, the next attempt."""
    with _one_sentence():
        from servekit.protocol.messages import GetWhy, Why

        folder = instance_lookup.find_run_dir(run_dir)
        try:
            answer = _ask_supervisor(folder, GetWhy(name), Why)
        except NobodyRuns as error:
            events.post_mortem(folder, name, error, as_json=as_json)
            return
        if as_json:
            import json

            from servekit.protocol.types import as_builtins

            print(json.dumps(as_builtins(answer), indent=2))
            return
        from servekit.cli.tables import print_tables
        from servekit.cli.why import why_tables

        print_tables(*why_tables(answer), *events.earlier_exits(folder, name, answer.model))


@app.command()
def reload(run_dir: RunDirectory = None) -> None:
    """Make a running instance read its file again; only what changed is touched."""
    with _one_sentence():
        from servekit.protocol.messages import Accepted, Reload

        print(
            _ask_supervisor(
                instance_lookup.find_instance(run_dir), Reload(), Accepted, timeout_s=60.0
            ).message
        )


@app.command()
def down(
    run_dir: RunDirectory = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests in flight.")] = False,
) -> None:
    """Stop a running instance; returns when all of it is gone."""
    with _one_sentence():
        from servekit.supervisor.admin.control_socket import shut_down

        pid = shut_down(instance_lookup.find_instance(run_dir), now=now)
        print(f"servekit (pid {pid}) has stopped")


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Break a running instance of yours on purpose and check its promises."""
    with _one_sentence():
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


@key.command("new")
def key_new(
    name: Annotated[str, typer.Option(help="Owner of the key, shown in logs.")] = "default",
) -> None:
    """Make an API key; print it once, with the lines for the file, which hold only its hash."""
    with _one_sentence():
        from servekit.config import keys

        if not keys.is_name(name):
            raise ConfigError(keys.NAME_RULE)
        made, line = keys.new_key(name)
        print(f"{made}\n", flush=True)
        print(
            "Store it now: it cannot be shown again. For the configuration file:", file=sys.stderr
        )
        print(f"\nkeys:\n  - name: {name}\n    hash: {line}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors."""
    import json

    from servekit.config.load import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command("metrics")
def reference() -> None:
    """Print all metrics of /metrics with their labels, as a Markdown table."""
    from servekit.metrics import metrics_reference as table

    print(table())


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn servekit's own errors into a sentence on stderr and an exit code."""
    try:
        yield
    except ServekitError as error:
        print(error.message, file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


app.command("doctor")(_one_sentence()(diagnostics.doctor))
app.command("trace-cuda")(_one_sentence()(diagnostics.trace_cuda))
app.command("bench")(_one_sentence()(bench.bench))
app.command("docs")(_one_sentence()(docs.docs))
app.command("init")(_one_sentence()(init.init))
app.command("events")(_one_sentence()(events.events))
app.command("logs")(_one_sentence()(logs.logs))
app.command("top")(_one_sentence()(top.top))
app.command("chat")(_one_sentence()(chat.chat))
for change in (models.load, models.unload, models.sleep, models.wake):
    app.command()(_one_sentence()(change))
for what in (adapters.add, adapters.rm, adapters.ls):
    adapter.command()(_one_sentence()(what))
engine.command("install")(_one_sentence()(environments.install))
engine.command("list")(_one_sentence()(environments.list_environments))
engine.command("remove")(_one_sentence()(environments.remove))


def _make_source(
    path: Path, host: str | None = None, port: int | None = None, *, insecure: bool = False
) -> "Source":
    from servekit.supervisor.deployments.plan import Source

    given = {"host": host, "port": port}
    said = {key: value for key, value in given.items() if value is not None}
    return Source(path.absolute(), said, insecure)


def _make_plan(source: "Source") -> "Plan":
    from servekit.system.gpus import find_gpus

    return source.plan(find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))


def _run_plan(plan: "Plan", run_dir: Path | None, *, quiet: bool, as_json: bool) -> int:
    from servekit.system.import_guard import guard_process

    with guard_process("supervisor"):
        return _run_supervisor(plan, run_dir, quiet=quiet, as_json=as_json)


def _run_supervisor(plan: "Plan", run_dir: Path | None, *, quiet: bool, as_json: bool) -> int:
    import asyncio

    from servekit import logging_config as logs
    from servekit.cli.startup_display import BannerFacts, watch
    from servekit.supervisor.startup_resources import StartupResources

    server = plan.config.server
    outlived = plan.config.launcher == "ray"
    resources = StartupResources.acquire(
        run_dir, server.host, server.port, server.legacy_port, inherits=outlived
    )
    from servekit.supervisor.supervisor import Supervisor  # slow; a busy port is reported first

    logs.configure("supervisor", json=as_json, level="warning" if quiet else "info")

    words = BannerFacts(server.ui, _down_command(resources.run_dir.path))

    async def live() -> int:
        with watch(words, quiet=quiet, as_json=as_json) as display:
            return await Supervisor(plan, resources, dict(os.environ), display).run()

    return asyncio.run(live())


def _down_command(run_dir: Path) -> str:
    from servekit.supervisor.process.run_dir import default_paths

    if run_dir in default_paths(os.environ):
        return "servekit down"
    return f"servekit down --run-dir {shlex.quote(str(run_dir))}"


def _tell_others(pid: int) -> None:
    """Print the running instances other than the one of that PID."""
    from servekit.supervisor.process.instances import list_instances, listing

    if others := [one for one in list_instances() if one.record.pid != pid]:
        print(f"Other running instances:\n{listing(others)}", file=sys.stderr)


def _ask_supervisor(
    run_dir: Path, question: "ToSupervisor", kind: type[A], timeout_s: float = 10.0
) -> A:
    """Return the answer of the instance in `run_dir`, which must be of this kind."""
    import asyncio

    from servekit.supervisor.admin.control_socket import query_supervisor

    answer = asyncio.run(query_supervisor(run_dir / "control.sock", question, timeout_s))
    if not isinstance(answer, kind):
        raise ServekitError("the supervisor sent an answer of an unexpected type")
    return answer
