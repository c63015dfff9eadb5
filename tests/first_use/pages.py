"""Every page in Chromium: light and dark, desktop and phone, English and Chinese; ten tabs."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from servekit.cli.init.config_template import DEMO_SAMPLING
from servekit.gateway.ui.pages.language import PAGES
from tests.api_keys import new_key
from tests.first_use.commands import QUESTION, find_model
from tests.first_use.report import Report
from tests.integration.chromium import start_chromium
from tests.integration.instance import Instance, echo, run
from tests.integration.test_ui import away

AREA = "pages"
WITHIN_MS = 60_000
#: A page is drawn within this time, in seconds; the median of `TIMES` visits counts.
DRAWN_S, TIMES = 1.0, 5
SIZES = {"desktop": {"width": 1280, "height": 850}, "phone": {"width": 390, "height": 844}}
LANGUAGES = {"en": "", "zh": "zh/"}
DOCS = ("docs", "docs/quickstart", "docs/swagger")
#: What a page shows once it is drawn.
DRAWN = {
    "": "#sk-box textarea",
    "compare": "#sk-prompt textarea",
    "playground": "#sk-prompt textarea",
    "embeddings": "#sk-texts textarea",
    "structured": "#sk-schema-text textarea",
    "dashboard": ".sk-workers",
    "requests": "#sk-requests",
    "operate": "#sk-models tr",
}
#: Pages without a choice of models.
TABLES = ("dashboard", "requests", "operate")
TOOLS = str(Path(__file__).parents[1] / "unit/gateway/tool_servers/odd_tools.py")
#: Findings in Swagger UI's own markup, which we do not write.
OF_SWAGGER = {"nested-interactive", "heading-order"}


def walk_pages(folder: Path, report: Report) -> None:
    """Start an instance with a real model and some that wait or fail, and visit all pages."""
    models = [
        {
            "name": "smollm2",
            "path": find_model(),
            "sampling": DEMO_SAMPLING,
            "device": "cpu",
        },
        echo("slow", step_s=0.05),
        echo("broken", load_error="the weights are missing"),
        echo("rare", load_s=3) | {"load": "on_demand"},
        echo("calls") | {"tool_parser": "hermes"},
    ]
    tools = [{"name": "sums", "command": [sys.executable, TOOLS, str(folder / "tools.pid")]}]
    admin, admin_hash = new_key("boss")
    sections = {
        "keys": [{"name": "boss", "hash": admin_hash, "admin": True}],
        "profiles": {"few": ["smollm2", "slow"]},
    }
    server = {"ui": True, "mcp": tools}
    with Instance.up(folder, models, server=server, sections=sections) as instance:
        instance.until_settled(within_s=300)
        instance.until_ui(admin, within_s=60)
        with start_chromium() as browser:
            walk = Walk(browser, str(away(lambda: instance.url)), admin, report)
            walk.look_at_sign_in()
            walk.measure_drawing()
            walk.look_at_all()
            walk.look_at_docs()
            walk.open_ten_tabs()
            walk.chat()
            walk.keep_conversations()
            walk.call_a_tool()
            walk.filter_requests()
            walk.switch_profile()
            walk.open_link(str(instance.run_dir))


@dataclass(slots=True)
class Walk:
    """Visits pages and reports what is wrong with them."""

    browser: Browser
    url: str
    key: str
    report: Report

    @contextmanager
    def _visit(self, **options: Any) -> Iterator[BrowserContext]:
        context = self.browser.new_context(**options)
        context.set_default_timeout(WITHIN_MS)
        context.request.post(f"{self.url}/ui/login", form={"key": self.key}, max_redirects=0)
        yield context
        context.close()

    def look_at_sign_in(self) -> None:
        context = self.browser.new_context()
        page = context.new_page()
        page.goto(f"{self.url}/ui/")
        self._report_page(page, "sign-in", "sign-in")
        context.close()

    def measure_drawing(self) -> None:
        """Visit each page some times, as one who has been here before."""
        with self._visit() as context:
            page = context.new_page()
            for name in PAGES:
                took_s = sorted(self._draw(page, name) for _ in range(TIMES))
                wrong = f"over {DRAWN_S:g} s" if took_s[TIMES // 2] > DRAWN_S else ""
                seen = "drawn after " + ", ".join(f"{one:.2f} s" for one in took_s)
                self.report.add(AREA, f"draw /ui/{name}", seen, wrong)

    def _draw(self, page: Page, name: str) -> float:
        began_s = time.monotonic()
        page.goto(f"{self.url}/ui/{name}", wait_until="commit")
        expect(page.locator(DRAWN[name]).first).to_be_visible(timeout=WITHIN_MS)
        return time.monotonic() - began_s

    def look_at_all(self) -> None:
        ways = itertools.product(LANGUAGES, ("light", "dark"), SIZES)
        for language, scheme, size in ways:
            locale = "zh-CN" if language == "zh" else "en-GB"
            options = {"viewport": SIZES[size], "color_scheme": scheme, "locale": locale}
            with self._visit(**options) as context:
                page = context.new_page()
                for name in PAGES:
                    page.goto(f"{self.url}/ui/{LANGUAGES[language]}{name}")
                    expect(page.locator(DRAWN[name]).first).to_be_visible(timeout=WITHIN_MS)
                    if name not in TABLES:
                        model = page.get_by_role("combobox").first
                        expect(model).not_to_have_value("", timeout=WITHIN_MS)
                    title = f"{name or 'chat'}-{language}-{scheme}-{size}"
                    self._report_page(page, f"/ui/{LANGUAGES[language]}{name}", title)

    def look_at_docs(self) -> None:
        for scheme in ("light", "dark"):
            with self._visit(color_scheme=scheme) as context:
                page = context.new_page()
                for name in DOCS:
                    page.goto(f"{self.url}/{name}", wait_until="networkidle")
                    title = f"{name.replace('/', '-')}-{scheme}"
                    self._report_page(page, f"/{name}", title)
                    back = page.locator('a[href^="/ui"]').count()
                    wrong = "" if back else "no link back to the pages"
                    self.report.add(AREA, f"links of /{name}, {scheme}", f"{back} to /ui", wrong)

    def _report_page(self, page: Page, tried: str, title: str) -> None:
        """Report what axe-core finds, of whatever weight, and text that is cut at the side."""
        page.screenshot(path=self.report.folder / f"{title}.png")
        found = [
            f"{one['id']} ({one['impact']}): {node['html'][:160]}"
            for one in Axe().run(page).response["violations"]
            if one["id"] not in OF_SWAGGER or "swagger" not in page.url
            for node in one["nodes"]
        ]
        width = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        found += [f"{width} px wider than the window"] if width > 0 else []
        self.report.add(AREA, f"{tried} as {title}.png", "\n".join(found), "; ".join(found))

    def open_ten_tabs(self) -> None:
        """Open more tabs than a browser has connections, and ask in the last."""
        with self._visit() as context:
            took_s, tabs = [], []
            for name in (*PAGES, "", "compare"):
                tabs.append(context.new_page())
                took_s.append(self._draw(tabs[-1], name))
            answers = []
            for tab in (tabs[0], tabs[8]):
                began_s = time.monotonic()
                self._ask(tab, "smollm2", QUESTION)
                answers.append(f"answered after {time.monotonic() - began_s:.1f} s")
            seen = f"drawn after {', '.join(f'{one:.2f}' for one in took_s)} s; {answers}"
            wrong = "a tab was slow" if max(took_s) > 5 * DRAWN_S else ""
            self.report.add(AREA, "ten tabs", seen, wrong)

    def _ask(self, page: Page, model: str, question: str) -> None:
        self._choose(page, model)
        page.locator("#sk-box textarea").fill(question)
        page.locator("#sk-box textarea").press("Enter")
        self._wait_for_answer(page)

    def _wait_for_answer(self, page: Page) -> None:
        note = page.locator("#sk-note")
        expect(note).to_contain_text(re.compile("[0-9] tokens"), timeout=WITHIN_MS)
        stop = page.locator("#sk-box [data-testid=stop-button]")
        expect(stop).to_have_count(0, timeout=WITHIN_MS)

    def _choose(self, page: Page, model: str) -> None:
        field = page.locator("#sk-model input")
        expect(field).not_to_have_value("", timeout=WITHIN_MS)
        expect(page.get_by_label("Seed")).not_to_have_value("0", timeout=WITHIN_MS)
        field.click()
        page.get_by_role("option", name=re.compile(f"^{model}")).click()
        expect(field).to_have_value(re.compile(f"^{model}"))

    def chat(self) -> None:
        """Ask a real model, stop one, meet one that fails and one that has to be loaded."""
        with self._visit(viewport=SIZES["desktop"], locale="en-GB") as context:
            page = context.new_page()
            page.goto(f"{self.url}/ui/")
            self._ask(page, "smollm2", QUESTION)
            answer = page.locator("#sk-chat .bot-row .md").first.inner_text()
            self._report_page(page, "a question", "chat-answered")
            wrong = "" if "Paris" in answer else "no Paris"
            self.report.add(AREA, QUESTION, answer, wrong)
            self._choose(page, "rare")
            page.locator("#sk-box textarea").fill("Are you there?")
            page.locator("#sk-box textarea").press("Enter")
            expect(page.locator("#sk-note")).to_contain_text(re.compile("load", re.I))
            self.report.add(AREA, "a model on demand", page.locator("#sk-note").inner_text())
            self._report_page(page, "while a model is loaded", "chat-loading")
            self._wait_for_answer(page)
            self._choose(page, "broken")
            page.locator("#sk-box textarea").fill("And you?")
            page.locator("#sk-box textarea").press("Enter")
            failed = page.locator("#sk-note, #sk-chat").filter(has_text="weights are missing")
            expect(failed.first).to_be_visible(timeout=WITHIN_MS)
            self._report_page(page, "a model that has failed", "chat-failed")
            self._choose(page, "slow")
            page.locator("#sk-box textarea").fill("Tell me something long. " * 20)
            page.locator("#sk-box textarea").press("Enter")
            expect(page.locator("#sk-box [data-testid=stop-button]")).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.locator("#sk-note")).to_contain_text(re.compile("stopped", re.I))
            self.report.add(AREA, "Esc stops", page.locator("#sk-note").inner_text())
            self._report_page(page, "a stopped answer", "chat-stopped")

    def keep_conversations(self) -> None:
        """Find, rename, export and delete a conversation with LaTeX and a task list."""
        with self._visit(viewport=SIZES["desktop"], locale="en-GB") as context:
            page = context.new_page()
            page.goto(f"{self.url}/ui/")
            self._choose(page, "slow")
            page.get_by_label("Max tokens").fill("50")
            page.get_by_label("Max tokens").blur()
            self._ask(page, "slow", "$a^2$ and\n\n- [x] done\n- [ ] not done\n")
            drawn = page.locator("#sk-chat .bot-row").first
            expect(drawn.locator(".katex").first).to_be_visible()
            expect(drawn.locator("input[type=checkbox]").first).to_be_visible()
            self._report_page(page, "LaTeX and a task list", "chat-latex")
            page.get_by_label("Search").fill("done")
            page.get_by_role("button", name=re.compile("Rename, export or delete")).click()
            page.get_by_role("textbox", name="Title").fill("My list")
            page.keyboard.press("Enter")
            expect(page.locator("#sk-kept .sk-open")).to_have_text(["My list"])
            self._report_page(page, "a conversation's dialog", "chat-dialog")
            for form in ("Markdown", "JSON"):
                with page.expect_download() as coming:
                    self._act(page, f"Export as {form}")
                told = Path(coming.value.path()).read_text()
                wrong = "" if "not done" in told else "the question is not in it"
                self.report.add(AREA, f"export as {form}", told, wrong)
            self._act(page, "Delete…")
            page.get_by_role("button", name="Delete it").click()
            expect(page.locator("#sk-kept .sk-open")).to_have_count(0)
            self.report.add(AREA, "delete a conversation", page.locator("#sk-kept").inner_text())

    def _act(self, page: Page, button: str) -> None:
        page.get_by_role("button", name=re.compile("Rename, export or delete")).click()
        page.get_by_role("button", name=button, exact=True).click()

    def call_a_tool(self) -> None:
        """Let a model call a tool of an MCP server: an echo that writes a call."""
        with self._visit(viewport=SIZES["desktop"], locale="en-GB") as context:
            page = context.new_page()
            page.goto(f"{self.url}/ui/")
            self._choose(page, "calls")
            page.locator("#sk-mcp > button").click()
            page.locator("#sk-mcp input").fill("sums")
            page.locator("#sk-mcp input").press("Enter")
            page.keyboard.press("Escape")
            page.locator(".sk-server summary").click()
            call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
            page.get_by_label("Max tokens").fill(str(len(call)))
            page.get_by_label("Max tokens").blur()
            page.locator("#sk-box textarea").fill(call)
            page.locator("#sk-box textarea").press("Enter")
            expect(page.locator(".sk-decide")).to_be_visible(timeout=WITHIN_MS)
            self._report_page(page, "a call that a model asks for", "chat-tool-asked")
            page.get_by_role("button", name="Allow", exact=True).click()
            self._wait_for_answer(page)
            page.locator(".sk-call summary").click()
            seen = page.locator("#sk-chat").inner_text()
            self.report.add(AREA, "a call", seen, "" if "Result\n\n5" in seen else "no result")
            self._report_page(page, "a call that was made", "chat-tool-called")

    def filter_requests(self) -> None:
        with self._visit(viewport=SIZES["desktop"], locale="en-GB") as context:
            page = context.new_page()
            page.goto(f"{self.url}/ui/requests")
            table = page.locator("#sk-requests")
            expect(table).to_contain_text("smollm2", timeout=WITHIN_MS)
            page.locator("#sk-requests-model input").click()
            page.get_by_role("option", name="calls", exact=True).click()
            expect(table).not_to_contain_text("smollm2", timeout=WITHIN_MS)
            seen = table.inner_text()
            self.report.add(AREA, "requests of one model", seen, "" if "calls" in seen else "none")
            self._report_page(page, "requests of one model", "requests-filtered")

    def switch_profile(self) -> None:
        with self._visit(viewport=SIZES["desktop"], locale="en-GB") as context:
            page = context.new_page()
            page.goto(f"{self.url}/ui/operate")
            page.get_by_role("button", name="few", exact=True).click()
            expect(page.locator("#sk-told")).to_contain_text("The profile is few")
            row = page.locator("#sk-models tr").filter(has_text="calls").first
            expect(row).to_contain_text("stopped", timeout=WITHIN_MS)
            self.report.add(AREA, "another profile", page.locator("#sk-models").inner_text())
            self._report_page(page, "another profile", "operate-profile")
            page.get_by_role("button", name="all models", exact=True).click()
            expect(row).to_contain_text("loaded", timeout=WITHIN_MS)

    def open_link(self, run_dir: str) -> None:
        """Open a one-time link, as the owner does, and administer; another cannot open it."""
        told = away(lambda: run("link", "--run-dir", run_dir))
        link = told.stdout.strip()
        for visitor, wanted in (("owner", "may administer"), ("second", "expired")):
            context = self.browser.new_context()
            page = context.new_page()
            page.goto(link)
            if visitor == "owner":
                page.goto(f"{self.url}/ui/operate")
            try:
                expect(page.get_by_text(re.compile(wanted)).first).to_be_visible()
                wrong = ""
            except AssertionError:
                wrong = f"no {wanted!r}"
            self.report.add(AREA, f"the link, {visitor}", page.inner_text("body"), wrong)
            self._report_page(page, f"the link, {visitor}", f"link-{visitor}")
            context.close()
