"""The documentation at a running instance: /docs, /docs/configuration, /docs/gpus, …

A separate process renders each page once, on its first request: the gateway needs no Markdown
parser in its memory, and a long page would block its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.responses import FileResponse, HTMLResponse, Response

from servekit.errors import ServekitError

log: Any = structlog.get_logger("servekit.gateway")

#: Files of another package, read but not imported.
_FOLDER = Path(__file__).parents[3] / "docs"
INDEX = "index"
#: Names of all pages but the index.
PAGES = sorted(path.stem for path in _FOLDER.glob("pages/*/*.md"))
SEARCH = "search.js"
#: Static files, by address below /docs, with their file and type.
FILES = {"site.js": (_FOLDER / "site.js", "text/javascript")} | {
    f"images/{path.name}": (path, "image/png") for path in _FOLDER.glob("pages/images/*.png")
}
#: Where the API can be tried out.
SWAGGER = "/docs/swagger"
PATHS = {"/docs", SWAGGER, *(f"/docs/{name}" for name in (*PAGES, SEARCH, *FILES))}
MADE_WITHIN_S = 60.0
#: The pages load nothing from other hosts.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
}


class DocsPages:
    """The rendered pages; one page is rendered at a time."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()

    async def page(self, name: str) -> str:
        """Return a page as HTML, or the search index. Raises ServekitError if rendering fails."""
        async with self._one_at_a_time:
            if name not in self._made:
                self._made[name] = await _render_page(name)
        return self._made[name]


async def _render_page(name: str) -> str:
    safe = () if not sys.flags.safe_path else ("-P",)
    making = await asyncio.create_subprocess_exec(
        sys.executable, *safe, "-m", "servekit.docs.site", name,
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
        raise ServekitError(f"the page could not be rendered; on the machine: servekit docs {name}")
    return made.decode()


def add_manual(app: FastAPI) -> None:
    """Add GET /docs, GET /docs/NAME for each page, and the files that the pages need."""
    manual = DocsPages()
    for name in (INDEX, *PAGES):
        _add_page(app, manual, name)
    for name, (path, media_type) in FILES.items():
        _add_file(app, name, path, media_type)

    @app.get(f"/docs/{SEARCH}", include_in_schema=False)
    async def search() -> Response:
        return Response(await manual.page(SEARCH), media_type="text/javascript")


def _add_page(app: FastAPI, manual: DocsPages, name: str) -> None:
    address = "/docs" if name == INDEX else f"/docs/{name}"

    @app.get(address, include_in_schema=False, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(await manual.page(name), headers=_HEADERS)


def _add_file(app: FastAPI, name: str, path: Path, media_type: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False)
    async def file() -> FileResponse:
        return FileResponse(path, media_type=media_type)
