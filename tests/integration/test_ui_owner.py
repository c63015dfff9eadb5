"""The owner's browser: a one-time link makes a real Chromium an administrator of the pages, with
keys in the file and without, over two gateways.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.api_keys import new_key
from tests.integration.instance import PROGRAM, Instance, bearer, echo
from tests.integration.test_ui import WITHIN_MS, away, serious
from tests.integration.test_ui_keys import kill_gateway
from tests.integration.test_ui_pages import tier
from tests.polling import poll

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

GUEST, GUEST_HASH = new_key("guest")
KEYS = {"keys": [{"name": "guest", "hash": GUEST_HASH}]}
#: Without keys, the tests of the ordinary run; the lane has the same with keys.
FILES = [
    pytest.param({}, id="no-keys"),
    pytest.param(KEYS, id="keys", marks=pytest.mark.lane("pages")),
]
PHONE: dict[str, ViewportSize] = {"viewport": {"width": 390, "height": 844}}
TOKEN = re.compile(r"token=([\w-]{32})$")


@pytest.fixture(scope="module", params=FILES)
def instance(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    """Asked for before the browser, which needs the event loop."""
    server = {"ui": True, "gateways": 2}
    models = [echo("steady"), echo("moving") | {"load": "manual"}]
    folder = tmp_path_factory.mktemp("ui-owner")
    with Instance.up(folder, models, server=server, sections=request.param) as instance:
        instance.until_settled()
        instance.until_ui(GUEST)
        yield instance


def ask_for_link(instance: Instance) -> str:
    """Return what `servekit link` prints."""
    command = [*PROGRAM, "link", "--run-dir", str(instance.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "within 10 minutes" in done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def visit(browser: Browser, **options: Any) -> Iterator[Page]:
    with contextlib.closing(browser.new_context(**options)) as context:
        page = context.new_page()
        page.set_default_timeout(WITHIN_MS)
        yield page


def test_a_link_lets_one_browser_operate_and_no_other(
    instance: Instance, browser: Browser, tmp_path: Path
) -> None:
    url, link = away(lambda: instance.url), ask_for_link(instance)
    assert link.startswith(f"{url}/ui?token=")
    with visit(browser) as page:
        page.goto(link.replace("/ui?", "/ui/operate?"))
        assert page.url == f"{url}/ui/operate"
        (session,) = page.context.cookies()
        assert (session["httpOnly"], session["sameSite"]) == (True, "Strict")
        operates(page, instance)
        assert serious(page) == []
        page.screenshot(path=tmp_path / "operate.png")
        kill_gateway(instance)
        cookie = {session["name"]: session["value"]}
        for _ in range(8):  # connections, and so either gateway: the new one knows the owner, too
            told = httpx.get(f"{url}/ui/session", cookies=cookie)
            assert told.json() == {"key": "@owner"}
        api = httpx.get(f"{url}/admin/status", cookies=cookie)
        assert api.status_code in (401, 403)  # the session is for the pages only
        page.goto(link)  # again in the same browser
        assert page.url == f"{url}/ui/"
        page.get_by_role("button", name="Sign out (@owner)").click()
        page.wait_for_url(re.compile(r"/ui/(login)?$"))
        expect(page.get_by_role("button", name="Sign out (@owner)")).to_have_count(0)
    with visit(browser, **PHONE) as page:
        answer = page.goto(link)
        assert answer is not None
        assert answer.status == 403
        expect(page.get_by_role("alert")).to_contain_text("has been used or has expired")
        assert serious(page) == []
        page.screenshot(path=tmp_path / "used.png")
        assert page.context.cookies() == []
    leaves_no_trace(instance, link)


def test_the_owner_sees_the_last_requests_and_nobody_else_does(
    instance: Instance, browser: Browser, tmp_path: Path
) -> None:
    url, link = away(lambda: instance.url), ask_for_link(instance)
    long = "r-long" * 20
    for model, id in (("steady", "r-fine"), ("none", "r-lost"), ("steady", long)):
        body = {"model": model, "prompt": "a secret prompt", "max_tokens": 4}
        named = bearer(GUEST) | {"x-request-id": id}
        httpx.post(f"{url}/v1/completions", json=body, headers=named)
    with visit(browser) as page:
        page.goto(link.replace("/ui?", "/ui/requests?"))
        table = page.locator("#sk-requests")
        for id in ("r-fine", "r-lost", long):
            expect(table).to_contain_text(id)
        assert page.evaluate("document.documentElement.scrollWidth") == 1280
        assert "secret" not in page.content()
        assert GUEST not in page.content()  # without keys in the file, too
        assert serious(page) == []
        page.screenshot(path=tmp_path / "requests.png")
        page.get_by_role("combobox", name="Status").click()
        page.get_by_role("option", name="failed").click()
        expect(table).not_to_contain_text("r-fine")
        expect(table).to_contain_text("r-lost")
        page.get_by_role("combobox", name="Model", exact=True).click()
        page.get_by_role("option", name="steady").click()
        expect(table).to_contain_text("No request fits")
        page.get_by_role("combobox", name="Status").click()
        page.get_by_role("option", name="200").click()
        expect(table).to_contain_text("r-fine")
        page.get_by_role("combobox", name="Total").click()
        page.get_by_role("option", name="≥ 30 s").click()
        expect(table).to_contain_text("No request fits")
        page.set_viewport_size(PHONE["viewport"])
        page.reload()
        expect(table).to_contain_text("r-lost")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        expect(table.locator("td", has_text="–").first).to_be_hidden()  # a row is a card there
        page.screenshot(path=tmp_path / "phone.png")
    with visit(browser) as page:
        page.context.request.post(f"{url}/ui/login", form={"key": GUEST}, max_redirects=0)
        page.goto(f"{url}/ui/requests")
        words = "“servekit link” prints a link|a key that has admin: true"
        expect(page.locator("#sk-requests")).to_contain_text(re.compile(words))
        expect(page.locator("#sk-requests-model")).to_be_hidden()
        assert "r-fine" not in page.content()


def operates(page: Page, instance: Instance) -> None:
    """Use the buttons; each takes effect."""
    expect(page.locator(".sk-page")).to_contain_text("by a link of this machine")
    for verb, wanted in (("Load", "resident"), ("Unload", "stopped")):
        page.get_by_role("button", name=f"{verb} moving", exact=True).click()
        poll(f"it is {wanted}", lambda: tier(instance, "moving") == wanted, within_s=30)  # noqa: B023
    page.get_by_role("button", name="moving", exact=True).click()
    expect(page.locator("#sk-log")).to_contain_text("Exits · moving")
    page.goto(page.url.replace("operate", "dashboard"))
    expect(page.locator("#sk-log-of")).to_be_visible()
    page.goto(page.url.replace("dashboard", "operate"))
    expect(page.locator(".sk-page")).to_contain_text("by a link of this machine")


def leaves_no_trace(instance: Instance, link: str) -> None:
    """Search all that the instance has written for the token."""
    found = TOKEN.search(link)
    assert found is not None
    token = found[1].encode()
    written = [path for path in instance.run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".jsonl" for path in written)  # the 403 above is in the request log
    assert any(path.suffix == ".log" for path in written)
    for path in (*written, instance.log_path):
        assert token not in path.read_bytes()
    shown = ("events", "requests", "logs", "ps")
    for command in shown:
        run = [*PROGRAM, command, "--run-dir", str(instance.run_dir)]
        done = subprocess.run(run, capture_output=True, timeout=60, check=True)
        assert token not in done.stdout + done.stderr


def test_a_link_of_a_foreign_page_or_name_opens_nothing(instance: Instance) -> None:
    link = ask_for_link(instance)
    if "keys" not in json.loads(instance.log_path.with_name("servekit.yaml").read_text()):
        assert httpx.get(link, headers={"host": "evil.example"}).status_code == 403
    for path in ("/v1/models", "/admin/status", "/metrics"):
        used = httpx.get(link.replace("/ui?", f"{path}?"))
        assert "set-cookie" not in used.headers
    assert "set-cookie" not in httpx.head(link).headers
    assert "set-cookie" in httpx.get(link).headers  # none of these has used it up


def test_other_browsers_may_look_and_are_told_of_the_link(
    instance: Instance, browser: Browser, tmp_path: Path
) -> None:
    with visit(browser, **PHONE) as page:
        url = away(lambda: instance.url)
        page.context.request.post(f"{url}/ui/login", form={"key": GUEST}, max_redirects=0)
        page.goto(f"{url}/ui/operate")
        expect(page.locator(".sk-hint")).to_contain_text("“servekit link” prints a link")
        expect(page.get_by_role("button", name="Load moving", exact=True)).to_be_disabled()
        assert tier(instance, "moving") == "stopped"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert serious(page) == []
        page.screenshot(path=tmp_path / "phone.png")
