"""The documentation of a running instance in a real browser: sidebar, search, links, phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.integration.chromium import CHROMIUM
from tests.integration.instance import Instance, echo

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no Chromium here"),
]
WITHIN_MS = 60_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("docs")
    with Instance.up(folder, [echo("a")]) as instance:
        instance.until_settled()
        yield instance.url


@pytest.fixture
def problems() -> list[str]:
    """What goes wrong in the browser, and requests to other hosts."""
    return []


@pytest.fixture
def context(browser: Browser, url: str, problems: list[str]) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WITHIN_MS)
    context.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    context.on(
        "request",
        lambda request: (
            None if request.url.startswith((url, "data:")) else problems.append(request.url)
        ),
    )
    yield context
    context.close()


def serious(page: Page) -> list[str]:
    violations = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html']}"
        for one in violations
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.lane("long")
def test_a_reader_finds_a_section(context: BrowserContext, url: str, problems: list[str]) -> None:
    page = context.new_page()
    page.goto(f"{url}/docs")
    expect(page.locator("h1")).to_have_text("servekit: documentation")
    page.locator("#pages").get_by_role("link", name="GPUs and memory").click()
    expect(page.locator("#pages [aria-current]")).to_have_text("GPUs and memory")
    page.keyboard.press("/")
    page.keyboard.type("quarantine retried")
    first = page.locator("#results a").first
    expect(first).to_contain_text("Requests that kill workers")
    expect(page.locator("article")).to_be_hidden()
    assert serious(page) == []
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{url}/docs/worker-deaths#requests-that-kill-workers")
    expect(page.locator("#requests-that-kill-workers")).to_be_in_viewport()
    page.locator("[rel=next]").click()
    expect(page).to_have_url(f"{url}/docs/write-an-engine")
    assert problems == []


@pytest.mark.lane("pages")
def test_links_lead_out_of_the_results_of_a_search(context: BrowserContext, url: str) -> None:
    page = context.new_page()
    page.goto(f"{url}/docs/gpus")
    results = page.locator("#results")
    page.locator("#search").fill("several gpus")
    with context.expect_page():  # in another tab: one may open the next result, too
        results.locator("a").first.click(modifiers=["ControlOrMeta"])
    expect(results).to_be_visible()
    section = page.locator("#pages li li a").last
    section.click()
    expect(results).to_be_hidden()
    expect(page.locator(str(section.get_attribute("href")))).to_be_in_viewport()


@pytest.mark.lane("pages")
def test_a_phone_shows_each_kind_of_page(
    context: BrowserContext, url: str, problems: list[str]
) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="dark")
    for name in ("", "/configuration", "/chat-page", "/speed"):
        page.goto(f"{url}/docs{name}")
        expect(page.locator("#pages")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name
        assert serious(page) == []
    page.locator("#menu").click()
    expect(page.locator("#pages")).to_be_visible()
    assert problems == []


@pytest.mark.lane("pages")
def test_the_api_can_be_tried_out(context: BrowserContext, url: str, problems: list[str]) -> None:
    page = context.new_page()
    page.goto(f"{url}/docs")
    page.get_by_role("link", name="Try the API").click()
    expect(page.locator(".swagger-ui .info .title")).to_contain_text("servekit")
    assert problems == []
