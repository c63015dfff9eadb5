"""What all tests need of the process they run in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

# Under nohup, or in the background of some shells, hangups or Ctrl-C are ignored, and so they would
# be by every process that the tests start: servekit heeds them, but not where they are off.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Who ends the tests by SIGTERM ends what they have started, too: fixtures are torn down, as after
# Ctrl-C. By itself it would leave instances behind, which outlive whoever has started them.
if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, signal.default_int_handler)

# Where bytecode is not kept, each of the many processes that the tests start would compile servekit
# anew: a third of a second that a user's machine spends once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Five seconds, unless it is told otherwise: on a busy machine that is a process that starts.
for _what in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _what, 60.0)

# The same examples in every run and on every machine, kept nowhere, and no deadline for one of them
# on a busy machine. `--hypothesis-profile default` looks for others.
settings.load_profile("ci")

INTEGRATION = Path(__file__).parent / "integration"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", action="store_true", help="also run what takes minutes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts real processes comes first: the longest files do not end up last."""
    items.sort(key=lambda item: INTEGRATION not in item.path.parents)
    for item in items:
        # Thousands of deadlines, and hundreds of real starts and kills, on whatever machine this
        # is: a test that fails is tried once more, and the summary names it as RERUN. What is
        # wrong fails twice.
        item.add_marker(pytest.mark.flaky(reruns=1))
    if not config.getoption("--lanes"):
        for item in items:
            if item.get_closest_marker("lane"):
                item.add_marker(pytest.mark.skip(reason="a slow lane: pytest --lanes"))
