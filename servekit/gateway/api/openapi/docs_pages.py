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
from fastapi.openapi.docs import get_swagger_ui_html
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


#: Below the folder that fastapi_offline serves.
_SWAGGER_FILES = "/static-offline-docs"
#: Swagger UI has no links to other pages, no dark colours, and some that are too pale to read.
_SWAGGER_STYLE = """<style>
:root { color-scheme: light dark; }
body { margin: 0; background: light-dark(#fff, #18181b); }
body > header { display: flex; gap: 1.2rem; padding: .9rem 1.25rem; font: .95rem system-ui; }
body > header a { color: light-dark(#0f766e, #2dd4bf); text-decoration: none; }
body > header a:first-child { color: light-dark(#1c1c20, #e7e7ea); font-weight: 650; }
.swagger-ui .info a, .swagger-ui .info a .url { color: #0f766e; text-decoration: underline; }
.swagger-ui .info .title small, .swagger-ui .info .title small.version-stamp {
  background: #4b5563;
}
.swagger-ui .btn.authorize { color: #0f766e; border-color: #0f766e; }
.swagger-ui .btn.authorize svg { fill: #0f766e; }
.swagger-ui .opblock.opblock-get .opblock-summary-method { background: #1d4ed8; }
.swagger-ui .opblock.opblock-post .opblock-summary-method { background: #0f766e; }
.swagger-ui .opblock.opblock-delete .opblock-summary-method { background: #b42318; }
.swagger-ui .json-schema-2020-12-expand-deep-button { color: #4b5563; }
@media (prefers-color-scheme: dark) {
  .swagger-ui { filter: invert(.9) hue-rotate(180deg); background: #fff; color-scheme: light; }
  .swagger-ui .highlight-code, .swagger-ui .microlight { filter: invert(1) hue-rotate(180deg); }
}
</style></head>"""
_SWAGGER_BAR = (
    '<body><header><a href="/docs">servekit docs</a><a href="/ui/">Chat</a>'
    '<a href="/ui/dashboard">Dashboard</a></header>'
)


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


def add_swagger(app: FastAPI) -> None:
    """Add the page that tries out the API."""
    page = get_swagger_ui_html(
        openapi_url=str(app.openapi_url),
        title=f"{app.title}: try the API",
        swagger_js_url=f"{_SWAGGER_FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{_SWAGGER_FILES}/swagger-ui.css",
        swagger_favicon_url=f"{_SWAGGER_FILES}/favicon.png",
    )
    html = bytes(page.body).decode()
    for theirs, ours in (
        ("<html>", '<html lang="en">'),
        ("</head>", _SWAGGER_STYLE),
        ("<body>", _SWAGGER_BAR),
        ('<div id="swagger-ui">\n    </div>', '<main id="swagger-ui"></main>'),
    ):
        html = html.replace(theirs, ours)

    @app.get(SWAGGER, include_in_schema=False, response_class=HTMLResponse)
    async def swagger() -> HTMLResponse:
        return HTMLResponse(html)


def _add_page(app: FastAPI, manual: DocsPages, name: str) -> None:
    address = "/docs" if name == INDEX else f"/docs/{name}"

    @app.get(address, include_in_schema=False, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(await manual.page(name), headers=_HEADERS)


def _add_file(app: FastAPI, name: str, path: Path, media_type: str) -> None:
    @app.get(f"/docs/{name}", include_in_schema=False)
    async def file() -> FileResponse:
        return FileResponse(path, media_type=media_type)
