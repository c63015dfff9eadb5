"""What servekit itself takes: the time of --help, the memory of supervisor and gateway."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from servekit.protocol.messages import Status
from tests.bench.contest import Plan
from tests.bench.cpu import await_calm, cpu_s, memory_bytes
from tests.bench.table import Figure, spread
from tests.integration.instance import Instance, echo

AIM_S = 0.2
AIM_BYTES = 60_000_000
_MB = 1e6


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    took_s = [_help_s(plan) for _ in range(3 if plan.quick else 20)]
    middle_s = sorted(took_s)[len(took_s) // 2]
    yield Figure(
        "`servekit --help`",
        f"{spread(took_s, 3)} s",
        f"< {AIM_S} s",
        middle_s < AIM_S,
        f"wall time, median of {len(took_s)}, files cached",
    )
    with Instance.up(folder, [echo("echo")], server={"ui": not plan.quick}) as instance:
        status = instance.until_settled()
        if not plan.quick:
            instance.until("the UI is up", lambda: _has_ui(status.url), within_s=60)
        yield from _memory(instance, status)


def _help_s(plan: Plan) -> float:
    await_calm(plan.calm_within_s)
    command = Path(sys.executable).with_name("servekit")
    began = time.perf_counter()
    subprocess.run([str(command), "--help"], capture_output=True, timeout=30, check=True)
    return time.perf_counter() - began


def _has_ui(url: str) -> bool:
    return httpx.get(f"{url}/ui/", timeout=30).status_code == 200


def _memory(instance: Instance, status: Status) -> Iterator[Figure]:
    rss, pss = memory_bytes(instance.pid)
    yield Figure(
        "supervisor's memory after `up`",
        f"RSS {rss / _MB:.1f} MB, PSS {pss / _MB:.1f} MB",
        f"< {AIM_BYTES / _MB:g} MB",
        rss < AIM_BYTES,
        f"smaps_rollup; one echo worker; {cpu_s(instance.pid):.2f} s of CPU time so far",
    )
    children = (("gateway, UI served", status.gateways[0].pid),)
    workers = (("echo worker", status.models[0].replicas[0].pid),)
    for what, pid in children + workers:
        rss, pss = memory_bytes(pid)
        yield Figure(f"{what}: memory", f"RSS {rss / _MB:.1f} MB, PSS {pss / _MB:.1f} MB")
