"""The Chromium that the tests of the pages drive."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import psutil
from playwright.sync_api import Browser, sync_playwright

#: Without windows of its own it takes a fifth less CPU.
CHROMIUM = shutil.which("chromium-headless-shell") or "/usr/bin/chromium"
_ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@contextlib.contextmanager
def start_chromium(*args: str) -> Iterator[Browser]:
    """Start Chromium; afterwards none of its processes is left.

    Start an instance before it: the instance's own waiting needs this thread's event loop.
    """
    before = set(psutil.Process().children(recursive=True))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*_ARGS, *args])
        started = set(psutil.Process().children(recursive=True)) - before
        yield browser
        browser.close()
    _, alive = psutil.wait_procs(started, timeout=60)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive
