"""The documentation at /docs of a gateway."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from servekit.docs import pages
from servekit.gateway.api.openapi import docs_pages
from servekit.gateway.auth import middleware


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = FastAPI(docs_url=None)
    docs_pages.add_manual(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def test_the_gateway_has_all_pages() -> None:
    assert {*docs_pages.PAGES, docs_pages.INDEX} == set(pages.list_pages())


def test_no_key_is_needed_to_read() -> None:
    assert docs_pages.PATHS <= middleware.OPEN
    assert {"/docs", "/docs/gpus", "/docs/search.js", "/docs/swagger"} <= docs_pages.PATHS


async def test_pages_are_rendered_once(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def make(name: str) -> str:
        made.append(name)
        return f"<p>{name}"

    monkeypatch.setattr(docs_pages, "_render_page", make)
    for _ in range(2):
        answer = await http.get("/docs/gpus")
        assert (answer.text, answer.status_code) == ("<p>gpus", 200)
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert (await http.get("/docs")).text == "<p>index"
    assert made == ["gpus", "index"]


async def test_a_process_renders_them(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
    assert answer.text.startswith("<!doctype html>")
    assert "/docs/gpus" in answer.text
    found = await http.get("/docs/search.js")
    assert found.headers["content-type"].startswith("text/javascript")
    assert "worker-deaths" in found.text


async def test_files_are_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/docs/site.js")).headers["content-type"].startswith("text/javascript")
    image = await http.get("/docs/images/chat.png")
    assert image.headers["content-type"] == "image/png"
    assert (await http.get("/docs/images/../site.css")).status_code == 404
