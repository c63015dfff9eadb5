"""The pages beside the chat in a real Chromium, on one real instance with keys.

Each page is looked at by axe-core, at phone and desktop width, dark and light.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from servekit.gateway.ui.pages.language import PAGES
from servekit.gateway.ui.widgets.log_tail import LINES
from servekit.request_log import RequestRecord, read_records
from tests.api_keys import new_key
from tests.integration.instance import Instance, echo
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.integration.test_ui import WITHIN_MS, away, running, serious
from tests.polling import poll

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

ADMIN, ADMIN_HASH = new_key("boss")
GUEST, GUEST_HASH = new_key("guest")
KEYS = [
    {"name": "boss", "hash": ADMIN_HASH, "admin": True},
    {"name": "guest", "hash": GUEST_HASH, "models": ["talker", "narrow", "tooler"]},
]
HOSTILE = (
    "<script>window.harm=1</script><img src=x onerror='window.harm=2'>![a](http://192.0.2.1/p.png)"
    "<style>*{display:none}</style>\x1b[31m" + "w" * 3000
)
CALL = '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui-pages")
    adapter = folder / "shout"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"transform": "upper"}')
    return folder


@pytest.fixture(scope="module")
def instance(folder: Path) -> Iterator[Instance]:
    adapters = [{"name": "shout", "path": str(folder / "shout")}]
    gpus, cpu = MadeUpGpus(folder), {"device": "cpu"}
    models = [
        echo("talker", replicas=2, step_s=0.02) | {"adapters": adapters} | cpu,
        echo("narrow", step_s=0.03, slots=1) | cpu,
        echo("tooler") | {"tool_parser": "hermes"} | cpu,
        on_gpu("mortal", "40GiB", 30.0, load_s=0.5),
        echo("moving") | {"load": "manual"} | cpu,
    ]
    given: dict[str, Any] = {
        "server": {"ui": True, "gateways": 2},
        "sections": {"keys": KEYS, "profiles": {"few": ["talker", "mortal", "moving"]}},
        "env": gpus.env,
    }
    with Instance.up(folder, models, **given) as instance:
        instance.until_settled()
        instance.until_ui(ADMIN)
        yield instance


class Visitor:
    """A browser that has signed in, on one page at a time; hears of all that goes wrong."""

    def __init__(self, browser: Browser, url: str, key: str, **options: Any) -> None:
        self.context: BrowserContext = browser.new_context(**options)
        self.context.request.post(f"{url}/ui/login", form={"key": key}, max_redirects=0)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.problems: list[str] = []
        self.strays: list[str] = []
        self.url = url
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.strays.append(request.url)

    def open(self, page: str) -> Visitor:
        self.page.goto(f"{self.url}/ui/{page}")
        expect(self.page.locator(".sk-bar")).to_be_visible(timeout=WITHIN_MS)
        return self

    def __getitem__(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def press(self, name: str) -> None:
        """Press a button, which may be marked as disabled."""
        self.page.get_by_role("button", name=name, exact=True).click(force=True)

    def press_enabled(self, name: str, clicks: int = 1) -> None:
        """Press a button once the page has heard of what makes it possible.

        The supervisor tells a test earlier, and until then the press would be refused.
        """
        button = self.page.get_by_role("button", name=name, exact=True)
        expect(button).not_to_have_attribute("aria-disabled", "true", timeout=WITHIN_MS)
        button.click(force=True, click_count=clicks)

    def choose(self, label: str, model: str) -> None:
        field = self.page.get_by_role("combobox", name=label, exact=True).locator("visible=true")
        field.click()
        options = self.page.locator(f"#{field.get_attribute('aria-controls')}")
        options.get_by_role("option", name=model, exact=True).click()
        expect(field).to_have_value(model)


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Callable[..., Visitor]]:
    visitors: list[Visitor] = []

    def come(page: str, key: str = ADMIN, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, url, key, **options))
        return visitors[-1].open(page)

    yield come
    for visitor in visitors:
        visitor.context.close()
    assert [stray for visitor in visitors for stray in visitor.strays] == []
    assert [problem for visitor in visitors for problem in visitor.problems] == []


# ---------------------------------------------------------------- what each page does


@pytest.mark.lane("pages")
def test_two_models_answer_side_by_side_and_stop(
    visit: Callable[..., Visitor], instance: Instance
) -> None:
    page = visit("compare")
    page.choose("Model A", "talker")
    page.choose("Model B", "shout")
    page["#sk-prompt textarea"].fill("compare us, please ")
    page.page.get_by_label("Max tokens").fill("2000")
    page["#sk-run"].click()
    a, b = page["#sk-answer-a .sk-text"], page["#sk-answer-b .sk-text"]
    expect(a).to_contain_text("compare us, please compare", timeout=WITHIN_MS)
    expect(b).to_contain_text("COMPARE US, PLEASE COMPARE", timeout=WITHIN_MS)
    assert running(instance, "talker") == 2  # both at once
    assert serious(page.page) == []
    page["#sk-stop"].click()
    for side in "ab":
        expect(page[f"#sk-note-{side}"]).to_contain_text("stopped", timeout=WITHIN_MS)
    poll("the engines are free", lambda: running(instance, "talker") == 0, within_s=60)


@pytest.mark.lane("pages")
def test_who_waits_is_told_the_place_and_who_leaves_gives_it_up(
    visit: Callable[..., Visitor], instance: Instance
) -> None:
    page = visit("compare")
    page.choose("Model A", "narrow")
    page.choose("Model B", "narrow")
    page["#sk-prompt textarea"].fill("one after the other ")
    page.page.get_by_label("Max tokens").fill("4000")
    page["#sk-run"].click()
    notes = page["#sk-note-a, #sk-note-b"]
    expect(notes.filter(has_text="Your request is next")).to_have_count(1, timeout=WITHIN_MS)
    page.page.goto("about:blank")
    poll("the engine is free", lambda: running(instance, "narrow") == 0, within_s=60)


@pytest.mark.lane("pages")
def test_hostile_answers_do_nothing_to_the_page(visit: Callable[..., Visitor]) -> None:
    page = visit("compare", viewport={"width": 390, "height": 844})
    page.choose("Model A", "tooler")
    page.choose("Model B", "tooler")
    page["#sk-prompt textarea"].fill(HOSTILE)
    page.page.get_by_label("Max tokens").fill("4000")
    page["#sk-run"].click()
    expect(page["#sk-note-a"]).to_contain_text("4,000 tokens", timeout=WITHIN_MS)
    expect(page["#sk-answer-a .sk-text"]).to_contain_text("<script>window.harm=1</script>")
    assert page.page.evaluate("window.harm") is None
    assert page["#sk-answer-a :is(script, img, style)"].count() == 0
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.lane("pages")
def test_tokens_tell_their_probability_to_eye_pointer_and_keys(
    visit: Callable[..., Visitor],
) -> None:
    page = visit("playground")
    page.choose("Model", "tooler")
    page["#sk-prompt textarea"].fill("tea\n")
    page.page.get_by_label("Max tokens").fill("8")
    page["#sk-run"].click()
    tokens = page["#sk-tokens .sk-token"]
    expect(tokens).to_have_count(8, timeout=WITHIN_MS)
    expect(page["#sk-token-note"]).to_contain_text("Perplexity 1.00")
    expect(tokens.nth(0)).to_have_attribute("aria-label", "t: 100 %. Alternatives: none")
    detail = page[".sk-detail"]
    tokens.nth(1).hover()
    expect(detail).to_contain_text("e (chosen)")
    tokens.nth(0).focus()
    expect(detail).to_contain_text("t (chosen)")
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(detail).to_contain_text("a (chosen)")
    page.page.keyboard.press("End")
    expect(detail).to_contain_text("↵ (chosen)")
    assert serious(page.page) == []


@pytest.mark.lane("pages")
def test_vectors_are_compared_and_downloaded(
    visit: Callable[..., Visitor], instance: Instance
) -> None:
    page = visit("embeddings")
    page.choose("Model", "tooler")
    page["#sk-texts textarea"].fill("one\n<b>two</b>\none")
    page["#sk-run"].click()
    cells = page[".sk-matrix td"]
    expect(cells).to_have_count(9, timeout=WITHIN_MS)
    expect(cells.nth(2)).to_have_text("1.000")  # the same text
    expect(page[".sk-matrix tbody th"].nth(1)).to_contain_text("<b>two</b>")
    with page.page.expect_download() as coming:
        page.page.get_by_role("button", name="Download JSON").click()
    told = json.loads(Path(coming.value.path()).read_text())
    assert [len(one["embedding"]) for one in told["data"]] == [16] * 3
    assert coming.value.suggested_filename == "embeddings.json"
    assert serious(page.page) == []
    page["#sk-texts textarea"].fill("")
    page["#sk-run"].click()
    alert = page["#sk-vectors [role=alert]"]
    expect(alert).to_contain_text("Write some texts", timeout=WITHIN_MS)
    expect(alert).to_be_visible()

    def logged() -> list[RequestRecord]:
        found = read_records(instance.run_dir)
        return [one for one in found if one.endpoint == "/v1/embeddings"]

    [record] = away(lambda: poll("the request in the log", logged))
    assert (record.status, record.key, record.model) == (200, "boss", "tooler")


@pytest.mark.lane("pages")
def test_schemas_are_checked_before_they_are_sent(
    visit: Callable[..., Visitor], instance: Instance
) -> None:
    page = visit("structured")
    before = away(instance.gateway).requests
    page["#sk-schema-text textarea"].fill('{"type": "objekt"}')
    page["#sk-schema-run"].click()
    alert = page["#sk-schema-note [role=alert]"]
    expect(alert).to_contain_text("is not a JSON schema", timeout=WITHIN_MS)
    page["#sk-schema-text textarea"].fill('{"type": }')
    page["#sk-schema-run"].click()
    expect(alert).to_contain_text("is not valid JSON", timeout=WITHIN_MS)
    assert away(instance.gateway).requests == before


@pytest.mark.lane("pages")
def test_calls_of_tools_are_judged(visit: Callable[..., Visitor]) -> None:
    page = visit("structured")
    page.page.get_by_role("tab", name="Tools").click()
    page.choose("Model", "tooler")
    verdict = page["#sk-tools-result .sk-verdict"].first
    for arguments, told in (
        ('{"city": "Paris"}', "Valid"),
        ('{"city": 3}', "3 is not of type 'string'"),
    ):
        page["#sk-tools-prompt textarea"].fill(CALL % arguments)
        page["#sk-tools-run"].click()
        expect(verdict).to_contain_text(told, timeout=WITHIN_MS)
    expect(page["#sk-tools-result .sk-call code"].first).to_have_text("get_weather")
    assert serious(page.page) == []


@pytest.mark.lane("long")
def test_the_request_as_code_runs_and_has_no_key(
    visit: Callable[..., Visitor], tmp_path: Path
) -> None:
    page = visit("compare", permissions=["clipboard-read", "clipboard-write"])
    page.choose("Model A", "tooler")
    page["#sk-prompt textarea"].fill("it's here")
    page[".sk-fold button"].first.click()
    code = page[".sk-code pre"].first
    expect(code).to_contain_text("it'\"'\"'s here", timeout=WITHIN_MS)
    page[".sk-copy"].first.click()
    expect(page[".sk-copy"].first).to_have_text("Copied")
    copied = page.page.evaluate("navigator.clipboard.readText()")
    assert copied == code.text_content()
    assert ADMIN not in page.page.content()
    assert "SERVEKIT_API_KEY" in copied
    env = {**os.environ, "SERVEKIT_API_KEY": GUEST}
    done = away(lambda: run(["bash", "-c", f"{copied} -s"], env))
    assert json.loads(done)["choices"][0]["message"]["content"].startswith("it's here")


def run(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


# ---------------------------------------------------------------- watching


def test_the_dashboard_shows_work_and_a_worker_that_dies(
    visit: Callable[..., Visitor], instance: Instance, url: str
) -> None:
    page = visit("dashboard")
    row = page["tr:not(.sk-why)"].filter(has_text="mortal/0")
    expect(row).to_contain_text("ready", timeout=WITHIN_MS)
    gpu = page[".sk-gpu"]
    expect(gpu).to_contain_text("mortal/0 30.0 GiB", timeout=WITHIN_MS)
    expect(gpu).to_contain_text("42 % busy")
    expect(page["#sk-figures .sk-plot"]).to_have_count(7)  # of GPUs and queues, too
    expect(page["#sk-log"]).to_contain_text("Connected to", timeout=WITHIN_MS)
    ask = {"model": "talker", "prompt": "words and words ", "max_tokens": 200}
    header = {"authorization": f"Bearer {GUEST}"}
    away(lambda: httpx.post(f"{url}/v1/completions", json=ask, headers=header, timeout=30))
    curve = page["#sk-figures svg"].first
    expect(curve).to_have_attribute("aria-label", re.compile("at most [1-9]"), timeout=WITHIN_MS)
    first = page["#sk-figures svg"].nth(2)
    expect(first).to_have_attribute("aria-label", re.compile(r"now \d.* ms"), timeout=WITHIN_MS)
    os.kill(away(lambda: instance.replica("mortal/0")).pid, signal.SIGKILL)
    event = page[".sk-events li"].filter(has_text="mortal/0").filter(has_text="died").first
    expect(event).to_contain_text("SIGKILL", timeout=WITHIN_MS)
    assert serious(page.page) == []
    expect(row.locator("td").last).to_have_text("1", timeout=WITHIN_MS)
    expect(row).to_contain_text("ready", timeout=WITHIN_MS)


def flood(log: Path) -> None:
    """What a worker might write."""
    with log.open("a") as file:
        file.write("w" * 10**7 + "\n")
        file.writelines(f"{HOSTILE[:250]} {number}\n" for number in range(2 * LINES))


@pytest.mark.lane("pages")
def test_a_page_left_open_does_not_grow(visit: Callable[..., Visitor], folder: Path) -> None:
    page = visit("dashboard")
    expect(page[".sk-workers"]).to_be_visible(timeout=WITHIN_MS)
    expect(page[".sk-log li"].first).to_be_visible(timeout=WITHIN_MS)
    log = folder / "run" / "logs" / "mortal~0.log"
    for _ in range(2):  # more lines than are shown, and of any length
        flood(log)
        expect(page[".sk-log li"]).to_have_count(LINES, timeout=WITHIN_MS)
    assert page.page.evaluate("window.harm") is None
    count = "document.getElementsByTagName('*').length"
    path = page["#sk-figures svg path"].first
    before = page.page.evaluate(count)
    for _ in range(4):  # the curve moves once a second
        at = path.get_attribute("d")
        expect(path).not_to_have_attribute("d", at or "", timeout=WITHIN_MS)
    assert page.page.evaluate(count) <= before + 20  # a point on a curve is no element


# ---------------------------------------------------------------- who may


def test_the_admins_key_loads_a_model_and_adds_an_adapter(
    visit: Callable[..., Visitor], instance: Instance, folder: Path
) -> None:
    page = visit("operate")
    expect(page[".sk-page"]).to_contain_text("signed in with the key boss", timeout=WITHIN_MS)
    page.press("moving")
    expect(page["#sk-log"]).to_contain_text("Exits · moving", timeout=WITHIN_MS)
    page.press("Sleep moving")  # is disabled, and says why
    expect(page["#sk-told"]).to_contain_text("Not possible now: it is stopped", timeout=WITHIN_MS)
    assert tier(instance, "moving") == "stopped"
    page.press_enabled("Load moving")
    expect(page["#sk-told"]).to_contain_text("moving is being loaded", timeout=WITHIN_MS)
    poll("it is loaded", lambda: tier(instance, "moving") == "resident", within_s=30)
    page["#sk-adapter input, #sk-adapter textarea"].fill("loud")
    page["#sk-adapter-path input, #sk-adapter-path textarea"].fill(str(folder / "shout"))
    page["#sk-adapter-add"].click()
    expect(page["#sk-adapter-told"]).to_contain_text("loud is loaded", timeout=WITHIN_MS)
    poll("it is listed", lambda: adapters_of(instance, "moving") == ["loud"], within_s=30)
    page["#sk-adapter-remove"].click()
    expect(page["#sk-adapter-told"]).to_contain_text("loud was removed", timeout=WITHIN_MS)
    page.press_enabled("Sleep moving")
    poll("it sleeps", lambda: tier(instance, "moving") == "asleep", within_s=30)
    page.press_enabled("Wake moving")
    poll("it is awake", lambda: tier(instance, "moving") == "resident", within_s=30)
    before = away(lambda: instance.replica("moving/0")).pid
    page.press_enabled("Restart moving", clicks=2)
    expect(page["#sk-told"]).to_contain_text("is being replaced", timeout=WITHIN_MS)
    poll("it has another worker", lambda: is_another(instance, before), within_s=30)
    expect(page["#sk-told"]).to_contain_text("is being replaced")  # the second click is none
    page.press_enabled("Unload moving")
    poll("it is away", lambda: tier(instance, "moving") == "stopped", within_s=30)
    one = away(lambda: instance.replica("talker/1")).pid
    page.press_enabled("Restart talker/1")
    poll("it is another", lambda: one not in pids(instance, "talker"), within_s=30)
    page.press("few")
    expect(page["#sk-told"]).to_contain_text("The profile is few", timeout=WITHIN_MS)
    poll("it is unloaded", lambda: tier(instance, "narrow") == "stopped", within_s=30)
    row = page["#sk-models tr"].filter(has_text="narrow")
    expect(row).to_contain_text("it is not in the profile 'few'", timeout=WITHIN_MS)
    page.press("Load narrow")
    expect(page["#sk-told"]).to_contain_text("It is not in the profile few.", timeout=WITHIN_MS)
    page.press("all models")
    poll("it is loaded again", lambda: running_workers(instance, "narrow") == 1, within_s=30)
    page.press("mortal")
    expect(page["#sk-log"]).to_contain_text("mortal/0", timeout=WITHIN_MS)
    assert serious(page.page) == []


def adapters_of(instance: Instance, name: str) -> list[str]:
    return [one.name for one in away(lambda: instance.model(name)).adapters]


def running_workers(instance: Instance, name: str) -> int:
    return sum(one.state == "ready" for one in away(lambda: instance.model(name)).replicas)


def pids(instance: Instance, name: str) -> list[int]:
    return [one.pid for one in away(lambda: instance.model(name)).replicas]


def is_another(instance: Instance, pid: int) -> bool:
    workers = away(lambda: instance.model("moving")).replicas
    return all(one.pid != pid and one.state == "ready" for one in workers)


def tier(instance: Instance, name: str) -> str:
    residence = away(lambda: instance.model(name)).residence
    return "" if residence is None else str(residence.tier)


@pytest.mark.lane("pages")
def test_another_key_may_look_and_is_told_kindly(
    visit: Callable[..., Visitor], instance: Instance
) -> None:
    page = visit("operate", key=GUEST)
    expect(page[".sk-hint"]).to_contain_text("Read-only", timeout=WITHIN_MS)
    for button in ("adapter-add", "adapter-remove"):
        expect(page[f"#sk-{button}"]).to_be_disabled(timeout=WITHIN_MS)
    before = pids(instance, "talker")
    for verb in ("Unload", "Sleep", "Restart"):
        row = page.page.get_by_role("button", name=f"{verb} talker", exact=True)
        expect(row).to_be_disabled(timeout=WITHIN_MS)
        expect(row).to_have_attribute("title", re.compile("Read-only"))
        page.press(f"{verb} talker")
        expect(page["#sk-told"]).to_contain_text("Not allowed (403)", timeout=WITHIN_MS)
    assert pids(instance, "talker") == before
    assert [one.name for one in away(lambda: instance.model("talker")).adapters] == ["shout"]
    expect(page["#sk-models"]).to_contain_text("tooler")
    expect(page["#sk-models"]).not_to_contain_text("mortal")  # which this key may not use
    expect(page["#sk-log"]).to_contain_text("a key that has `admin: true`", timeout=WITHIN_MS)
    page.open("dashboard")
    expect(page["#sk-log"]).to_contain_text("a key that has `admin: true`", timeout=WITHIN_MS)
    expect(page["#sk-log-of"]).to_have_count(0)


# ---------------------------------------------------------------- for everybody


@pytest.mark.lane("pages")
def test_all_pages_on_a_dark_chinese_phone(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    """Those at a desktop are looked at with their results, in the tests of each."""
    size = {"width": 390, "height": 844}
    visitor = visit("", viewport=size, color_scheme="dark", locale="zh-CN")
    page, found = visitor.page, []
    for name in PAGES:
        visitor.open(name)
        expect(page.locator(".sk-bar [aria-current]")).to_be_visible()
        expect(page.locator('.sk-bar nav a[href="/docs"]')).to_have_text("文档")
        if name == "dashboard":
            expect(page.locator(".sk-workers")).to_be_visible(timeout=WITHIN_MS)
        page.screenshot(path=tmp_path / f"{name or 'chat'}.png", full_page=True)
        found += serious(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name
        assert page.evaluate("document.documentElement.lang") == "zh"
    assert found == []


@pytest.mark.lane("pages")
def test_language_and_theme_are_chosen_and_kept(visit: Callable[..., Visitor]) -> None:
    page = visit("compare", locale="zh-CN", color_scheme="light")
    expect(page["h1"]).to_have_text("对比")
    assert page.page.url.endswith("/ui/zh/compare")
    page.page.get_by_role("link", name="English").click()
    expect(page["h1"]).to_have_text("Compare", timeout=WITHIN_MS)
    page.open("dashboard")  # at the address that leads others to the Chinese page
    expect(page["h1"]).to_have_text("Dashboard", timeout=WITHIN_MS)
    assert page.page.url.endswith("/ui/dashboard")
    page.page.get_by_role("button", name="Dark or light").press("Enter")
    expect(page["body"]).to_have_class(re.compile("dark"))
    page.open("compare")
    expect(page["body"]).to_have_class(re.compile("dark"))


@pytest.mark.lane("long")
def test_the_keyboard_reaches_the_run_button(visit: Callable[..., Visitor]) -> None:
    page = visit("playground")
    page.choose("Model", "tooler")
    page["#sk-prompt textarea"].click()
    for _ in range(12):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.id") == "sk-run":
            break
    expect(page["#sk-run"]).to_be_focused()
    page.page.keyboard.press("Enter")
    expect(page["#sk-tokens .sk-token"].first).to_be_visible(timeout=WITHIN_MS)
