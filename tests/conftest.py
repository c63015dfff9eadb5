"""What all tests need of the process they run in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# Under nohup, or in the background of some shells, hangups are ignored, and so they would be by
# every process that the tests start: servekit takes them for reloads, but not where they are off.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

INTEGRATION = Path(__file__).parent / "integration"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2`, run all that starts real processes on one side and the rest beside it.

    Instances would only be in each other's way; unit tests leave half of two cores to one.
    """
    if not config.pluginmanager.hasplugin("dsession") and not hasattr(config, "workerinput"):
        return
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("integration"))
    items.sort(key=lambda item: INTEGRATION not in item.path.parents)  # the longest goes first
