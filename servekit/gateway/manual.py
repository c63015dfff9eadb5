"""The reference at a running instance: /docs/configuration, /docs/commands, /docs/api, …

A process of its own makes each page, once, when it is first asked for: what it is made from (the
command line, the file's schema) is nothing that a gateway has, or should have, in its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from servekit.errors import ServekitError

log: Any = structlog.get_logger("servekit.gateway")

PAGES = ("configuration", "commands", "api", "metrics")
PATHS = {f"/docs/{name}" for name in PAGES}
MADE_WITHIN_S = 60.0
#: The pages are ours, and have neither scripts nor anything that is fetched.
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Manual:
    """Makes pages, one at a time, and keeps them."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()

    async def page(self, name: str) -> str:
        """As HTML. Raises ServekitError where it cannot be made."""
        async with self._one_at_a_time:
            if name not in self._made:
                self._made[name] = await _make(name)
        return self._made[name]


async def _make(name: str) -> str:
    safe = () if not sys.flags.safe_path else ("-P",)
    making = await asyncio.create_subprocess_exec(
        sys.executable, *safe, "-m", "servekit", "docs", name, "--html",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    made = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MADE_WITHIN_S):
                made, _ = await making.communicate()
    finally:
        if making.returncode is None:
            making.kill()
    if making.returncode or not made:
        raise ServekitError(f"this page could not be made; on the machine: servekit docs {name}")
    return made.decode()


def add_manual(app: FastAPI) -> None:
    """GET /docs/NAME for each of PAGES."""
    manual = Manual()
    for name in PAGES:
        _add(app, manual, name)


def _add(app: FastAPI, manual: Manual, name: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(await manual.page(name), headers=_HEADERS)
