"""Some of what `python -m tests.fuzz` sends, each time the same: no 5xx, no loss of form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz import operations
from tests.fuzz.__main__ import GROWTH, STEADY, main
from tests.fuzz.media import __main__ as media
from tests.fuzz.media.traces import is_strange
from tests.fuzz.processes import Usage

MIB = 2**20


@pytest.mark.lane("fuzz")
@pytest.mark.timeout(900)  # twenty seconds, of a machine that has nothing else to do
def test_no_request_is_answered_badly(capsys: pytest.CaptureFixture[str]) -> None:
    # so few are no measure of memory: what grows by half is a leak all the same
    memory = ["--warm-up", "500", "--steady", "0.5", "--growth", "0.5"]
    code = main(["--requests", "1500", "--seed", "20261121", *memory])
    assert code == 0, capsys.readouterr().out


@pytest.mark.lane("fuzz")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines", [[], ["--converted"]])
def test_no_picture_or_sound_is_answered_badly(
    capsys: pytest.CaptureFixture[str], engines: list[str]
) -> None:
    memory = ["--warm-up", "150", "--steady", "0.5", "--growth", "0.5"]
    sizes = ["--files", "0" if engines else "1500", "--requests", "450", "--seed", "20261127"]
    code = media.main([*sizes, *memory, *engines])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "strange"),
    [
        ('openat(AT_FDCWD, "/etc/passwd", O_RDONLY) = 3', True),
        ('openat(AT_FDCWD, "._", O_RDONLY) = -1 ENOENT (No such file or directory)', True),
        ('openat(AT_FDCWD, "/srv/run/log", O_RDONLY|O_CLOEXEC <unfinished ...>', False),
        ('openat(AT_FDCWD, "/proc/self/statm", O_RDONLY) = 3', False),
        ('connect(9, {sa_family=AF_INET, sin_port=htons(80)}, 16) = 0', True),
        ('connect(9, {sa_family=AF_UNIX, sun_path="/srv/run/a.sock"}, 110) = 0', False),
        ('connect(9, {sa_family=AF_UNIX, sun_path="/run/docker.sock"}, 110) = 0', True),
        ('sendto(9, "GET /", 5, 0, NULL, 0) = 5', False),
        ('execve("/usr/bin/gs", ["gs"], 0x7ff) = 0', True),
        ('+++ exited with 0 +++', False),
    ],
)  # fmt: skip
def test_what_is_strange_in_a_trace(call: str, strange: bool) -> None:
    assert is_strange(call, ("/proc", "/srv/run")) is strange


def usage(size_bytes: Callable[[float], float]) -> Usage:
    """Of a process of 64 MiB and what is given, by progress; the first sixth is the warm-up."""
    seen = [(at / 1000, round(64 * MIB + size_bytes(at / 1000))) for at in range(1001)]
    return Usage("gateway/0", 1, 1 / 6, rss_bytes=seen)


@pytest.mark.parametrize(
    ("size_bytes", "steady", "grown"),
    [
        (lambda at: min(at, 0.1) * 20 * MIB, False, False),  # what warms up
        (lambda at: at * MIB, True, False),  # twenty bytes of each of 50 000 requests
        (lambda at: at * 10 * MIB, True, True),
        (lambda at: (at > 0.5) * 2 * MIB, False, False),  # what a peak leaves for good
        (lambda at: (at * 20 % 5) * MIB / 2, False, False),  # what is given back now and then
        (lambda at: (at > 0.4) * 3 * MIB + (at > 0.7) * 3 * MIB, False, True),
    ],
)
def test_memory_that_grows_with_each_request_is_told_from_that_of_a_peak(
    size_bytes: Callable[[float], float], steady: bool, grown: bool
) -> None:
    found = usage(size_bytes)
    assert (found.steady > STEADY, found.growth > GROWTH) == (steady, grown)


def test_memory_that_was_hardly_seen_is_no_measure() -> None:
    found = Usage("gateway/0", 1, 1 / 6, rss_bytes=[(0.0, 64 * MIB), (1.0, 64 * MIB)])
    assert not found.seen


@pytest.mark.lane("fuzz")
@pytest.mark.timeout(400)
def test_an_operator_may_do_anything_at_any_time() -> None:
    assert operations.main(["--steps", "25", "--seed", "1"]) == 0
