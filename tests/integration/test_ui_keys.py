"""The chat page where keys are needed, in a real Chromium, over HTTPS and two gateways."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api_keys import new_key
from tests.integration.certificates import make
from tests.integration.instance import Instance, echo
from tests.integration.test_ui import WITHIN_MS, away, serious
from tests.polling import poll

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

KEY, HASH = new_key("alice")
RULE = {"name": "alice", "hash": HASH, "requests_per_minute": 2, "models": ["a"]}
BOB, BOB_HASH = new_key("bob")
BOB_RULE = {"name": "bob", "hash": BOB_HASH}
PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """Asked for before the browser, which needs the event loop."""
    folder = tmp_path_factory.mktemp("ui-keys")
    make(folder)
    tls = {"certificate": "server.pem", "key": "server.key"}
    server = {"ui": True, "gateways": 2, "tls": tls}
    with Instance.up(
        folder, [echo("a"), echo("b")], server=server, sections={"keys": [RULE, BOB_RULE]}
    ) as instance:
        instance.until_settled()
        instance.until_ui(KEY, verify=False)
        yield instance


def ask(page: Page, text: str) -> None:
    page.locator("#sk-box textarea").fill(text)
    page.locator("#sk-box textarea").press("Enter")


def test_curl_needs_no_form(url: str) -> None:
    for auth in (None, ("alice", "wrong")):
        answer = httpx.get(f"{url}/ui/", auth=auth, verify=False)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer ")  # no browser asks by itself
    assert httpx.get(f"{url}/ui/", auth=("me", KEY), verify=False).status_code == 200
    api = httpx.get(f"{url}/v1/models", auth=("me", KEY), verify=False)
    assert api.status_code == 401  # what signs a browser in is for the page only


def test_other_sites_cannot_use_what_signs_a_browser_in(url: str) -> None:
    for path in ("login", "logout", "gradio_api/queue/join"):
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
            answer = httpx.post(
                f"{url}/ui/{path}", auth=("me", KEY), verify=False, data={"key": KEY},
                headers=headers,
            )  # fmt: skip
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers


def sign_in(page: Page, key: str, where: str) -> None:
    """As a person does, by the keyboard; again while wrong keys slow this address down."""

    def tried() -> bool:
        page.locator("#key:focus").fill(key)
        with page.expect_navigation():
            page.keyboard.press("Enter")
        return page.url == where

    poll(f"signed in at {where}", tried, within_s=60)


@pytest.mark.lane("pages")
def test_a_visitor_sees_the_models_of_its_key_only(url: str, browser: Browser) -> None:
    for key, others in ((KEY, False), (BOB, True)):
        with contextlib.closing(browser.new_context(ignore_https_errors=True)) as context:
            page = context.new_page()
            page.set_default_timeout(WITHIN_MS)
            page.goto(f"{url}/ui/dashboard")
            sign_in(page, key, f"{url}/ui/dashboard")
            expect(page.locator("#sk-machine")).to_contain_text("a/0")
            expect(page.locator("#sk-events")).to_contain_text("a/0")
            for part in ("#sk-machine", "#sk-events"):
                assert ("b/0" in (page.locator(part).text_content() or "")) is others
            assert ("gateway/0" in page.content()) is others
            page.goto(f"{url}/ui/")
            expect(page.locator("#sk-workers")).to_contain_text("a/0")
            page.locator("#sk-model input").click()
            expect(page.get_by_role("option", name="a", exact=True)).to_be_visible()
            expect(page.get_by_role("option", name="b", exact=True)).to_have_count(int(others))


@pytest.mark.lane("long")
def test_a_visitor_signs_in_chats_within_its_limits_and_signs_out(
    url: str, instance: Instance, browser: Browser, tmp_path: Path
) -> None:
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    page.set_default_timeout(WITHIN_MS)
    page.goto(f"{url}/ui/compare")
    assert page.url == f"{url}/ui/login?to=compare"
    assert serious(page) == []
    page.get_by_label("API key").fill("sk-alice-wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This key is unknown")
    assert serious(page) == []
    page.screenshot(path=tmp_path / "wrong.png")
    sign_in(page, KEY, f"{url}/ui/compare")
    (session,) = (one for one in context.cookies() if one["name"].startswith("servekit-session"))
    assert (session["httpOnly"], session["secure"], session["sameSite"]) == (True, True, "Strict")
    assert KEY not in str(context.cookies())
    chats_within_its_limits(page, url)
    kill_gateway(instance)
    cookie = {session["name"]: session["value"]}
    for _ in range(8):  # connections, and so either gateway: the new one knows the session, too
        told = httpx.get(f"{url}/ui/session", cookies=cookie, verify=False)
        assert told.json() == {"key": "alice"}
    page.get_by_role("button", name="Sign out (alice)").click()
    # the page that was left may ask for something once more, and is sent there, too
    page.wait_for_url(re.compile(r"/ui/login(\?to=)?$"))
    page.goto(f"{url}/ui/")
    assert page.url == f"{url}/ui/login"
    context.close()


def chats_within_its_limits(page: Page, url: str) -> None:
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

    def is_refused() -> bool:
        ask(page, "once more")
        try:
            expect(note).to_contain_text("has used up its 2 requests a minute", timeout=10_000)
        except AssertionError:  # a machine so slow that the key has earned another one
            return False
        return True

    poll("the key's requests are used up", is_refused, 60)
    assert not problems


def kill_gateway(instance: Instance) -> None:
    """Kill the one without Gradio, and wait for the next one of its name."""

    def pid() -> int:
        one = instance.gateway(1)
        return (one.pid or 0) if one.state == "ready" else 0

    before = away(pid)
    os.kill(before, signal.SIGKILL)
    away(lambda: instance.until("it is back", lambda: pid() not in (0, before), within_s=180))


@pytest.mark.lane("pages")
def test_a_session_ends_with_its_key(
    url: str, instance: Instance, browser: Browser, tmp_path: Path
) -> None:
    """On a dark Chinese phone."""
    file = instance.log_path.with_name("servekit.yaml")
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"keys": [RULE, BOB_RULE]}))  # where it is tried again
    instance.signal(signal.SIGHUP)
    options: dict[str, Any] = {**PHONE, "color_scheme": "dark", "locale": "zh-CN"}
    context = browser.new_context(ignore_https_errors=True, **options)
    page = context.new_page()
    page.set_default_timeout(WITHIN_MS)
    page.goto(f"{url}/ui/dashboard")
    assert page.url == f"{url}/ui/zh/login?to=dashboard"
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.screenshot(path=tmp_path / "phone.png")
    sign_in(page, BOB, f"{url}/ui/zh/dashboard")
    expect(page.locator(".sk-workers")).to_be_visible()
    assert serious(page) == []
    file.write_text(json.dumps(settings | {"keys": [RULE]}))
    instance.signal(signal.SIGHUP)
    page.wait_for_url(f"{url}/ui/zh/login?to=dashboard")  # by itself: it looks once a second
    context.close()
