"""The UI in a real Chromium, on a real instance: what visitors do, and what hostile text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Locator,
    Page,
    Request,
    Route,
    TimeoutError,
    expect,
)

from servekit.gateway.ui.pages.language import PAGES
from tests.integration.instance import Instance, echo
from tests.polling import poll

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
#: Generous, for a busy machine: what is asserted is that it comes, and in which order.
WITHIN_MS = 30_000
expect.set_options(timeout=WITHIN_MS)
LONG = "All work and no play makes this a long answer. " * 40


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [
        echo("talker", replicas=2, step_s=0.02),
        echo("narrow", step_s=0.05, slots=1),
        echo("fast"),
        echo("broken", load_error="the weights <b>are</b> ${1 + 1} missing"),
        echo("mortal", load_s=1.5, crash_on="DIE"),
        echo("rare", load_s=3) | {"load": "on_demand"},
    ]
    with Instance.up(tmp_path_factory.mktemp("ui"), models, server={"ui": True}) as instance:
        instance.until_settled()
        instance.until_ui(within_s=60)
        yield instance


def serious(page: Page) -> list[tuple[str, str, str]]:
    """What axe-core finds on a page that keeps somebody from using it, twice in a row.

    A table that is drawn anew while axe looks at it has buttons without their colours.
    """
    first = _look(page)
    return [one for one in _look(page) if one in first] if first else []


def _look(page: Page) -> list[tuple[str, str, str]]:
    violations = Axe().run(page).response["violations"]
    return [
        (page.url, one["id"], node["html"])
        for one in violations
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


class Tab:
    """The page as a visitor sees it. Requests to any other host fail the test at its end."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.base = url
        self.strays: list[str] = []
        self.problems: list[str] = []
        self.urls: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.page.on("request", self._on_request)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._on_console)
        self.open()

    def open(self) -> None:
        self.page.goto(f"{self.base}/ui/")
        expect(self.box).to_be_visible(timeout=WITHIN_MS)
        expect(self.page.locator("#sk-model input")).not_to_have_value("", timeout=WITHIN_MS)
        expect(self.page.get_by_label("Seed")).not_to_have_value("0")  # settings are restored

    def _on_request(self, request: Any) -> None:
        self.urls.append(request.url)
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.strays.append(request.url)

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    @property
    def box(self) -> Locator:
        return self.page.locator("#sk-box textarea")

    @property
    def note(self) -> Locator:
        return self.page.locator("#sk-note")

    @property
    def answers(self) -> Locator:
        return self.page.locator("#sk-chat .bot-row .md")

    @property
    def questions(self) -> Locator:
        return self.page.locator("#sk-chat .user-row .md")

    @property
    def stop_button(self) -> Locator:
        return self.page.locator("#sk-box [data-testid=stop-button]")

    @property
    def send_button(self) -> Locator:
        return self.page.locator("#sk-box [data-testid=submit-button]")

    def choose(self, model: str) -> None:
        self.page.locator("#sk-model input").click()
        self.page.locator("[role=option]", has_text=model).click()
        expect(self.page.locator("#sk-model input")).to_have_value(re.compile(f"^{model}"))

    def ask(self, text: str) -> None:
        """Send a question; it is in the conversation when this returns."""
        before = self.questions.count()
        self.box.fill(text)
        self.box.press("Enter")
        expect(self.questions).to_have_count(before + 1)

    def until_done(self) -> None:
        expect(self.stop_button).to_have_count(0, timeout=60_000)
        expect(self.send_button).to_be_visible()

    @property
    def listed(self) -> Locator:
        return self.page.locator("#sk-kept .sk-open")

    @property
    def alert(self) -> Locator:
        return self.page.locator("#sk-store [role=alert]")

    def answer(self, text: str, count: int = 1) -> None:
        """Ask, and wait for the answer."""
        self.ask(text)
        self.until_done()
        expect(self.answers).to_have_count(count)

    def act(self, title: str, button: str) -> None:
        """Press a button of the dialog of a conversation."""
        self.page.get_by_role("button", name=f"Rename, export or delete “{title}”").click()
        self.page.get_by_role("button", name=button, exact=True).click()

    def setting(self, name: str) -> Locator:
        expect(self.page.get_by_label("Seed")).not_to_have_value("0")  # they are restored
        return self.page.get_by_label(name)


@pytest.fixture
def open_tab(browser: Browser, instance: Instance) -> Iterator[Callable[..., Tab]]:
    """Opens tabs, each in a browser profile of its own unless a context is given."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []

    def open_one(context: BrowserContext | None = None, **options: Any) -> Tab:
        if context is None:
            context = browser.new_context(**options)
            contexts.append(context)
        tabs.append(Tab(context, url_of(instance)))
        return tabs[-1]

    yield open_one
    for context in contexts:
        context.close()
    assert [stray for tab in tabs for stray in tab.strays] == []


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab()


def away(probe: Callable[[], Any]) -> Any:
    """Run in a thread: Playwright occupies this one's event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(probe).result()


def url_of(instance: Instance) -> str:
    return str(away(lambda: instance.url))


def running(instance: Instance, model: str) -> int:
    """Requests in the model's engines, as its workers report them to the supervisor."""
    return sum(replica.running for replica in away(lambda: instance.model(model)).replicas)


def until_running(instance: Instance, model: str, count: int, within_s: float) -> None:
    poll(f"{count} running", lambda: running(instance, model) == count, within_s)


# ---------------------------------------------------------------- a conversation


def test_an_answer_arrives_bit_by_bit_with_its_figures(tab: Tab) -> None:
    tab.choose("talker")
    tab.ask("Tell me a **long** story, please. " * 4)
    lengths = [_grown(tab, 0)]
    for _ in range(3):
        lengths.append(_grown(tab, lengths[-1]))
    assert lengths == sorted(set(lengths))
    expect(tab.answers.locator("strong").first).to_have_text("long")
    tab.stop_button.click()
    expect(tab.note).to_contain_text("tokens/s")
    expect(tab.note).to_contain_text("first after")
    assert tab.problems == []


def _grown(tab: Tab, beyond: int) -> int:
    """Length of the answer once it is longer than `beyond`."""
    tab.page.wait_for_function(
        "n => (document.querySelector('#sk-chat .bot-row .md')?.innerText.length ?? 0) > n",
        arg=beyond,
    )
    return len(tab.answers.first.inner_text())


def test_stop_frees_the_engine_and_keeps_the_text(tab: Tab, instance: Instance) -> None:
    tab.choose("talker")
    tab.ask(LONG)
    _grown(tab, 20)
    until_running(instance, "talker", 1, within_s=60)
    tab.stop_button.click()
    until_running(instance, "talker", 0, within_s=60)
    tab.until_done()
    expect(tab.note).to_contain_text("stopped")
    kept = tab.answers.first.inner_text()
    assert kept
    tab.page.reload()
    expect(tab.answers.first).to_have_text(kept)
    expect(tab.questions).to_have_count(1)


def test_a_reload_keeps_conversation_and_settings_and_a_new_chat_clears(tab: Tab) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("12")
    tab.setting("System prompt").fill("Be brief.")
    tab.setting("System prompt").blur()
    tab.ask("First question")
    tab.until_done()
    tab.ask("Second question")
    tab.until_done()
    expect(tab.answers.nth(1)).to_have_text("Second quest")
    tab.until_done()
    tab.page.reload()
    expect(tab.answers).to_have_count(2)
    expect(tab.page.locator("#sk-model input")).to_have_value("fast")
    expect(tab.setting("Max tokens")).to_have_value("12")
    expect(tab.setting("System prompt")).to_have_value("Be brief.")
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    tab.page.reload()
    expect(tab.page.get_by_text("What would you like to know?")).to_be_visible()
    expect(tab.questions).to_have_count(0)


@pytest.mark.lane("pages")
def test_what_is_being_written_stays_when_the_page_is_left(tab: Tab) -> None:
    tab.box.fill("Half a sentence, 半句")
    tab.page.locator("[data-lang=zh]").click()
    tab.page.wait_for_url("**/ui/zh/")
    expect(tab.box).to_have_value("Half a sentence, 半句")
    tab.page.locator("[data-lang=en]").click()
    tab.page.wait_for_url("**/ui/")
    expect(tab.box).to_have_value("Half a sentence, 半句")
    tab.choose("fast")
    tab.box.press("End")
    tab.box.press_sequentially("!")
    tab.box.press("Enter")
    expect(tab.questions).to_have_text(["Half a sentence, 半句!"])
    tab.until_done()
    tab.page.reload()
    expect(tab.questions).to_have_count(1)
    expect(tab.box).to_have_value("")
    tab.page.goto(f"{tab.base}/ui/structured")
    schema = tab.page.locator("#sk-schema-text textarea")
    schema.fill('{"type": "string"}')
    tab.page.reload()
    expect(schema).to_have_value('{"type": "string"}')
    prompt = tab.page.locator("#sk-schema-prompt textarea").input_value()
    tab.page.locator("[data-lang=zh]").click()
    tab.page.wait_for_url("**/ui/zh/structured")
    expect(schema).to_have_value('{"type": "string"}')
    expect(tab.page.locator("#sk-schema-prompt textarea")).not_to_have_value(prompt)


@pytest.mark.lane("pages")
def test_two_browsers_do_not_see_each_other(open_tab: Callable[..., Tab]) -> None:
    mine, yours = open_tab(), open_tab()
    mine.choose("fast")
    mine.ask("My secret")
    mine.until_done()
    yours.choose("fast")
    yours.ask("Your question")
    yours.until_done()
    yours.page.reload()
    expect(yours.questions).to_have_text(["Your question"])
    expect(mine.questions).to_have_text(["My secret"])


@pytest.mark.lane("pages")
def test_undo_retry_and_edit(tab: Tab) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("9")
    for text in ("one", "two"):
        tab.ask(text)
        tab.until_done()
    tab.page.get_by_role("button", name="Retry").click()
    tab.until_done()
    expect(tab.answers).to_have_text(["oneoneone", "twotwotwo"])
    tab.page.locator("#sk-chat .user-row").nth(1).get_by_label("Edit").click()
    tab.page.locator("#sk-chat .user-row textarea").fill("six")
    tab.page.get_by_label("Submit").click()
    tab.until_done()
    expect(tab.answers).to_have_text(["oneoneone", "sixsixsix"])
    tab.page.get_by_role("button", name="Undo").click()
    expect(tab.answers).to_have_text(["oneoneone"])
    expect(tab.box).to_have_value("six")


def test_closing_the_tab_cancels(open_tab: Callable[..., Tab], instance: Instance) -> None:
    tab = open_tab()
    tab.choose("talker")
    tab.ask(LONG)
    until_running(instance, "talker", 1, within_s=60)
    tab.page.close()
    until_running(instance, "talker", 0, within_s=60)


# ---------------------------------------------------------------- the browser's conversations


def test_conversations_are_listed_found_renamed_exported_and_deleted(tab: Tab) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("12")
    tab.answer("About **harbours**")
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    tab.answer("About lighthouses")
    expect(tab.listed).to_have_text(["About lighthouses", "About **harbours**"])
    assert tab.problems == []
    tab.page.reload()
    tab.problems.clear()  # a request that the reload has aborted is told as one
    expect(tab.answers).to_have_text(["About lighth"])
    tab.page.get_by_label("Search").fill("HARBOURS about")
    expect(tab.listed).to_have_text(["About **harbours**"])
    tab.listed.click()
    expect(tab.questions).to_have_text(["About harbours"])
    tab.page.get_by_label("Search").fill("")
    tab.page.get_by_role("button", name="Rename, export or delete “About lighthouses”").click()
    tab.page.get_by_role("textbox", name="Title").fill("Towers <b>")
    tab.page.keyboard.press("Enter")
    expect(tab.listed).to_have_text(["Towers <b>", "About **harbours**"])
    with tab.page.expect_download() as coming:
        tab.act("Towers <b>", "Export as Markdown")
    assert coming.value.suggested_filename == "Towers-b.md"
    written = "# Towers <b>\n\n## You\n\nAbout lighthouses\n\n## Answer\n\nAbout lighth\n"
    assert Path(coming.value.path()).read_text() == written
    with tab.page.expect_download() as coming:
        tab.act("Towers <b>", "Export as JSON")
    messages = json.loads(Path(coming.value.path()).read_text())["messages"]
    assert [one["content"] for one in messages] == ["About lighthouses", "About lighth"]
    tab.act("About **harbours**", "Delete…")
    tab.page.get_by_role("button", name="Cancel").click()
    expect(tab.listed).to_have_count(2)
    tab.page.get_by_role("button", name="Close").click()
    tab.act("About **harbours**", "Delete…")
    tab.page.get_by_role("button", name="Delete it").click()
    expect(tab.questions).to_have_count(0)  # it was shown
    assert tab.problems == []
    tab.page.reload()
    expect(tab.listed).to_have_text(["Towers <b>"])


@pytest.mark.lane("pages")
def test_the_list_is_used_by_keyboard_and_searched_while_it_changes(tab: Tab) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("5")
    tab.page.get_by_label("Search").fill("lantern")
    tab.answer("A lantern")
    expect(tab.listed).to_have_text(["A lantern"])
    focused = tab.page.locator(":focus")
    tab.page.locator(".sk-more").press("Enter")
    title = tab.page.get_by_role("textbox", name="Title")
    composing = "node => node.dispatchEvent(new KeyboardEvent('keydown', %s))"
    title.evaluate(composing % "{key: 'Enter', bubbles: true, isComposing: true}")
    expect(title).to_be_focused()  # that Enter chose a word of an input method
    title.fill("Of lanterns")
    title.press("Enter")
    expect(tab.listed).to_have_text(["Of lanterns"])
    expect(focused).to_have_attribute("aria-label", "Rename, export or delete “Of lanterns”")
    focused.press("Enter")
    tab.page.get_by_role("button", name="Delete…").press("Enter")
    tab.page.get_by_role("button", name="Delete it").press("Enter")
    expect(tab.listed).to_have_count(0)
    expect(focused).to_have_attribute("type", "search")


def test_two_tabs_keep_what_each_has_said(open_tab: Callable[..., Tab]) -> None:
    one = open_tab()
    one.choose("fast")
    one.setting("Max tokens").fill("9")
    one.answer("first")
    other = open_tab(one.page.context)
    expect(other.questions).to_have_count(0)  # a new tab begins a new conversation
    other.answer("second")
    expect(one.listed).to_have_text(["second", "first"])
    expect(one.questions).to_have_text(["first"])
    other.listed.nth(1).click()
    expect(other.questions).to_have_text(["first"])
    one.answer("third", 2)  # both show the same one now
    expect(other.answers).to_have_text(["firstfirs", "thirdthir"])
    one.page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")  # a tab may be late
    one.answer("fourth", 3)
    other.answer("fifth", 3)
    expect(other.alert).to_contain_text("went on in another tab")
    other.page.reload()
    expect(other.questions).to_have_text(["first", "third", "fifth"])
    one.page.reload()
    expect(one.questions).to_have_text(["first", "third", "fourth"])
    expect(one.listed).to_have_count(3)


def test_an_answer_that_is_left_is_shown_no_more(tab: Tab) -> None:
    tab.choose("talker")
    tab.ask(LONG)
    _grown(tab, 20)
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    tab.choose("fast")
    tab.setting("Max tokens").fill("6")
    tab.answer("anew")  # what the server had sent before would have been shown by now
    expect(tab.answers).to_have_text(["anewan"])
    expect(tab.listed).to_have_text(["anew", re.compile("^All work")])


def hold(page: Page) -> list[Route]:
    """Hold the page's next request to show a conversation, or to take a question back."""
    held: list[Route] = []

    def look(route: Route) -> None:
        if is_showing(route.request) and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/run/predict*", look)
    return held


def is_showing(request: Request) -> bool:
    data = json.loads(request.post_data or "{}").get("data")
    return data is not None and len(data) == 1 and '"turns"' in str(data)


def open_two(tab: Tab) -> None:
    """Ask in two conversations; the one of them is shown then."""
    tab.choose("fast")
    tab.setting("Max tokens").fill("5")
    tab.answer("first")
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    tab.answer("other")


@pytest.mark.lane("pages")
def test_what_comes_late_is_not_shown_instead_of_what_was_opened_since(tab: Tab) -> None:
    open_two(tab)
    held = hold(tab.page)
    with tab.page.expect_request(is_showing):
        tab.listed.filter(has_text="first").click()
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    with tab.page.expect_request(is_showing):  # once more, what is right
        held[0].continue_()
    expect(tab.questions).to_have_count(0)
    tab.answer("third")
    expect(tab.questions).to_have_text(["third"])


@pytest.mark.lane("pages")
def test_a_question_waits_for_all_that_is_to_be_shown_before(tab: Tab) -> None:
    """Else the server would drop its answer."""
    open_two(tab)
    held = hold(tab.page)
    with tab.page.expect_request(is_showing):
        tab.listed.filter(has_text="first").click()
    tab.listed.filter(has_text="other").click()
    tab.box.fill("third")
    tab.box.press("Enter")
    with pytest.raises(TimeoutError), tab.page.expect_request("**/queue/join*", timeout=500):
        pass
    held[0].continue_()
    expect(tab.answers).to_have_text(["other", "third"])
    tab.until_done()
    held = hold(tab.page)
    with tab.page.expect_request(is_showing):
        tab.page.get_by_role("button", name="Undo").click()
    tab.box.fill("fifth")
    tab.box.press("Enter")
    with pytest.raises(TimeoutError), tab.page.expect_request("**/queue/join*", timeout=500):
        pass
    held[0].continue_()
    expect(tab.answers).to_have_text(["other", "fifth"])
    tab.until_done()


@pytest.mark.lane("pages")
def test_a_late_stop_does_not_stop_the_next_answer(tab: Tab, instance: Instance) -> None:
    tab.choose("talker")
    tab.ask(LONG)
    _grown(tab, 20)
    held: list[Route] = []
    tab.page.route("**/run/predict*", lambda route: hold_stop(route, held))
    with tab.page.expect_request(is_stop):
        tab.stop_button.click()
    tab.page.locator("#sk-new").click()
    expect(tab.questions).to_have_count(0)
    tab.box.fill(LONG)

    def send() -> (
        bool
    ):  # Gradio passes over an Enter until it has seen the end of the answer before
        tab.box.press("Enter")
        return tab.questions.count() > 0

    poll("it is sent", send)
    before = _grown(tab, 20)
    with tab.page.expect_response(lambda answer: is_stop(answer.request)):
        held[0].continue_()
    _grown(tab, before + 20)
    tab.stop_button.click()
    tab.until_done()
    until_running(instance, "talker", 0, 10)


def is_stop(request: Request) -> bool:
    """Whether a request has the number of a question as its only value."""
    data = json.loads(request.post_data or "{}").get("data")
    return data is not None and len(data) == 1 and str(data[0]).isdecimal()


def hold_stop(route: Route, held: list[Route]) -> None:
    if is_stop(route.request) and not held:
        held.append(route)
    else:
        route.continue_()


@pytest.mark.lane("pages")
def test_what_is_typed_before_the_server_has_the_question_stays(tab: Tab) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("5")
    held: list[Route] = []
    tab.page.route("**/queue/join*", lambda route: held.append(route))
    tab.box.fill("first")
    with tab.page.expect_request("**/queue/join*"):
        tab.box.press("Enter")
    tab.box.press_sequentially(" and more")
    held[0].continue_()
    expect(tab.answers).to_have_text(["first"])
    expect(tab.box).to_have_value(" and more")


@pytest.mark.lane("pages")
def test_a_question_that_meets_one_of_another_tab_loses_neither(
    open_tab: Callable[..., Tab],
) -> None:
    one = open_tab()
    one.choose("fast")
    one.setting("Max tokens").fill("5")
    one.answer("first")
    other = open_tab(one.page.context)
    other.listed.click()
    expect(other.questions).to_have_text(["first"])
    held: list[Route] = []
    other.page.route("**/queue/join*", lambda route: held.append(route))
    with other.page.expect_request("**/queue/join*"):
        other.box.fill("other")
        other.box.press("Enter")
    one.answer("third", 2)
    held[0].continue_()
    expect(other.answers).to_have_text(["first", "other"])
    other.until_done()
    expect(other.alert).to_contain_text("went on in another tab")
    expect(one.questions).to_have_text(["first", "third"])
    one.page.reload()
    expect(one.questions).to_have_text(["first", "third"])
    expect(one.listed).to_have_count(2)


@pytest.mark.lane("pages")
def test_a_conversation_that_is_deleted_meanwhile_does_not_come_back(
    open_tab: Callable[..., Tab],
) -> None:
    one = open_tab()
    one.choose("talker")
    one.ask(LONG)
    _grown(one, 20)
    other = open_tab(one.page.context)
    expect(other.listed).to_have_count(1)
    other.page.locator(".sk-more").click()
    other.page.get_by_role("button", name="Delete…").click()
    other.page.get_by_role("button", name="Delete it").click()
    expect(other.listed).to_have_count(0)
    expect(one.listed).to_have_count(0)
    one.stop_button.click()
    one.until_done()
    expect(one.questions).to_have_count(0)
    expect(one.listed).to_have_count(0)
    one.choose("fast")
    one.setting("Max tokens").fill("5")
    one.answer("first")
    expect(other.listed).to_have_text(["first"])


@pytest.mark.lane("pages")
def test_a_full_store_is_a_sentence_and_the_chat_goes_on(tab: Tab) -> None:
    full = "throw new DOMException('full', 'QuotaExceededError')"
    tab.page.evaluate(f"() => {{ IDBObjectStore.prototype.put = () => {{ {full} }} }}")
    tab.choose("fast")
    tab.answer("one")
    expect(tab.alert).to_contain_text("store is full")
    tab.answer("two", 2)
    expect(tab.listed).to_have_count(0)
    assert tab.problems == []


@pytest.mark.lane("pages")
def test_a_browser_that_forbids_its_stores_has_a_chat(browser: Browser, instance: Instance) -> None:
    forbid = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
        const get = () => { throw new DOMException("denied", "SecurityError"); };
        Object.defineProperty(window, name, { get, configurable: true });
    }"""
    with contextlib.closing(browser.new_context()) as context:
        context.add_init_script(forbid)
        tab = Tab(context, url_of(instance))
        tab.choose("fast")
        tab.setting("Max tokens").fill("3")
        tab.answer("one")
        expect(tab.alert).to_contain_text("keeps nothing")
        tab.answer("two", 2)
        tab.page.locator("#sk-new").click()
        expect(tab.questions).to_have_count(0)
        tab.page.get_by_role("button", name="Dark or light").click()
        assert tab.problems == []


# ---------------------------------------------------------------- reading and stopping


def test_who_reads_is_not_pulled_down_and_escape_stops(tab: Tab) -> None:
    tab.choose("talker")
    tab.ask("word\n\n" * 60)
    _grown(tab, 20)
    assert serious(tab.page) == []
    log = tab.page.locator("#sk-chat [role=log]")
    below = "node => node.scrollHeight - node.clientHeight - node.scrollTop"
    poll("it follows", lambda: log.evaluate(below) < 4, 30)
    log.hover()
    tab.page.mouse.wheel(0, -120)
    poll("it is read", lambda: log.evaluate(below) > 60, 30)
    at = log.evaluate("node => node.scrollTop")
    _grown(tab, _grown(tab, 0) + 60)  # 1.2 s
    assert log.evaluate("node => node.scrollTop") <= at
    tab.page.mouse.wheel(0, 100_000)
    _grown(tab, _grown(tab, 0) + 20)
    poll("it follows again", lambda: log.evaluate(below) < 4, 30)
    expect(tab.page.get_by_role("button", name="Stop")).to_be_visible()
    tab.box.press("Escape")
    expect(tab.note).to_contain_text("stopped")
    expect(tab.page.get_by_role("button", name="Send")).to_be_visible()


def test_what_failed_is_retried(tab: Tab) -> None:
    tab.choose("broken")
    tab.ask("Hello?")
    expect(tab.note.get_by_role("alert")).to_be_visible()
    tab.page.reload()
    expect(tab.note).to_contain_text("This question has no answer.")
    assert serious(tab.page) == []
    tab.choose("fast")
    tab.setting("Max tokens").fill("6")
    tab.page.get_by_role("button", name="Retry").click()
    expect(tab.answers).to_have_text(["Hello?"])
    expect(tab.page.get_by_role("button", name="Retry")).to_have_count(1)  # Gradio's, of an answer


@pytest.mark.lane("pages")
def test_a_model_on_demand_tells_how_far_it_is(tab: Tab) -> None:
    tab.choose("rare")
    expect(tab.page.locator("#sk-workers h2")).to_have_text(["rare"])  # and no other model
    tab.setting("Max tokens").fill("5")
    tab.ask("hello")
    expect(tab.note).to_have_text(re.compile(r"Waiting for rare · loading, \d+ %"))
    expect(tab.answers).to_have_text(["hello"])


def test_formulas_and_tasks_are_drawn_and_prices_are_not(tab: Tab) -> None:
    text = "- [ ] one\n- [x] two\n\nso $x_1^2$ costs $5 and $10"
    tab.choose("fast")
    tab.setting("Max tokens").fill(str(len(text)))
    tab.answer(text)
    answer = tab.answers.first
    expect(answer.locator(".katex")).to_have_count(1)
    expect(answer).to_contain_text("costs $5 and $10")
    boxes = answer.locator("input[type=checkbox]")
    expect(boxes.first).to_be_visible()
    expect(boxes.first).not_to_be_checked()
    expect(boxes.last).to_be_checked()
    assert serious(tab.page) == []


@pytest.mark.lane("pages")
def test_what_is_written_from_right_to_left_begins_at_the_right(tab: Tab) -> None:
    """Where a paragraph begins, of its own text, whatever the page's direction."""
    right = """(node) => {
        const range = document.createRange();
        range.selectNodeContents(node);
        const text = range.getBoundingClientRect();
        return node.getBoundingClientRect().right - text.right < 40 && text.width < 300;
    }"""
    text = "مرحبا بكم\n\n- واحد\n\nEnglish, too"
    tab.choose("fast")
    tab.setting("Max tokens").fill(str(len(text)))
    tab.answer(text)
    paragraphs = tab.answers.locator("p")
    assert paragraphs.first.evaluate(right)
    assert not paragraphs.last.evaluate(right)
    expect(tab.answers.locator("ul")).to_have_css("direction", "rtl")
    expect(tab.listed).to_have_css("direction", "rtl")  # its end is cut, not its begin


@pytest.mark.lane("pages")
def test_half_of_a_character_is_shown_as_such(tab: Tab) -> None:
    tab.choose("fast")
    tab.box.fill("?")
    tab.box.evaluate(
        """(box) => {
            box.value = "\\\\ud83d is 😀, cut: \\ud83d.";
            box.dispatchEvent(new Event("input", { bubbles: true }));
        }"""
    )
    tab.box.press("Enter")
    expect(tab.questions).to_have_text("\\ud83d is 😀, cut: �.")
    tab.until_done()
    expect(tab.answers.first).to_contain_text("😀, cut: �.")


@pytest.mark.lane("pages")
def test_all_of_a_conversation_is_printed_in_dark_on_white(tab: Tab) -> None:
    text = "\n\n".join(f"paragraph {number}" for number in range(60))
    tab.choose("fast")
    tab.setting("Max tokens").fill(str(len(text)))
    tab.answer(text)
    assert len(re.findall(rb"/Type\s*/Page\b", tab.page.pdf())) > 2
    tab.page.emulate_media(media="print")
    expect(tab.questions.locator("p").first).to_be_visible()
    expect(tab.box).not_to_be_visible()
    tab.page.emulate_media(media="screen")
    tab.page.locator(".sk-theme").click()
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(tab.page.locator("body.dark")).to_have_count(0)
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(tab.page.locator("body.dark")).to_have_count(1)


@pytest.mark.lane("pages")
def test_a_phone_has_a_drawer_and_hints_at_more_pages(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(viewport={"width": 390, "height": 844})
    tab.choose("fast")
    tab.answer("hello")
    expect(tab.listed).not_to_be_visible()
    tab.page.get_by_role("button", name="Conversations").click()
    expect(tab.listed).to_be_visible()
    assert serious(tab.page) == []
    buttons = tab.page.locator("#sk-chat .bot-row .message-buttons button").first
    covered = """(button) => {
        const { left, top } = button.getBoundingClientRect();
        return document.elementFromPoint(left + 8, top + 8).closest("#sk-kept") !== null;
    }"""
    poll("the drawer has come out", lambda: buttons.evaluate(covered))
    tab.page.keyboard.press("Escape")
    expect(tab.listed).not_to_be_visible()
    bar = tab.page.locator(".sk-bar nav")
    expect(bar).to_have_class("sk-more-after")
    bar.evaluate("node => node.scrollTo(10_000, 0)")
    expect(bar).to_have_class("sk-more-before")


@pytest.mark.lane("pages")
def test_a_panel_says_that_no_server_answers(tab: Tab) -> None:
    state = tab.page.locator("#sk-workers li").first
    expect(state).to_contain_text("ready")
    tab.page.context.set_offline(True)
    expect(tab.page.get_by_text("The server does not answer.")).to_be_visible()
    expect(state).not_to_be_visible()
    tab.page.context.set_offline(False)
    expect(state).to_be_visible()


# ---------------------------------------------------------------- waiting and failing


@pytest.mark.lane("pages")
def test_who_waits_sees_the_position_and_may_give_up(
    open_tab: Callable[..., Tab], instance: Instance
) -> None:
    tabs = [open_tab() for _ in range(3)]
    for tab in tabs:
        tab.choose("narrow")
        tab.ask(LONG)
        expect(tab.stop_button).to_be_visible()
    expect(tabs[1].note).to_have_text("Your request is next")
    expect(tabs[2].note).to_have_text("1 request before yours")
    tabs[1].stop_button.click()
    expect(tabs[1].note).to_contain_text("Stopped")
    expect(tabs[2].note).to_have_text("Your request is next")
    tabs[0].stop_button.click()
    expect(tabs[2].note).to_contain_text("tokens/s")
    tabs[2].stop_button.click()
    until_running(instance, "narrow", 0, within_s=60)


def test_errors_are_a_sentence_beneath_the_conversation(tab: Tab) -> None:
    tab.choose("broken")
    tab.ask("Hello?")
    expect(tab.note.get_by_role("alert")).to_have_text(
        "The model 'broken' cannot serve: the weights <b>are</b> ${1 + 1} missing"
    )
    expect(tab.questions).to_have_text(["Hello?"])
    tab.choose("fast")
    tab.setting("Temperature").fill("9")
    tab.setting("Temperature").blur()
    tab.ask("Hello")
    expect(tab.note.get_by_role("alert")).to_contain_text("emperature")
    tab.setting("Temperature").fill("")
    tab.setting("Temperature").blur()
    tab.ask("Hello again")
    tab.until_done()
    expect(tab.answers.last).to_contain_text("Hello again")
    expect(tab.note.get_by_role("alert")).to_have_count(0)


@pytest.mark.lane("pages")
def test_a_worker_that_dies_is_seen_to_come_back(tab: Tab, instance: Instance) -> None:
    tab.choose("mortal")
    row = tab.page.locator("#sk-workers li", has_text="mortal/0")
    expect(row).to_contain_text("ready")
    os.kill(away(lambda: instance.replica("mortal/0")).pid, signal.SIGKILL)
    expect(row.locator("progress")).to_be_visible(timeout=WITHIN_MS)
    expect(row).to_contain_text("ready", timeout=WITHIN_MS)
    expect(row).to_contain_text("1 restart")
    tab.choose("broken")
    broken = tab.page.locator("#sk-workers li", has_text="broken/0")
    expect(broken).to_contain_text("the weights <b>are</b> ${1 + 1} missing")


def kill_gateway(instance: Instance) -> None:
    """SIGKILL the gateway; returns when its successor serves the page."""
    old = away(lambda: instance.gateway().pid)
    os.kill(old, signal.SIGKILL)

    def back() -> bool:
        with contextlib.suppress(httpx.TransportError):
            gateway = away(instance.gateway)
            served = httpx.get(f"{url_of(instance)}/ui/").status_code == 200
            return gateway.pid not in (0, old) and served
        return False

    poll("the gateway is back", back, within_s=60)


@pytest.mark.lane("pages")
def test_an_idle_page_does_not_mind_a_restarted_gateway(tab: Tab, instance: Instance) -> None:
    tab.choose("fast")
    tab.setting("Max tokens").fill("8")
    tab.ask("Before")
    tab.until_done()
    kill_gateway(instance)
    tab.ask("After")
    expect(tab.answers).to_have_text(["BeforeBe", "AfterAft"], timeout=WITHIN_MS)


@pytest.mark.lane("pages")
def test_a_gateway_that_dies_mid_answer_leaves_what_was_said(tab: Tab, instance: Instance) -> None:
    tab.choose("talker")
    tab.ask(LONG)
    _grown(tab, 100)  # two seconds: it has been saved
    tab.page.evaluate("window.old = true")
    kill_gateway(instance)
    tab.page.wait_for_function("!window.old")  # the page finds the new gateway by itself
    expect(tab.questions).to_have_count(1, timeout=WITHIN_MS)
    expect(tab.answers.first).to_contain_text("All work and no play")
    expect(tab.note).to_contain_text("This answer is incomplete.")
    expect(tab.note.get_by_role("button", name="Retry")).to_be_visible()
    tab.choose("fast")
    tab.ask("On we go")
    expect(tab.answers).to_have_count(2, timeout=WITHIN_MS)


# ---------------------------------------------------------------- what a model may write


HOSTILE = """<script>window.harm = 1</script><img src=x onerror="window.harm = 2">
![alt](ELSEWHERE/markdown.png) <img src="ELSEWHERE/html.png"> <svg onload="window.harm = 3"></svg>
<iframe src="ELSEWHERE/frame"></iframe><video src="ELSEWHERE/video" autoplay></video>
<link rel="stylesheet" href="ELSEWHERE/style"><style>#sk-new { display: none }</style>
<form action="ELSEWHERE/form"><input name="q" autofocus><button id="send">send</button></form>
<div style="position: fixed; inset: 0; z-index: 9999; background: url(ELSEWHERE/paint)">X</div>
[link](javascript:window.harm=4) <a id="bait" href="javascript:window.harm=5">click</a>

Inert, as $$x^2$$ and **bold** are. <think>thought</think>
"""


@contextlib.contextmanager
def eavesdropper() -> Iterator[tuple[str, list[str]]]:
    """A server that notes who comes."""
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    with peer:
                        heard.append(peer.recv(1024).decode(errors="replace"))

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", heard
        server.shutdown(socket.SHUT_RDWR)


def test_hostile_text_is_inert(tab: Tab) -> None:
    with eavesdropper() as (elsewhere, heard):
        text = HOSTILE.replace("ELSEWHERE", elsewhere) + "w" * 5000
        tab.choose("fast")
        tab.ask(text)
        tab.until_done()
        answer = tab.answers.first
        expect(answer.locator("strong").first).to_have_text("bold")
        expect(answer.locator(".katex").first).to_be_visible()
        expect(answer).to_contain_text("<think>thought</think>")
        for link in answer.locator("a").all():
            link.dispatch_event("click")
        tab.page.reload()
        expect(tab.answers.first.locator("strong").first).to_have_text("bold")
        assert tab.page.evaluate("window.harm") is None
        assert heard == []
    assert [s for s in tab.strays if not s.startswith(elsewhere)] == []
    tab.strays.clear()  # asked for by the page, and refused by its policy: nothing was heard
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.page.evaluate(wide) == 0
    tab.page.locator("#sk-new").click()  # and nothing lies above it
    expect(tab.questions).to_have_count(0)


# ---------------------------------------------------------------- the page itself


@pytest.mark.lane("pages")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_it_fits_phone_and_desktop(
    open_tab: Callable[..., Tab], tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    tab = open_tab(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.choose("fast")
    tab.ask("Does `this` fit?\n\n```\n" + "long line " * 40 + "\n```\n")
    tab.until_done()
    page = tab.page
    page.screenshot(path=tmp_path / "page.png")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    composer = page.locator("#sk-box").bounding_box()
    assert composer is not None
    assert composer["x"] >= 0
    assert composer["x"] + composer["width"] <= width
    assert composer["y"] + composer["height"] <= height
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    shade = sum(map(int, background.strip("rgba()").split(",")[:3])) / 3
    assert (shade < 64) == (scheme == "dark")


def test_the_surface_is_no_larger_than_the_page_needs(instance: Instance) -> None:
    url = url_of(instance)
    page = httpx.get(f"{url}/ui/")
    assert "connect-src" in page.headers["content-security-policy"] or (
        "default-src 'self'" in page.headers["content-security-policy"]
    )
    api = httpx.get(f"{url}/ui/gradio_api/info").json()
    assert api["named_endpoints"] == {}
    assert api["unnamed_endpoints"] == {}
    for language in ("", "/zh"):
        for path in ("upload", "upload/", "process_recording"):
            for field in ("files", "video"):
                answer = httpx.post(
                    f"{url}/ui{language}/gradio_api/{path}", files={field: ("a.txt", b"x")}
                )
                assert answer.status_code == 404, "a file of a byte would stay in /tmp"
        app = httpx.get(f"{url}/ui{language}/gradio_api/app_id")  # asked after a lost connection
        assert app.status_code == 200
        for path in ("heartbeat/x", "dev/reload", "deep_link"):  # the first two have no end
            answer = httpx.get(f"{url}/ui{language}/gradio_api/{path}", timeout=5)
            assert answer.status_code == 404
    for path in ("/etc/passwd", str(Path(__file__))):
        assert httpx.get(f"{url}/ui/gradio_api/file={path}").status_code in (403, 404)
    big = b'{"data": ["' + b"x" * (9 * 2**20) + b'"]}'
    assert httpx.post(f"{url}/ui/gradio_api/queue/join", content=big).status_code == 413


# ---------------------------------------------------------------- a real model


@pytest.mark.lane("models")
@pytest.mark.model
def test_a_real_model_answers_stops_and_is_remembered(
    tmp_path: Path, instance: Instance, browser: Browser
) -> None:
    demo = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    with away_while(Instance.up(tmp_path, demo["models"], server={"ui": True})) as real:
        away(lambda: real.until_settled(within_s=240))
        url = url_of(real)
        poll("the UI is up", lambda: httpx.get(f"{url}/ui/").status_code == 200, within_s=60)
        with contextlib.closing(browser.new_context()) as context:
            tab = Tab(context, url)
            tab.setting("Temperature").fill("0")
            tab.setting("Temperature").blur()
            tab.ask("Write a long story about a lighthouse keeper.")
            lengths = [_grown(tab, 0)]
            for _ in range(3):
                lengths.append(_grown(tab, lengths[-1]))
            _grown(tab, 150)
            tab.page.screenshot(path=tmp_path / "model.png")
            tab.stop_button.click()
            until_running(real, demo["models"][0]["name"], 0, within_s=60)
            tab.until_done()
            kept = tab.answers.first.inner_text()
            assert len(set(kept.split())) > 12  # words, and not one of them over and over
            tab.page.reload()
            expect(tab.answers.first).to_have_text(kept)
            tab.ask("Who was that story about?")  # the conversation so far goes along
            expect(tab.answers).to_have_count(2, timeout=60_000)
            tab.until_done()
            assert tab.strays == []


@contextlib.contextmanager
def away_while(manager: contextlib.AbstractContextManager[Instance]) -> Iterator[Instance]:
    """The context, entered and left in a thread: see `away`.

    The thread lives as long: what it starts would be killed at its end (`DIE_WITH_TESTS`).
    """
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(manager.__enter__).result()
        try:
            yield entered
        finally:
            pool.submit(manager.__exit__, None, None, None).result()


@pytest.mark.lane("pages")
def test_any_gateway_leads_to_the_same_page(tmp_path: Path, browser: Browser) -> None:
    server = {"ui": True, "gateways": 2}
    with away_while(Instance.up(tmp_path, [echo("one", step_s=0.02)], server=server)) as two:
        away(two.until_settled)
        url = url_of(two)
        poll("the UI is up", lambda: httpx.get(f"{url}/ui/").status_code == 200, within_s=60)
        for _ in range(4):  # the kernel chooses the gateway of each connection
            with contextlib.closing(browser.new_context()) as context:
                tab = Tab(context, url)
                tab.ask(LONG)
                _grown(tab, 10)
                tab.page.close()
                until_running(two, "one", 0, within_s=60)
                assert tab.problems == []


@pytest.mark.lane("pages")
def test_a_model_that_goes_is_not_exchanged_unnoticed(tmp_path: Path, browser: Browser) -> None:
    models = [echo("first"), echo("other")]
    with (
        away_while(Instance.up(tmp_path, models, server={"ui": True})) as changing,
        contextlib.closing(browser.new_context()) as context,
    ):
        away(changing.until_settled)
        away(lambda: changing.until_ui(within_s=60))
        file = tmp_path / "servekit.yaml"
        settings = json.loads(file.read_text())
        tab = Tab(context, url_of(changing))
        tab.choose("other")
        tab.setting("Max tokens").fill("5")
        file.write_text(json.dumps(settings | {"models": models[:1]}))
        away(lambda: changing.signal(signal.SIGHUP))
        expect(tab.page.locator("#sk-workers")).not_to_contain_text("other")
        expect(tab.page.locator("#sk-model input")).to_have_value("other")
        tab.ask("hello")
        expect(tab.note).to_contain_text("The model 'other' is not served here")
        file.write_text(json.dumps(settings))
        away(lambda: changing.signal(signal.SIGHUP))
        expect(tab.page.locator("#sk-workers")).to_contain_text("ready")
        tab.page.get_by_role("button", name="Retry").click()
        expect(tab.answers).to_have_text(["hello"])


@pytest.mark.lane("pages")
def test_ten_tabs_draw_and_a_third_may_ask_while_two_are_answered(
    browser: Browser, instance: Instance
) -> None:
    """A browser opens six connections to a host: idle pages must hold none of them."""
    with contextlib.closing(browser.new_context()) as context:
        url = url_of(instance)
        tabs = [Tab(context, url) for _ in range(4)]
        for tab in tabs[:2]:
            tab.choose("talker")
            tab.ask(LONG)
        for path in filter(None, PAGES):
            page = context.new_page()
            page.goto(f"{url}/ui/{path}", wait_until="commit", timeout=WITHIN_MS)
            expect(page.locator(".sk-bar")).to_be_visible()
            expect(page.locator(".sk-page")).to_be_visible()
        tabs[2].choose("fast")
        tabs[2].ask("Is there a connection left?")
        expect(tabs[2].answers.last).to_contain_text("connection left")
        expect(tabs[0].stop_button).to_be_visible()  # those are under way yet
        assert not [url for tab in tabs for url in tab.urls if "heartbeat" in url]


@pytest.mark.lane("pages")
def test_two_different_models_are_compared_at_first(tab: Tab) -> None:
    tab.page.goto(f"{tab.base}/ui/compare")
    models = [tab.page.get_by_label(f"Model {side}", exact=True) for side in "AB"]
    expect(models[0]).to_have_value("talker")
    expect(models[1]).to_have_value("narrow")


def test_a_page_without_a_slash_is_led_to_it(instance: Instance) -> None:
    url = url_of(instance)
    for path in ("/ui", "/ui/zh"):
        answer = httpx.get(f"{url}{path}", follow_redirects=True)
        assert answer.status_code == 200, path
        assert answer.url.path == f"{path}/"


@pytest.mark.lane("long")
def test_the_request_as_code_can_be_read(tab: Tab) -> None:
    """Together with the settings, in a window of a laptop."""
    tab.page.set_viewport_size({"width": 1280, "height": 850})
    tab.page.locator(".sk-fold button.label-wrap").first.click()
    code = tab.page.locator("#sk-side .sk-codes pre").first
    expect(code).to_be_visible()
    whole = "node => [node.clientHeight, node.scrollHeight]"
    fold = tab.page.locator("#sk-side .sk-fold")
    expect(fold).to_be_visible()
    shown, high = fold.evaluate(whole)
    assert shown >= high - 1, "it is cut off"
