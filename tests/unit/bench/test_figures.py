"""The benchmark's own parts, and that its command prints the table it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import counting
from tests.bench.contest import bare
from tests.bench.cpu import cpu_s, machine_cpu_s, memory_bytes, writes
from tests.bench.load import Order, Unexpected, run
from tests.bench.table import Figure, markdown, percentile, spread

ROOT = Path(__file__).parents[3]


@pytest.mark.lane("bench")
def test_the_command_prints_a_row_for_every_promise() -> None:
    command = [sys.executable, "-m", "tests.bench.figures", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for promise in (
        "no-op request, 64 connections",
        "streamed tokens per CPU second, 128 streams",
        "streamed tokens/s, 128 streams",
        "death noticed",
        "answered by a warm peer",
        "kill -9 of the supervisor, serving",
        "kill -9 of the supervisor, loading",
        "servekit --help",
        "supervisor's memory",
    ):
        row = next((row for row in rows if promise in row), None)
        assert row is not None, f"no row for {promise!r} in\n{done.stdout}"
        assert len(row.split(" | ")) == 5, row


def test_the_load_counts_whole_answers_and_the_servers_cpu_time() -> None:
    with bare('{"some": "answer"}') as (port, pid):
        result = run(Order(port, "/whole", "{}", 4, (pid,), seconds=0.3, warm_s=0.1))
    assert result.answers > 10
    assert result.events == 0
    assert result.writes >= result.answers - 4
    assert 0 < result.cpu_s[0] <= result.wall_s * 1.1


def test_the_load_counts_every_event_of_a_stream_once() -> None:
    with bare("{}") as (port, pid):
        order = Order(port, "/stream", '{"max_tokens": 3}', 1, (pid,), True, 0.3, 0.1)
        result = run(order)
    # three chunks and the [DONE]; the streams cut at either end are the tolerance
    assert result.answers > 3
    assert abs(result.events - 4 * result.answers) <= 4


def test_the_load_refuses_to_count_errors() -> None:
    with bare("{}") as (port, pid), pytest.raises(Unexpected, match="500"):
        run(Order(port, "/stream", "not JSON", 1, (pid,), True, 0.5, 0.1))


def test_what_the_kernel_counts_grows() -> None:
    mine, all_of_it = cpu_s(1), machine_cpu_s()
    assert mine >= 0 and all_of_it > 0
    rss, pss = memory_bytes(int(Path("/proc/self").resolve().name))
    assert rss >= pss > 1_000_000
    assert cpu_s(2**22 + 1) == 0
    assert writes(2**22 + 1) == 0


def test_a_table_says_what_was_not_met() -> None:
    table = markdown([Figure("a", "1", "≥ 2", False, "so"), Figure("b", "3")])
    assert table.splitlines()[2:] == ["| a | 1 | ≥ 2 | **no** | so |", "| b | 3 |  |  |  |"]
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert percentile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert percentile([5.0, 1.0, 3.0], 0.99) == 5.0


@pytest.mark.lane("bench")
@pytest.mark.parametrize("name", ["path", "worker_path"])
def test_the_python_of_the_hot_path_is_measured(name: str) -> None:
    command = [sys.executable, "-m", f"tests.bench.{name}", "--seconds", "0.2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" µs") >= 2 and "request" in done.stdout and "token" in done.stdout


async def test_the_cost_of_counting_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    await counting.main(batches=1)
    assert capsys.readouterr().out.count("where nothing is counted") == 2


@pytest.mark.lane("bench")
def test_the_cost_of_choosing_is_measured() -> None:
    command = [sys.executable, "-m", "tests.bench.affinity", "--quick", "--only", "overhead"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for row in (
        "one choice among 4 |",
        "| auto, 4 replicas",
        "| round_robin, 4 replicas",
        "| auto, 1 replicas",
    ):
        assert row in done.stdout
