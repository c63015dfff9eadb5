"""The choice of tests: the ordinary run, or lanes; and what a whole run must amount to.

A test marked `lane("NAME")` is left out of the ordinary run: it takes minutes of CPU, or needs
other projects' servers. `pytest --lanes NAME,NAME` runs lanes and nothing else,
`pytest --lanes all` every one of them, and `pytest --lanes ordinary,NAME` the ordinary run and one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest

from tests.properties import is_property

LANES = {
    "adapters": "every PEFT tuner, and adapters of SmolLM2; the ordinary run has one tuner a mode",
    "attacks": "the attacks of `python -m tests.attacks`",
    "bench": "the scripts of tests/bench, and `servekit bench` under odd conditions",
    "chaos": "the experiments of `servekit chaos`, floods of poison, full disks, partitions",
    "clients": "the clients of `python -m tests.clients`, installed by pip and npm",
    "fuzz": "new examples of properties, schemathesis, crowds, some of `tests.fuzz`",
    "long": "what takes two seconds of CPU or more, and has a shorter relative in the ordinary run",
    "models": "SmolLM2 behind every engine, client and page; races for one model",
    "mutants": "each edit of `python -m tests.mutants` makes its tests fail",
    "packages": "what needs package indexes: the extras, Triton on the CPU, an old SQLite",
    "pages": "the chat and the other pages in Chromium, beyond one visit of each",
    "ray": "clusters of Ray",
    "residents": "models that sleep, wake and make room, where two of these meet",
    "surroundings": "a limited cgroup, proxies, Firefox, upgrades, kubectl; skipped without",
    "tensor-parallel": "one model over several processes",
    "vllm": "vLLM as an engine and in an instance, where it is installed",
    "waits": "what waits for cool-downs and deadlines as long as they take by default",
}

ORDINARY = "ordinary"
#: The property of a test that pytest-xdist hands on to the process that adds up the times.
LANE = "lane"
#: A run of all ordinary tests, or of all lanes, that has fewer tests than this has lost some.
#: Raise it when tests are added; lower it in the commit that removes them.
TESTS_AT_LEAST = {ORDINARY: 11_800, "all": 1350}
#: Tests of the ordinary run that may be skipped, with all that `.ci/run` installs in place.
SKIPS_AT_MOST = 70


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lanes",
        default=ORDINARY,
        metavar="NAMES",
        help=f"run these lanes, and nothing else: all, or of {', '.join(LANES)}",
    )


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the lanes that are asked for, or those of no lane.

    Property tests belong to the lane `fuzz`, too.
    """
    wanted = wanted_lanes(config)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        by_chance = "fuzz" in wanted and is_property(item)
        lane = "fuzz" if by_chance else _lane(item)
        item.user_properties.append((LANE, lane))
        (kept if lane in wanted else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def wanted_lanes(config: pytest.Config) -> set[str]:
    """Return the lanes that are asked for, `ordinary` among them. Raises pytest.UsageError."""
    names = config.getoption("--lanes")
    wanted = set(LANES if names == "all" else names.split(","))
    if unknown := wanted - LANES.keys() - {ORDINARY}:
        raise pytest.UsageError(
            f"no such lanes: {', '.join(unknown)}; there are {', '.join(LANES)}"
        )
    return wanted


def _lane(item: pytest.Item) -> str:
    marker = item.get_closest_marker("lane")
    if marker is None:
        return ORDINARY
    if marker.args[0] not in LANES:
        raise pytest.UsageError(f"{item.nodeid}: no lane {marker.args[0]!r} in tests/lanes.py")
    return str(marker.args[0])


def complaints(seen: int, skipped: Mapping[str, int], at_least: int, skips: int) -> list[str]:
    """Return a sentence for each limit that a whole run broke; `skipped` by reason."""
    found = []
    if seen < at_least:
        found.append(
            f"{seen} tests ran, of at least {at_least}: were some lost? "
            "TESTS_AT_LEAST in tests/lanes.py has the number."
        )
    if (total := sum(skipped.values())) > skips:
        reasons = "; ".join(f"{count} x {why}" for why, count in Counter(skipped).most_common())
        found.append(
            f"{total} tests were skipped, of at most {skips} (SKIPS_AT_MOST in tests/lanes.py). "
            f"`.ci/run` installs what tests need. The reasons: {reasons}"
        )
    return found


def describe_times(took_s: Mapping[str, float]) -> str:
    """Return the time that the tests of each lane took, the longest first."""
    longest_first = sorted(took_s.items(), key=lambda lane: -lane[1])
    told = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in longest_first)
    return f"minutes of tests by lane: {told}"


class WholeRun:
    """Fails a run of everything that has too few tests, or skips too many; a plugin of pytest.

    After a run of lanes it tells how long each took.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._skipped: Counter[str] = Counter()
        self._complaints: list[str] = []
        self._took_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seen.add(report.nodeid)
        self._took_s[str(dict(report.user_properties).get(LANE, ORDINARY))] += report.duration
        if report.skipped and not hasattr(report, "wasxfail"):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else "no reason"
            self._skipped[why.removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        lanes = config.getoption("--lanes")
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not ended or session.shouldfail or lanes not in TESTS_AT_LEAST or _is_part(config):
            return
        skips = SKIPS_AT_MOST if lanes == ORDINARY else len(self._seen)
        self._complaints = complaints(len(self._seen), self._skipped, TESTS_AT_LEAST[lanes], skips)
        if self._complaints:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._took_s.keys() - {ORDINARY}:
            terminalreporter.write_line(describe_times(self._took_s))
        for complaint in self._complaints:
            terminalreporter.write_line(f"FAILED: {complaint}", red=True)


def _is_part(config: pytest.Config) -> bool:
    """Whether files, names or markers were asked for, or nothing but a list."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return not whole or bool(option.keyword or option.markexpr or option.collectonly)
