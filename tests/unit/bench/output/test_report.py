"""What people see of a result."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from servekit.bench.output.report import result_notes, result_tables
from servekit.bench.output.result import Result
from tests.unit.bench.results import result


def shown(found: Result) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False, emoji=False, highlight=False)
    with console.capture() as told:
        for table in result_tables(found):
            console.print(table)
    return told.get()


def test_rates_latencies_errors_and_doubts() -> None:
    text = shown(result())
    lines = {line.split("  ")[0]: line.split() for line in reversed(text.splitlines())}
    assert "http://a:1/v1, <m>: chat, streams, prompts of 256 tokens, answers of 16" in text
    assert lines["1 at once"][3:] == [
        "6",
        "s",
        "50",
        "1",
        "8.33",
        "133",
        "256",
        "16",
        "8.33",
        "98.0%",
    ]
    assert "429" in text and "the queue is full" in text
    assert "2 at once: The load generator was the limit: its busiest process took 95%" in text


def test_what_is_not_streamed_has_no_first_token() -> None:
    text = shown(result(1, stream=False))
    assert "end to end" in text
    assert "first token" not in text and "chunks" not in text


def test_nothing_measured_is_said() -> None:
    assert "Interrupted before anything" in shown(result(0))


def test_an_interruption_and_a_guess_are_said() -> None:
    (run,) = result(1).runs
    cut = msgspec.structs.replace(run, interrupted=True, unfinished=3, tokens_by="chunks")
    told = list(result_notes([cut]))
    assert "3 requests were under way" in told[0]
    assert "counted as one token" in told[1]
