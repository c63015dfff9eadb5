"""A model whose workers only die is given a rest, then tried by one of them: a real instance."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.supervisor.lifecycle.restart_policy import BreakerLimits
from tests.integration.instance import Instance, echo
from tests.integration.test_faults_supervisor import cli, complete, names

LIMITS = BreakerLimits()


class Cursed:
    """A model whose workers exit with code 7 as they start, for as long as the curse holds."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._curse = folder / "curse"
        self._curse.touch()
        (folder / "sitecustomize.py").write_text(
            "import pathlib, sys\n"
            f"if 'servekit.worker' in ' '.join(sys.orig_argv) "
            f"and pathlib.Path({str(self._curse)!r}).exists(): sys.exit(7)\n"
        )
        self.model = {**echo("a", replicas=2, **options), "env": {"PYTHONPATH": str(folder)}}

    def lift(self) -> None:
        self._curse.unlink()


def why(instance: Instance) -> str:
    done = cli(instance, "why", "a")
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())  # lines are broken anywhere


def lives_in_a_row(told: str) -> int:
    """One more than it takes, maybe: both replicas were at it."""
    found = re.search(r"crash loop: (\d+) processes in a row", told)
    return int(found[1]) if found else 0


def readyz(url: str) -> httpx.Response:
    return httpx.get(f"{url}/readyz")


def until_open(instance: Instance) -> str:
    """The URL, once the breaker has opened; seen as an operator and a client see it."""
    instance.until("it opens", lambda: "breaker_opened" in instance.log, 60)
    url = instance.url
    told = why(instance)
    assert "0 of 2 ready" in told
    assert cli(instance, "why", "a/0").stdout.startswith("a/0: failed; last death ")
    assert lives_in_a_row(told) >= LIMITS.lives
    assert "last attempt at" in told
    assert "next attempt at" in told
    assert readyz(url).status_code == 503
    assert complete(url, "a").status_code == 503
    return url


def until_half_open(instance: Instance) -> str:
    """The name of the probe."""

    def probe() -> str:
        loading = [name for name, state in names(instance, "a") if state == "loading"]
        return loading[0] if loading else ""

    name = instance.until("one is tried", probe, LIMITS.first_s + 10)
    assert f"only {name} is being tried, since" in why(instance)
    (other,) = (state for found, state in names(instance, "a") if found != name)
    assert other == "failed", "the others wait for what becomes of it"
    return name


@pytest.mark.lane("waits")
def test_a_probe_that_serves_closes_the_breaker(tmp_path: Path) -> None:
    cursed = Cursed(tmp_path, load_s=20.0)  # commands are run meanwhile
    with Instance.up(tmp_path, [cursed.model]) as instance:
        url = until_open(instance)
        began = time.monotonic()
        cursed.lift()
        probe = until_half_open(instance)
        assert time.monotonic() - began > LIMITS.first_s / 2, "nothing was tried before its time"
        assert readyz(url).status_code == 503
        instance.until("the probe is up", lambda: instance.replica(probe).state == "ready", 60)
        instance.until("that is seen", lambda: readyz(url).status_code == 200)
        assert f"only {probe} is being tried, since" in why(instance), "it has served nobody yet"
        assert complete(url, "a", "abc", max_tokens=5).json()["choices"][0]["text"] == "abcab"
        instance.until("it closes", lambda: "breaker_closed" in instance.log)
        whole = [("a/0", "ready"), ("a/1", "ready")]
        instance.until("all are back", lambda: names(instance, "a") == whole, 60)
        assert readyz(url).status_code == 200
        told = why(instance)
        assert "2 of 2 ready" in told
        assert "breaker" not in told


@pytest.mark.lane("waits")
def test_a_probe_that_dies_opens_it_again_for_twice_as_long(tmp_path: Path) -> None:
    cursed = Cursed(tmp_path, load_s=600.0)
    with Instance.up(tmp_path, [cursed.model, echo("good")]) as instance:
        url = until_open(instance)
        cursed.lift()
        probe = until_half_open(instance)
        os.kill(instance.replica(probe).pid, signal.SIGKILL)
        opened = lambda: instance.log.count("breaker_opened") == 2  # noqa: E731
        before = time.monotonic()
        instance.until("it opens again", opened)
        told = why(instance)
        assert lives_in_a_row(told) > LIMITS.lives
        assert "killed by SIGKILL before it was ready" in told
        assert readyz(url).status_code == 503
        assert complete(url, "good").status_code == 200
        waits = [float(part.split()[0]) for part in told.split("next attempt in ")[1:]]
        assert len(waits) == 2
        passed_s = time.monotonic() - before
        assert all(LIMITS.first_s < wait + passed_s for wait in waits)
        assert all(wait <= 2 * LIMITS.first_s for wait in waits)
        assert cli(instance, "reload").returncode == 0
        loading = lambda: {state for _, state in names(instance, "a")} == {"loading"}  # noqa: E731
        instance.until("a reload tries all of them at once", loading)
