"""A check for a load generator that was itself the bottleneck. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: CPU use of a client process, in cores; above, its own work delays its measurements.
BUSY_CORES = 0.9
#: Limit of the 99th percentile of timer delays.
LAG_S = 0.02
#: Limit of the 99th percentile of delays of arrivals.
LATE_S = 0.02
#: Limit of the utilisation of this machine's cores, by all processes.
BUSY_MACHINE = 0.95


@dataclass(frozen=True, slots=True)
class Clients:
    """The figures of the client processes of one load, and of their machine."""

    cpu_cores: tuple[float, ...]
    lag_p99_s: float
    late_p99_s: float | None  # None in a closed loop
    machine: float = 0.0  # utilisation of its cores
    cores: int = 1  # of this machine
    beside_server: bool = False  # the server runs on this machine too


def saturation_limits(found: Clients) -> Iterator[str]:
    """Yield a sentence with a figure for each way in which the clients were the bottleneck."""
    busiest = max(found.cpu_cores, default=0.0)
    if busiest >= BUSY_CORES:
        yield (
            f"The load generator was the limit: its busiest process took {busiest:.0%} of a core"
            f"; {_give_advice(found)}."
        )
    if found.lag_p99_s >= LAG_S:
        yield (
            "The load generator's event loop was late: 1 % of the times by "
            f"{_format_ms(found.lag_p99_s)} or more, which the latencies include; "
            f"{_give_advice(found)}."
        )
    if found.late_p99_s is not None and found.late_p99_s >= LATE_S:
        yield (
            f"Arrivals were sent late, 1 % of them by {_format_ms(found.late_p99_s)} or more; "
            f"latencies count from the time when they were due; {_give_advice(found)}."
        )
    if found.machine >= BUSY_MACHINE and found.beside_server:
        yield (
            f"The {found.cores} cores of this machine were {found.machine:.0%} busy, and the "
            "server runs on it too: they slowed each other down."
        )


def _give_advice(found: Clients) -> str:
    if found.machine < BUSY_MACHINE and len(found.cpu_cores) < found.cores:
        return f"use more processes (--processes {len(found.cpu_cores) + 1})"
    return "run it where there are more free cores"


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
