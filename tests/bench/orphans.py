"""After kill -9 of the supervisor: how long until nothing of the instance is alive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.contest import Plan
from tests.bench.table import Figure, spread
from tests.integration.instance import Instance, echo
from tests.polling import poll

RUNS = 10
LIMIT_S = 30.0
AIM_S = 2.0
GRANDCHILDREN = 3


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    for when, load_s in (("serving", 0.0), ("loading", 60.0)):
        took_s = [
            _gone_after_s(folder / f"{when}-{at}", load_s)
            for at in range(1 if plan.quick else RUNS)
        ]
        yield Figure(
            f"nothing alive after kill -9 of the supervisor, {when}",
            f"at most {max(took_s):.2f} s; {spread(took_s)} s",
            f"< {AIM_S:g} s",
            max(took_s) < AIM_S,
            f"{len(took_s)} runs: 1 gateway, 2 workers, {2 * GRANDCHILDREN} grandchildren, guard; "
            "read from /proc",
        )


def _gone_after_s(folder: Path, load_s: float) -> float:
    folder.mkdir()
    model = echo("echo", replicas=2, load_s=load_s, grandchildren=GRANDCHILDREN)
    with Instance.up(folder, [model]) as instance:
        if load_s:
            instance.until("all run", lambda: _complete(instance), within_s=LIMIT_S)
        else:
            instance.until_settled(within_s=LIMIT_S)
        assert _complete(instance)
        began = time.perf_counter()
        instance.process.kill()
        instance.process.wait()
        poll("nothing is alive", lambda: not instance.survivors(), within_s=LIMIT_S)
        return time.perf_counter() - began


def _complete(instance: Instance) -> bool:
    """Guard, gateway, workers and all of their children are there."""
    return len(instance.survivors()) >= 4 + 2 * GRANDCHILDREN
