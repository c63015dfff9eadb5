"""Jumps of the wall clock, by libfaketime under a whole instance: nothing may depend on it.

Only time.time() jumps; the monotonic clock goes on, as when NTP or an operator sets a clock.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.messages import Status
from tests.integration.instance import PROGRAM, Instance, bearer, echo, stream_completion
from tests.integration.test_access import ALICE, ALICE_HASH
from tests.polling import poll

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no libfaketime")

LONG = 400
BODY: dict[str, Any] = {"model": "a", "prompt": "x" * LONG, "max_tokens": LONG, "stream": True}
#: A year ahead, and ten years back from there.
JUMPS_S = (365 * 86400, -9 * 365 * 86400)


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Remove what libfaketime leaves of processes that were killed."""
    yield
    for file in Path("/dev/shm").glob("*faketime_*"):
        if not Path("/proc", file.name.rpartition("_")[2]).exists():
            file.unlink(missing_ok=True)


class Clock:
    """The wall clock of an instance."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)
        self.env = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def set(self, offset_s: int) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{offset_s:+d}\n")
        os.replace(fresh, self._file)  # noqa: PTH105


def lives(status: Status) -> list[tuple[str, int, str]]:
    workers = [(r.name, r.pid, r.state) for model in status.models for r in model.replicas]
    return [*workers, *((one.name, one.pid, one.state) for one in status.gateways)]


@pytest.mark.lane("long")
def test_jumps_of_the_wall_clock_change_nothing(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    limited = {"name": "alice", "hash": ALICE_HASH, "requests_per_minute": 4}
    server = {"keys": [limited]}
    with Instance.up(
        tmp_path, [echo("a", step_s=0.01, replicas=2)], env=clock.env, sections=server
    ) as instance:
        before = lives(instance.until_settled())
        url, came, begun = instance.url, list[str](), threading.Event()

        def read() -> None:
            for text in stream_completion(url, bearer(ALICE), **BODY):
                came.append(text)
                begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        for jump_s in JUMPS_S:
            clock.set(jump_s)
            year = time.gmtime(time.time() + jump_s).tm_year
            poll("the clock has jumped", partial(has_year, url, year))
            short = {**BODY, "prompt": "hello", "max_tokens": 5, "stream": False}
            answer = httpx.post(f"{url}/v1/completions", json=short, headers=bearer(ALICE))
            assert answer.json()["choices"][0]["text"] == "hello"
            assert httpx.get(f"{url}/readyz").status_code == 200
            assert_reads_well(instance, clock)
        reader.join(60)
        assert "".join(came) == "x" * LONG
        last = httpx.post(f"{url}/v1/completions", json=short, headers=bearer(ALICE))
        assert last.status_code == 200
        refused = [  # one of them at least: the key has a further request every 15 s
            answer
            for _ in range(4)
            for answer in [httpx.post(f"{url}/v1/completions", json=short, headers=bearer(ALICE))]
            if answer.status_code == 429
        ]
        assert refused and 0 < int(refused[0].headers["retry-after"]) <= 60
        poll("two more pings", lambda: lives(instance.status()) == before)
        assert "[warning" not in instance.log and "[error" not in instance.log, instance.log


def has_year(url: str, year: int) -> bool:
    date = httpx.get(f"{url}/livez").headers["date"]
    return time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT").tm_year == year


def assert_reads_well(instance: Instance, clock: Clock) -> None:
    """`ps` works where the clock has jumped, and shows no negative time."""
    command = [*PROGRAM, "ps", "--run-dir", str(instance.run_dir)]
    env = {**os.environ, **clock.env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0 and "ready" in done.stdout, done.stdout + done.stderr
    assert not re.search(r"-\d+ (s|min|h|d)\b", done.stdout), done.stdout
