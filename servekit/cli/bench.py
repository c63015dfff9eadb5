"""`servekit bench`: put load on an OpenAI-compatible server and measure it.

`cli.main` registers the command. It writes its output to stdout itself.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.instance_lookup import find_instance, reachable_url, read_status
from servekit.cli.options import ApiKey, Authority, Insecure, RunDirectory, print_json
from servekit.errors import ConfigError, StartError

if TYPE_CHECKING:
    from servekit.bench.options import Options
    from servekit.bench.output.result import Result


# ---------------------------------------------------------------- options: the load

Server = Annotated[
    str | None,
    typer.Argument(metavar="[URL]", help="The server's URL; by default the running instance."),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency", "-c", help="Closed loop: users at the same time; 1,8,64 for several loads."
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate",
        "-r",
        help="Open loop: Poisson arrivals per second, of conversations with --turns; "
        "1,5,10 for several loads.",
    ),
]
Count = Annotated[
    int | None, typer.Option("--requests", "-n", min=1, help="Requests of each load.")
]
Duration = Annotated[
    str | None,
    typer.Option("--duration", "-d", help="Duration of each load: 30s, 5m. Default 30s."),
]
Slo = Annotated[
    str | None,
    typer.Option(help="Goodput: ttft=0.5,itl=0.05,e2e=10 in seconds; also tpot and gap."),
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before each load.")]
Seed = Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Longest time of one request, in seconds.")]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Processes that make the load; by default as many as it needs."
    ),
]

# ---------------------------------------------------------------- options: the requests

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model to ask; not needed if there is only one."),
]
ApiName = Annotated[str, typer.Option(help="chat, completions or embeddings.")]
Stream = Annotated[
    bool, typer.Option("--stream/--no-stream", help="Ask for streams, or for whole answers.")
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        help="Length of prompts: 256, 128..512, normal:256,64 or lognormal:256,64. Default 256."
    ),
]
OutputTokens = Annotated[str, typer.Option(help="Longest answers, in the same form.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Make answers exactly this long.")]
Dataset = Annotated[
    Path | None,
    typer.Option(help='JSONL: {"prompt": "…"} or {"messages": […]}, perhaps max_tokens.'),
]
Turns = Annotated[str, typer.Option(help="Turns of a conversation: 4, 2..6 …")]
SharedPrefixTokens = Annotated[
    int,
    typer.Option(min=0, max=1_000_000, help="Tokens of the prefix that conversations share."),
]
Prefixes = Annotated[
    int, typer.Option(min=1, max=100_000, help="Number of different shared prefixes.")
]
Extra = Annotated[
    str | None, typer.Option(metavar="JSON", help="More JSON fields for each request.")
]

# ---------------------------------------------------------------- options: the result

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is stdout."),
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the results: FILE.png or FILE.html.")
]
Schema = Annotated[
    bool, typer.Option("--schema", help="Print the JSON schema of --json and do nothing else.")
]


# ---------------------------------------------------------------- the command


def bench(
    url: Server = None,
    model: Model = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    requests: Count = None,
    duration: Duration = None,
    api: ApiName = "chat",
    stream: Stream = True,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = "128",
    ignore_eos: IgnoreEos = False,
    dataset: Dataset = None,
    turns: Turns = "1",
    shared_prefix_tokens: SharedPrefixTokens = 0,
    prefixes: Prefixes = 1,
    slo: Slo = None,
    warmup: Warmup = 1,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    extra: Extra = None,
    api_key: ApiKey = None,
    ca: Authority = None,
    insecure: Insecure = False,
    processes: Processes = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    schema: Schema = False,
    run_dir: RunDirectory = None,
) -> None:
    """Put load on an OpenAI-compatible server: rates, latencies, goodput and errors."""
    from servekit.bench import options as bench_options

    if schema:
        from servekit.bench.output.result import result_schema

        print_json(result_schema())
        return
    _check_outputs(json_file, plot)
    where = url or _find_running_url(run_dir)
    options = bench_options.Options(
        target=bench_options.parse_target(
            where, api_key, ca=ca, insecure=insecure, environ=os.environ
        ),
        asking=bench_options.make_asking(
            api=api,
            model=model or "",
            stream=stream,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            turns=turns,
            shared_prefix_tokens=shared_prefix_tokens,
            prefixes=prefixes,
            ignore_eos=ignore_eos,
            extra=extra,
            dataset=dataset,
        ),
        loads=bench_options.parse_loads(concurrency, rate),
        requests=requests,
        duration_s=bench_options.parse_run_time(duration)
        or (None if requests else bench_options.DEFAULT_S),
        warmup=warmup,
        seed=seed,
        timeout_s=timeout,
        processes=processes,
        slo=bench_options.parse_limits(slo),
    )
    raise typer.Exit(_report_result(_run_benchmark(options), json_file, plot))


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Check the output paths before the measurement, not after it."""
    from servekit.bench.output.plot import check_plot

    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is None or str(path) == "-":
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {folder}")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{option} {path}: it cannot be written")
    if plot is not None:
        check_plot(plot)


def _find_running_url(run_dir: Path | None) -> str:
    """Return the URL of the running instance on this machine."""
    try:
        return reachable_url(read_status(find_instance(run_dir)))
    except StartError as error:
        raise StartError(f"{error.message}, a URL as argument measures another server") from None


def _run_benchmark(options: "Options") -> "Result":
    from servekit.bench.output.live_display import watch_load
    from servekit.bench.run import run_benchmark
    from servekit.system.python import python_command

    return run_benchmark(
        options, python_command.module_command("servekit.bench"), os.environ, watch_load
    )


def _report_result(result: "Result", json_file: Path | None, plot: Path | None) -> int:
    """Print and write the result; return the exit code, 1 if no request was answered."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(result)).decode()
    if str(json_file) == "-":
        sys.stdout.write(f"{text}\n")
    else:
        from servekit.bench.output.report import result_tables
        from servekit.cli.display.tables import print_tables

        print_tables(*result_tables(result))
        if json_file is not None:
            _write_file(json_file, f"{text}\n")
    if plot is not None:
        from servekit.bench.output.plot import draw_plot

        draw_plot(result, plot)
    return 0 if any(run.completed for run in result.runs) else 1


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise StartError(f"--json {path}: {error.strerror}") from None
