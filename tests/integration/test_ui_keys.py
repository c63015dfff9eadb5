"""The chat page where keys are needed, in a real Chromium, over HTTPS and two gateways."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from servekit.config import keys
from tests.integration.certificates import make
from tests.integration.instance import Instance, echo
from tests.integration.test_ui import ARGS, CHROMIUM, WITHIN_MS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

KEY, HASH = keys.new("alice")
RULE = {"name": "alice", "hash": HASH, "requests_per_minute": 2, "models": ["a"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of an instance; asked for before the browser, which needs the event loop."""
    folder = tmp_path_factory.mktemp("ui-keys")
    make(folder)
    tls = {"certificate": "server.pem", "key": "server.key"}
    server = {"ui": True, "gateways": 2, "tls": tls}
    with Instance.up(
        folder, [echo("a"), echo("b")], server=server, sections={"keys": [RULE]}
    ) as instance:
        url = instance.until_settled().url
        instance.until(
            "the UI is up",
            lambda: httpx.get(f"{url}/ui/", auth=("me", KEY), verify=False).status_code == 200,
            within_s=60,
        )
        yield url


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


def ask(page: Page, text: str) -> None:
    page.locator("#sk-box textarea").fill(text)
    page.locator("#sk-box textarea").press("Enter")


def test_a_browser_is_asked_for_the_key(url: str) -> None:
    for auth in (None, ("alice", "wrong")):
        answer = httpx.get(f"{url}/ui/", auth=auth, verify=False)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
    api = httpx.get(f"{url}/v1/models", auth=("me", KEY), verify=False)
    assert api.status_code == 401  # a browser's password is for the page only


def test_other_sites_cannot_use_the_browsers_password(url: str) -> None:
    answer = httpx.post(
        f"{url}/ui/gradio_api/queue/join", auth=("me", KEY), verify=False, json={},
        headers={"sec-fetch-site": "cross-site"},
    )  # fmt: skip
    assert answer.status_code == 403


def test_a_visitor_with_a_key_chats_within_its_limits(url: str, browser: Browser) -> None:
    context = browser.new_context(
        ignore_https_errors=True, http_credentials={"username": "anyone", "password": KEY}
    )
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(f"{url}/ui/")
    expect(page.locator("#sk-model input")).not_to_have_value("", timeout=WITHIN_MS)
    answers, note = page.locator("#sk-chat .bot-row .md"), page.locator("#sk-note")
    for count in (1, 2):
        ask(page, f"hello {count} ")
        expect(answers).to_have_count(count, timeout=WITHIN_MS)
        expect(answers.last).to_contain_text(f"hello {count} hello", timeout=WITHIN_MS)
        expect(note).to_contain_text("tokens", timeout=WITHIN_MS)
        expect(page.locator("#sk-box textarea")).to_be_enabled(timeout=WITHIN_MS)
    ask(page, "once more")
    expect(note).to_contain_text("has used up its 2 requests a minute", timeout=WITHIN_MS)
    assert not problems
    context.close()
