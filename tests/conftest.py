"""What all tests need of the process they run in."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import lanes, properties

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
sys.dont_write_bytecode = False

# Five seconds, unless it is told otherwise: on a busy machine that is a process that starts.
for _what in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _what, 60.0)

_AUTHORITIES = functools.cache(httpx.create_ssl_context)


def _create_ssl_context(
    verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True
) -> ssl.SSLContext:
    named = {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
    if verify is True and cert is None and not named:
        return _AUTHORITIES()
    return httpx.create_ssl_context(verify, cert, trust_env)


# Each `httpx.get` would read the certificates of all authorities anew: 20 ms, for a request of one.
httpx._transports.default.create_ssl_context = _create_ssl_context  # type: ignore[attr-defined]

# The imports of all files of tests make no garbage that matters: not before they are done.
gc.disable()

TESTS = Path(__file__).parent
ROOT = TESTS.parent
INTEGRATION = TESTS / "integration"
ENGINES = TESTS / "unit" / "engines"
#: Their tests start servers of tools, one after the other: the last files would wait for one.
TOOLS = (
    TESTS / "unit" / "gateway" / "tool_servers" / "test_server.py",
    TESTS / "unit" / "gateway" / "ui" / "test_chat_tools.py",
)
STYLE = TESTS / "unit" / "test_style.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    properties.load_profile(config, by_chance="fuzz" in lanes.wanted_lanes(config))
    if not hasattr(config, "workerinput"):  # of xdist, which tells its reports to the one above
        config.pluginmanager.register(lanes.WholeRun())


def pytest_report_header(config: pytest.Config) -> list[str]:
    return properties.describe_run(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in properties.describe_run(config):
        terminalreporter.write_line(line)


def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the files first, another one in each worker of pytest-xdist.

    All workers collect all files in the same order, and would compile the same modules at the same
    moment. An import that fails is left to the collection.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    paths = (session.config.invocation_params.dir / arg for arg in session.config.args)
    files = sorted(file for path in paths for file in path.rglob("test_*.py"))
    first, last = (
        len(files) * number // worker["workercount"]
        for number in (int(worker["workerid"].removeprefix("gw")) + more for more in (0, 1))
    )
    for file in files[first:last]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put mypy's file first, and then those of real processes mixed with those that compute.

    They take longest, and so do not end up last. The first wait and the second compute, so that
    one worker of xdist waits while another computes.
    """
    lanes.choose(config, items)
    properties.seed_tests(config, items)
    early = (STYLE, INTEGRATION, ENGINES, *TOOLS)
    files: dict[Path, dict[Path, None]] = {at: {} for at in (*early, TESTS)}
    for path in dict.fromkeys(item.path for item in items):
        next(found for at, found in files.items() if path.is_relative_to(at))[path] = None
    places = {
        path: (at == TESTS, number / len(found))
        for at, found in files.items()
        for number, path in enumerate(found)
    }
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the objects of all modules that are imported by now.

    With all files of tests they are a million, and an engine collects whenever it loads or sleeps.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Do the same after each file, which may have imported as much again."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose sockets have short paths, wherever the tests' own are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
