"""The report of `servekit bench` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servekit.bench.output.result import Result, Run, Spread
from servekit.units import format_latency, format_number

_LATENCIES = (
    ("time to first token", "ttft_s"),
    ("between chunks", "itl_s"),
    ("per output token", "tpot_s"),
    ("end to end", "e2e_s"),
)


def result_tables(result: Result) -> Iterator[RenderableType]:
    """Yield rates by load, latencies by load, errors, and warnings."""
    if not result.runs:
        yield Text("Interrupted before anything was measured.")
        return
    yield _result_heading(result)
    yield Text()
    yield _rate_table(result.runs)
    if any(run.completed for run in result.runs):
        yield Text()
        yield _latency_table(result.runs)
    if any(run.errors for run in result.runs):
        yield Text()
        yield _error_table(result.runs)
    for sentence in result_notes(result.runs):
        yield Text(f"\n{sentence}", style="yellow")


def load_text(run: Run) -> str:
    if run.concurrency is not None:
        return f"{run.concurrency} at once"
    return f"{run.rate:g} arrivals/s"


def result_notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield caveats about the figures; each once."""
    found: dict[str, None] = {}
    for run in runs:
        for sentence in _run_notes(run):
            found[sentence if len(runs) == 1 else f"{load_text(run)}: {sentence}"] = None
    yield from found


def _run_notes(run: Run) -> Iterator[str]:
    if run.interrupted:
        yield f"Interrupted; measured until then, {run.unfinished} requests were under way."
    if run.tokens_by == "chunks":
        yield "The server reports no usage: each chunk of a stream is counted as one token."
    if run.tokens_by == "both":
        yield "For some requests the server reported no usage: their chunks are counted as tokens."
    yield from run.client.limits


def _result_heading(result: Result) -> Text:
    about = result.asked
    how = "streams" if about["stream"] else "not streamed"
    prompts = about["dataset"] or f"prompts of {about['prompt_tokens']} tokens"
    answers = "" if about["api"] == "embeddings" else f", answers of {about['output_tokens']}"
    return Text(f"{result.url}, {about['model']}: {about['api']}, {how}, {prompts}{answers}")


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _rate_table(runs: Sequence[Run]) -> Table:
    has_goodput = any(run.goodput for run in runs)
    columns = ["LOAD", "TIME", "DONE", "FAILED", "REQUESTS/S", "TOKENS/S", "PROMPT", "ANSWER"]
    table = _new_table(*columns, *(("GOODPUT/S", "GOOD") if has_goodput else ()))
    for run in runs:
        cells = [
            load_text(run),
            format_latency(run.duration_s),
            str(run.completed),
            str(run.failed),
        ]
        cells += [format_number(run.requests_per_s), format_number(run.output_tokens_per_s)]
        cells += [_format_mean(run.prompt_tokens), _format_mean(run.output_tokens)]
        if run.goodput is not None:
            cells += [format_number(run.goodput.requests_per_s), f"{run.goodput.share:.1%}"]
        table.add_row(*cells)
    return table


def _format_mean(found: Spread | None) -> str:
    return "-" if found is None else format_number(found.mean)


def _latency_table(runs: Sequence[Run]) -> Table:
    table = _new_table("LOAD", "LATENCY", "MEAN", "P50", "P90", "P99", "MAX")
    for run in runs:
        label = load_text(run)
        for name, field in _LATENCIES:
            found: Spread | None = getattr(run, field)
            if found is not None:
                values = (found.mean, found.p50, found.p90, found.p99, found.max)
                table.add_row(label, name, *map(format_latency, values))
                label = ""
    # the second column is text as well
    table.columns[1].justify = "left"
    return table


def _error_table(runs: Sequence[Run]) -> Table:
    table = _new_table("LOAD", "ERROR", "COUNT", "FIRST MESSAGE")
    table.columns[1].justify = table.columns[3].justify = "left"
    table.columns[3].no_wrap = False
    for run in runs:
        for error in run.errors:
            table.add_row(load_text(run), error.kind, str(error.count), Text(error.message))
    return table
