"""Tables in windows of all widths: figures stay whole."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from servekit.cli.display.responsive_table import Fitted, shorten_text
from servekit.cli.display.tables import new_table, status_tables
from servekit.protocol.messages import GatewayStatus, ModelStatus, ReplicaStatus, Status

LONG = "smollm2-135m-instruct"
WORKER = ReplicaStatus(
    *(f"{LONG}/0", "ready", "", 123456, "cpu", ()), rss_bytes=1000 * 2**20, restarts=3
)
TRIES = replace(WORKER, name=f"{LONG}/1", reason="killed by SIGKILL, " * 5)
ON_GPU = replace(WORKER, device="GPU 0 (NVIDIA H200)", gpu_bytes=60 * 2**30, claim_bytes=70 * 2**30)


def printed(status: Status, width: int) -> str:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for renderable in status_tables(status)[1:]:
            console.print(renderable)
    return captured.get()


def status(*workers: ReplicaStatus) -> Status:
    return Status(
        *("0.1.0", 7, "http://127.0.0.1:8000", "a.yaml", time.time(), 0),
        models=(ModelStatus(LONG, "echo", "", 0, workers),),
        gateways=(GatewayStatus("gateway/0", 2, "ready", requests=12, in_flight=3),),
        draining=False,
    )


def test_at_80_columns_all_figures_and_notes_are_whole() -> None:
    text = printed(status(WORKER, TRIES), 80)
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert rows["WORKER"].split()[-4:] == ["GPU", "RESTARTS", "RUN", "WAIT"]
    assert rows[f"{LONG}/0"].split()[1:] == ["ready", "cpu", "1000", "MiB", *"-300"]
    assert f"{LONG}/1: last: killed by SIGKILL" in text
    assert rows["gateway/0"].split()[-2:] == ["3", "12"]


@pytest.mark.parametrize("width", [60, 72, 80, 90, 120, 200])
@pytest.mark.parametrize("workers", [(WORKER, TRIES), (ON_GPU, TRIES)])
def test_nothing_is_cut_but_names(width: int, workers: tuple[ReplicaStatus, ...]) -> None:
    text = printed(status(*workers), width)
    head = next(line for line in text.splitlines() if line.startswith("WORKER"))
    assert "…" not in head and {"STATE", "RESTARTS"} <= {*head.split()}
    row = next(line for line in text.splitlines() if "/0 " in line)
    assert "ready" in row and "…" not in row.split(" ", 1)[1]
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    if workers[0].claim_bytes and width >= 72:
        assert "60.0 GiB of 70.0 GiB" in row


def test_headers_take_two_lines_before_anything_is_left_out() -> None:
    table = new_table("MODEL", "KV / 1K TOKENS", "LEAST PER GPU", "NOTE")
    table.add_row("x" * 21, "1 MiB", "2 MiB", "why")
    console = Console(width=46)
    with console.capture() as captured:
        console.print(Fitted(table))
    first, second, row, note = captured.get().splitlines()
    assert first.split() == ["KV", "/", "1K", "LEAST"]
    assert second.split() == ["MODEL", "TOKENS", "PER", "GPU"] and row.split()[0] == "x" * 21
    assert note == f"{'x' * 21}: why"


@pytest.mark.parametrize("name", ["a" * 40 + "/standby-0", "模型" * 20 + "/0"])
def test_names_keep_their_ends(name: str) -> None:
    for room in range(60):
        found = shorten_text(name, room)
        assert cell_len(found) <= room
        assert room >= cell_len(name) or room < 16 or (found.endswith(name[-2:]) and "…" in found)
    assert shorten_text(name, 99) == name
