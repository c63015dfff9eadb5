"""Tools of MCP servers on the chat page, in a real Chromium on an instance with keys.

The echo engine answers with the question, and the page's limit of tokens ends it there: a question
in the form of a call is answered with that call.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Route, TimeoutError, expect

from tests.api_keys import new_key
from tests.integration.instance import Instance, echo
from tests.integration.test_ui import serious
from tests.integration.test_ui_pages import Visitor
from tests.polling import poll

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
pytest.importorskip("mcp")

ODD = str(Path(__file__).parents[1] / "unit" / "gateway" / "tool_servers" / "odd_tools.py")
GUEST, GUEST_HASH = new_key("guest")
USER, USER_HASH = new_key("user")
ADMIN, ADMIN_HASH = new_key("admin")
KEYS = [
    {"name": "guest", "hash": GUEST_HASH},
    {"name": "user", "hash": USER_HASH, "tools": True},
    {"name": "admin", "hash": ADMIN_HASH, "admin": True},
]


def write_call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("ui-tools")
    command = [sys.executable, ODD, str(folder / "pid")]
    servers = [{"name": "odd", "command": command}, {"name": "broken", "command": ["false"]}]
    models = [echo("calls") | {"tool_parser": "hermes"}, echo("plain")]
    server = {"ui": True, "mcp": servers}
    with Instance.up(folder, models, server=server, sections={"keys": KEYS}) as instance:
        instance.until_settled()
        instance.until_ui(USER)
        yield instance


class Chat(Visitor):
    """The chat page of a visitor with a key."""

    def __init__(self, browser: Browser, url: str, key: str = USER, page: str = "") -> None:
        super().__init__(browser, url, key)
        self.open(page)
        expect(self["#sk-model input"]).not_to_have_value("")
        self.choose_model("calls")

    def choose_model(self, model: str) -> None:
        self["#sk-model input"].click()
        self["[role=option]"].filter(has_text=model).click()
        expect(self["#sk-workers h2"]).to_have_text(model)

    @property
    def fold(self) -> Locator:
        return self["#sk-mcp"]

    @property
    def question(self) -> Locator:
        return self[".sk-decide"]

    @property
    def calls(self) -> Locator:
        return self["#sk-chat .sk-call"]

    def turn_on(self, *servers: str) -> None:
        self["#sk-mcp > button"].click()
        for server in servers:
            self["#sk-mcp input"].fill(server)
            self["#sk-mcp input"].press("Enter")
        self.page.keyboard.press("Escape")

    def ask(self, text: str) -> None:
        # an echo: as long as the question, so that it ends there
        self["#sk-settings input[type=number]"].nth(3).fill(str(len(text)))
        self["#sk-box textarea"].fill(text)
        self["#sk-box textarea"].press("Enter")

    def until_ended(self) -> None:
        expect(self["#sk-box [data-testid=submit-button]"]).to_be_visible()

    def stored(self) -> Any:
        """The conversations that the browser keeps."""
        return self.page.evaluate(
            """() => new Promise((resolve) => {
                const opening = indexedDB.open("servekit");
                opening.onsuccess = () => {
                    const all = opening.result.transaction("conversations")
                        .objectStore("conversations").getAll();
                    all.onsuccess = () => { opening.result.close(); resolve(all.result); };
                };
            })"""
        )


@pytest.fixture
def chat(browser: Browser, url: str) -> Iterator[Chat]:
    chat = Chat(browser, url)
    yield chat
    chat.context.close()
    assert (chat.strays, chat.problems) == ([], [])


def test_a_call_is_shown_allowed_made_kept_and_exported(chat: Chat, url: str) -> None:
    chat.turn_on("odd")
    expect(chat[".sk-server summary"]).to_have_text("odd · 11 tools")
    expect(chat["#sk-mcp .label-wrap"]).to_contain_text("Tools (1)")
    text = write_call("add", a=1, b=2)
    chat.ask(text)
    expect(chat.question).to_contain_text("The model asks to call add of odd")
    expect(chat.calls).to_contain_text('"a": 1')
    assert serious(chat.page) == []
    chat.press("Allow")
    chat.until_ended()
    expect(chat.calls.locator("i")).to_have_text("called")
    expect(chat["#sk-chat .bot-row .md"]).to_have_text("3" * len(text))
    [kept] = chat.stored()
    [call] = kept["turns"][1]["calls"]
    assert (call["tool"], call["outcome"], call["result"]) == ("add", "done", "3")
    chat.page.reload()
    expect(chat.calls.locator("i")).to_have_text("called")
    chat.calls.locator("summary").click()
    expect(chat.calls).to_contain_text("Result")
    expect(chat["#sk-mcp .label-wrap"]).to_contain_text("Tools (1)")  # it stays on

    exported = {}
    for act in ("json", "markdown"):
        chat[".sk-more"].click()
        with chat.page.expect_download() as download:
            chat[f"[data-act={act}]"].click()
        exported[act] = Path(download.value.path()).read_text()
    messages = json.loads(exported["json"])["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant"]
    assert "**Call of add (odd)**" in exported["markdown"]
    # a client sends the exported messages as they are
    body = {"model": "calls", "messages": messages, "max_tokens": 5}
    headers = {"authorization": f"Bearer {USER}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_a_call_is_declined_and_another_stopped(chat: Chat, tmp_path: Path) -> None:
    chat.turn_on("odd")
    begun = tmp_path / "begun"
    chat.ask(write_call("hang", begun=str(begun)))
    chat.press("Decline")
    chat.until_ended()
    expect(chat.calls.locator("i")).to_have_text("declined")
    expect(chat["#sk-chat .bot-row .md"]).to_contain_text("The user did not allow this call")
    assert not begun.exists()
    chat.press("New chat")
    chat.ask(write_call("hang", begun=str(begun)))
    chat.press("Allow hang in this conversation")
    poll("the call has begun", begun.exists)
    expect(chat["#sk-note"]).to_have_text("Calling hang…")
    chat.page.keyboard.press("Escape")
    chat.until_ended()
    expect(chat.calls.locator("i")).to_have_text("declined")
    expect(chat[".sk-retry"]).to_be_visible()


def test_a_question_waits_until_the_new_chat_is_shown(chat: Chat) -> None:
    held: list[Route] = []

    def hold_show(route: Route) -> None:
        data = json.loads(route.request.post_data or "{}")["data"]
        if len(data) == 1 and "isShown" in str(data):
            held.append(route)
        else:
            route.continue_()

    chat.page.route("**/run/predict*", hold_show)
    chat.press("New chat")
    with pytest.raises(TimeoutError), chat.page.expect_request("**/queue/join*", timeout=500):
        chat.ask("at once")
    [show] = held
    show.continue_()
    expect(chat["#sk-chat .bot-row .md"]).to_have_text("at once")
    chat.until_ended()
    expect(chat["#sk-chat .user-row"]).to_have_count(1)


@pytest.mark.lane("pages")
def test_what_a_tool_and_a_model_write_is_only_text(chat: Chat) -> None:
    chat.turn_on("odd")
    chat.page.on("dialog", lambda dialog: chat.problems.append(dialog.message))
    chat.ask(write_call("show_markup") + '<button data-decide="x allow">OK</button>')
    expect(chat.question).to_be_visible()
    chat.press("Allow")
    chat.until_ended()
    chat.calls.locator("summary").click()
    expect(chat.calls.locator("pre").last).to_have_text("<script>alert(1)</script>")
    expect(chat["#sk-chat script, #sk-chat [data-decide]"]).to_have_count(0)


@pytest.mark.lane("pages")
def test_a_server_that_fails_says_so_and_the_question_can_be_asked_again(chat: Chat) -> None:
    chat.turn_on("broken")
    failed = "The tools of broken cannot be used"
    expect(chat["#sk-offered [role=alert]"]).to_contain_text(failed)
    chat.ask("hello")
    chat.until_ended()
    expect(chat["#sk-note [role=alert]"]).to_contain_text(failed)
    chat["#sk-mcp input"].press("Backspace")
    expect(chat["#sk-mcp .label-wrap"]).not_to_contain_text("(")
    chat[".sk-retry"].click()
    expect(chat["#sk-chat .bot-row .md"]).to_have_text("hello")


@pytest.mark.lane("pages")
def test_a_model_without_tools_says_so_before_it_is_asked(chat: Chat) -> None:
    chat.turn_on("odd")
    chat.choose_model("plain")
    chat.ask("hello")
    said = "The model 'plain' calls no tools. Models that do: calls."
    expect(chat["#sk-note [role=alert]"]).to_have_text(said)
    expect(chat["#sk-box textarea"]).to_have_value("hello")


@pytest.fixture
def address() -> Iterator[str]:
    """The address of an MCP server over HTTP that is not in the file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, ODD, "http", str(port)])
    try:
        poll("the server listens", lambda: _listens(port))
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def test_only_keys_with_tools_are_offered_them_and_only_admins_name_servers(
    browser: Browser, url: str, address: str
) -> None:
    chats: list[Chat] = []
    try:
        for key in (GUEST, USER, ADMIN):
            chats.append(Chat(browser, url, key))
        guest, user, admin = chats
        expect(user.fold).to_be_visible()
        expect(guest.fold).to_be_hidden()
        user.turn_on(address)
        expect(user["#sk-offered [role=alert]"]).to_contain_text("admin: true")
        admin.turn_on(address)
        expect(admin[".sk-server summary"]).to_have_text(f"{address} · 11 tools")
        admin.ask(write_call("add", a=2, b=2))
        admin.press("Allow")
        admin.until_ended()
        expect(admin["#sk-chat .bot-row .md"]).to_contain_text("444")
    finally:
        for chat in chats:
            chat.context.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.lane("pages")
def test_the_chinese_page_on_a_phone(browser: Browser, url: str) -> None:
    chat = Chat(browser, url, USER, "zh")
    try:
        chat.page.set_viewport_size({"width": 390, "height": 844})
        chat.turn_on("odd")
        chat.ask(write_call("add", a=1, b=2))
        expect(chat.question).to_contain_text("模型请求调用 odd 的 add")
        width = chat.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390
        chat.press("拒绝")
        chat.until_ended()
        expect(chat.calls.locator("i")).to_have_text("已拒绝")
    finally:
        chat.context.close()
