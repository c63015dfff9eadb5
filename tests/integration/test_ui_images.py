"""Images in the chat page, in a real Chromium on an instance with keys, and servers that tell what
they saw."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image as Pillow
from playwright.sync_api import Browser, Locator, TimeoutError, expect

from tests.api_keys import new_key
from tests.integration.instance import Instance
from tests.integration.test_command import numbers, odd
from tests.integration.test_images import BLUE, RED, image, text
from tests.integration.test_ui import away, serious
from tests.integration.test_ui_pages import Visitor
from tests.polling import poll

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

GUEST, GUEST_HASH = new_key("guest")
KEYS = [{"name": "guest", "hash": GUEST_HASH, "models": ["eyes", "blind"]}]
FILES: Any = [
    {"name": "red.png", "mimeType": "image/png", "buffer": RED},
    {"name": "blue.jpg", "mimeType": "image/jpeg", "buffer": BLUE},
]
BLIND = "The model 'blind' takes no images. Models that do: eyes."
#: Dispatches an event of the clipboard or of a drag, with files and types as from outside.
HAND_OVER = """([kind, files]) => {
    const data = new DataTransfer();
    for (const [name, type, base64] of files) {
        const bytes = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
        data.items.add(new File([bytes], name, { type }));
    }
    const more = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: data, ...more })
        : new DragEvent(kind, { dataTransfer: data, ...more });
    document.activeElement.dispatchEvent(event);
    return event.defaultPrevented;
}"""


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    seeing = ("--images", "taken", "--step-s", "0.005")
    models = [odd("eyes", *seeing), odd("blind"), odd("hidden", *seeing)]
    server = {"ui": True, "limits": {"images": 3}}
    sections = {"keys": KEYS, "logging": {"prompts": True}}
    folder = tmp_path_factory.mktemp("ui-images")
    with Instance.up(folder, models, server=server, sections=sections) as instance:
        instance.until_settled()
        instance.until_ui(GUEST)
        yield instance


class Chat(Visitor):
    """The chat page of a visitor with a key."""

    def __init__(self, browser: Browser, url: str, page: str = "", **options: Any) -> None:
        super().__init__(browser, url, GUEST, **options)
        self.start(page)

    def start(self, page: str = "") -> None:
        self.open(page)
        expect(self["#sk-model input"]).not_to_have_value("")
        self.choose_model("eyes")

    def choose_model(self, model: str) -> None:
        self["#sk-model input"].click()
        self["[role=option]"].filter(has_text=model).click()
        blind = "true" if model == "blind" else "false"
        expect(self[".sk-attach"]).to_have_attribute("aria-disabled", blind)

    @property
    def box(self) -> Locator:
        return self["#sk-box textarea"]

    @property
    def picked(self) -> Locator:
        return self[".sk-picked img"]

    @property
    def sent(self) -> Locator:
        return self["#sk-chat .user-row .sk-sent img"]

    @property
    def alert(self) -> Locator:
        return self[".sk-images [role=alert]"]

    def add(self, *files: Any) -> None:
        before = self.picked.count()
        self[".sk-images input"].set_input_files(list(files))
        expect(self.picked).to_have_count(before + len(files))

    def hand_over(self, kind: str, *files: tuple[str, str, bytes]) -> bool:
        given = [[name, type_, _base64(data)] for name, type_, data in files]
        return bool(self.page.evaluate(HAND_OVER, [kind, given]))

    def ask(self, said: str, answers: int = 1) -> None:
        self.box.fill(said)
        self.box.press("Enter")
        self.until_answered(answers)

    def until_answered(self, answers: int) -> None:
        expect(self["#sk-chat .bot-row .md"]).to_have_count(answers)
        expect(self["#sk-chat .bot-row .md"].last).to_have_text(numbers(16).strip())
        expect(self["#sk-box [data-testid=submit-button]"]).to_be_visible()

    def until_drawn(self, images: Locator, count: int) -> None:
        expect(images).to_have_count(count)
        for one in images.all():
            expect(one).to_have_js_property("naturalWidth", 20)

    def stored(self) -> list[str]:
        """The ids of the images that the browser keeps."""
        found: list[str] = self.page.evaluate(
            """() => new Promise((resolve) => {
                const opening = indexedDB.open("servekit");
                opening.onsuccess = () => {
                    const keys = opening.result.transaction("images").objectStore("images")
                        .getAllKeys();
                    keys.onsuccess = () => { opening.result.close(); resolve(keys.result); };
                };
            })"""
        )
        return found


def _base64(data: bytes) -> str:
    return str(image(data)["image_url"]["url"].partition(",")[2])


def seen(instance: Instance) -> Any:
    """The contents of the last chat, as the server got them."""
    headers = {"authorization": f"Bearer {GUEST}"}
    url = away(lambda: instance.url)
    answer = httpx.post(f"{url}/v1/seen", json={"model": "eyes"}, headers=headers)
    return [one["content"] for one in answer.json()]


def forget(instance: Instance) -> None:
    """Let the server see another chat."""
    headers = {"authorization": f"Bearer {GUEST}"}
    body = {"model": "eyes", "messages": [{"role": "user", "content": "other"}]}
    url = away(lambda: instance.url)
    httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).raise_for_status()


@pytest.fixture
def open_chat(browser: Browser, url: str) -> Iterator[Callable[..., Chat]]:
    chats: list[Chat] = []

    def open_one(page: str = "", **options: Any) -> Chat:
        chats.append(Chat(browser, url, page, **options))
        return chats[-1]

    yield open_one
    for chat in chats:
        chat.context.close()
    assert [problem for chat in chats for problem in (*chat.strays, *chat.problems)] == []


@pytest.fixture
def chat(open_chat: Callable[..., Chat]) -> Chat:
    return open_chat()


def test_an_image_that_comes_before_the_page_knows_the_model_is_kept(chat: Chat) -> None:
    chat.page.route("**/queue/join*", lambda route: route.abort())  # all that the page asks
    chat.page.reload()
    chat.add(FILES[0])


def test_images_are_added_taken_away_sent_and_kept(chat: Chat, instance: Instance) -> None:
    chat.add(*FILES)
    chat.until_drawn(chat.picked, 2)
    chat.page.get_by_role("button", name="Remove blue.jpg").focus()
    chat.page.keyboard.press("Delete")
    expect(chat.picked).to_have_count(1)
    expect(chat.page.get_by_role("button", name="Remove red.png")).to_be_focused()
    chat.ask("What is this?")
    expect(chat.picked).to_have_count(0)
    assert seen(instance) == [[image(RED), text("What is this?")]]
    chat.page.reload()
    chat.until_drawn(chat.sent, 1)
    expect(chat.sent).to_have_attribute("alt", "red.png")
    chat.ask("And now?", answers=2)
    first, _, then = seen(instance)
    assert (first, then) == ([image(RED), text("What is this?")], "And now?")
    assert len(chat.stored()) == 1
    chat[".sk-more"].click()
    chat["[data-act=delete]"].click()
    chat["[data-act=delete_it]"].click()
    expect(chat.sent).to_have_count(0)
    chat.page.reload()
    expect(chat.page.get_by_text("What would you like to know?")).to_be_visible()
    assert chat.stored() == []
    files = [path for path in instance.run_dir.parent.rglob("*") if path.is_file()]
    assert any(b"Media(image/png, " in path.read_bytes() for path in files)  # prompts are logged
    for path in files:
        assert RED not in path.read_bytes(), path
        assert _base64(RED).encode() not in path.read_bytes(), path


def test_a_model_without_eyes_says_so_and_the_text_stays(chat: Chat) -> None:
    chat.add(FILES[0])
    chat.choose_model("blind")
    expect(chat.alert).to_have_text(BLIND)  # not `hidden`, which this key may not use
    chat.box.fill("What is this?")
    chat.box.press("Enter")
    expect(chat["#sk-note"].get_by_role("alert")).to_have_text(BLIND)
    expect(chat.box).to_have_value("What is this?")
    expect(chat.picked).to_have_count(1)
    chat.page.get_by_role("button", name="Remove red.png").click()
    button = chat.page.get_by_role("button", name="Add images")
    expect(button).to_have_attribute("title", BLIND)
    for add in (
        lambda: button.press("Enter"),
        lambda: chat.hand_over("paste", ("a.png", "image/png", RED)),
    ):
        chat.choose_model("eyes")
        expect(chat.alert).to_have_text("")
        chat.choose_model("blind")
        add()
        expect(chat.alert).to_have_text(BLIND)
    expect(chat.picked).to_have_count(0)
    expect(chat.box).to_have_value("What is this?")


# ---------------------------------------------------------------- what is beyond one visit


@pytest.mark.lane("pages")
def test_files_are_chosen_by_keyboard_pasted_and_dropped(chat: Chat, instance: Instance) -> None:
    chat.page.on("filechooser", lambda chooser: chooser.set_files(FILES[:1]))
    chat.box.focus()
    chat.page.keyboard.press("Shift+Tab")
    button = chat.page.get_by_role("button", name="Add images")
    expect(button).to_be_focused()
    chat.page.keyboard.press("Enter")
    expect(chat.picked).to_have_count(1)
    expect(chat.box).to_be_focused()
    for kind, (name, type_, data) in (
        ("paste", ("image.png", "image/png", BLUE)),
        ("drop", ("late.png", "", RED)),
    ):
        assert chat.hand_over("dragover", (name, type_, data)) or kind == "paste"
        assert chat.hand_over(kind, (name, type_, data))  # else the browser would open the file
    chat.until_drawn(chat.picked, 3)
    chat.page.keyboard.press("Shift+Tab")
    chat.page.keyboard.press("Shift+Tab")
    expect(chat.page.get_by_role("button", name="Remove late.png")).to_be_focused()
    chat.page.keyboard.press("Enter")
    expect(chat.picked).to_have_count(2)
    expect(chat[".sk-images [role=status]"]).to_have_text("late.png was removed.")
    chat.box.focus()
    chat.page.keyboard.press("Enter")  # without any text
    chat.until_answered(1)
    [[first, second]] = seen(instance)
    assert (first, second) == (image(RED), image(BLUE))


@pytest.mark.lane("pages")
@pytest.mark.lane("pages")
def test_a_question_waits_for_its_image(chat: Chat) -> None:
    """A browser takes its time for a photo."""
    chat.page.evaluate(
        """() => {
            const decode = Image.prototype.decode;
            const waiting = new Promise((go) => (window.go = go));
            Image.prototype.decode = async function () { await waiting; return decode.call(this); };
        }"""
    )
    chat.box.fill("what?")
    assert chat.hand_over("paste", ("red.png", "image/png", RED))
    chat.box.press("Enter")
    with pytest.raises(TimeoutError), chat.page.expect_request("**/queue/join*", timeout=300):
        pass
    chat.page.evaluate("window.go()")
    chat.until_answered(1)
    chat.until_drawn(chat.sent, 1)
    expect(chat.picked).to_have_count(0)


def test_a_wrong_or_large_file_is_a_sentence_and_the_text_stays(chat: Chat) -> None:
    file = io.BytesIO()
    Pillow.new("1", (9000, 8000)).save(file, "PNG")
    wrong = {
        "notes.txt is no PNG, JPEG, WebP or GIF image.": b"notes",
        "cut.png cannot be read; the file may be damaged.": RED[:40],
        "vast.png is too large: it has 72 million pixels, and 67 are allowed.": file.getvalue(),
        "big.png is too large (6.0 MB): the images of a conversation may have 5.6 MB together.": (
            RED + bytes(6_000_000)
        ),
    }
    chat.box.fill("Look")
    chat.add(FILES[0])
    for sentence, data in wrong.items():
        given: Any = {"name": sentence.split()[0], "mimeType": "image/png", "buffer": data}
        chat[".sk-images input"].set_input_files(given)
        expect(chat.alert).to_have_text(sentence)
    chat[".sk-images input"].set_input_files(FILES * 2)  # one is there, and three may be
    expect(chat.alert).to_have_text("The limit of images in a conversation is 3.")
    expect(chat.picked).to_have_count(3)
    expect(chat.box).to_have_value("Look")
    chat.box.press("Enter")
    chat.until_answered(1)
    expect(chat.alert).to_have_text("")
    chat[".sk-images input"].set_input_files(FILES[:1])
    expect(chat.alert).to_have_text("The limit of images in a conversation is 3.")


@pytest.mark.lane("pages")
def test_retry_edit_and_undo_keep_the_images(chat: Chat, instance: Instance) -> None:
    chat.ask("one")
    chat.add(FILES[0])
    chat.ask("two", answers=2)
    forget(instance)
    chat.page.get_by_role("button", name="Retry").click()
    poll("it is asked again", lambda: seen(instance)[2:] == [[image(RED), text("two")]], 60)
    chat.until_answered(2)
    chat["#sk-chat .user-row"].last.get_by_label("Edit").click()
    chat["#sk-chat .user-row textarea"].fill("six")
    chat.page.get_by_label("Submit").click()
    expect(chat["#sk-chat .user-row .md"]).to_have_text(["one", "six"])
    poll("it is asked", lambda: seen(instance)[2:] == [[image(RED), text("six")]], 60)
    chat.until_answered(2)
    chat.page.get_by_role("button", name="Undo").click()
    expect(chat.sent).to_have_count(0)
    chat.until_drawn(chat.picked, 1)
    expect(chat.box).to_have_value("six")
    chat.box.press("Enter")
    chat.until_answered(2)
    assert seen(instance)[2] == [image(RED), text("six")]


@pytest.mark.lane("pages")
def test_an_image_that_the_browser_cannot_keep_is_sent_and_told(
    chat: Chat, instance: Instance
) -> None:
    chat.context.add_init_script(
        """const put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function (...given) {
            if (this.name === "images") throw new DOMException("full", "QuotaExceededError");
            return put.apply(this, given);
        };"""
    )
    chat.page.reload()
    expect(chat["#sk-model input"]).to_have_value("eyes")
    chat.add(FILES[0])
    chat.ask("one")
    expect(chat.alert).to_contain_text("red.png is too large to be kept in this browser.")
    chat.ask("two", answers=2)
    assert seen(instance)[0] == [image(RED), text("one")]
    chat.page.reload()
    expect(chat.sent).to_have_count(1)
    chat.ask("three", answers=3)
    expect(chat.alert).to_contain_text("no longer in this browser, and are not sent")
    assert [one for one in seen(instance) if one in ("one", "two", "three")] == [
        "one", "two", "three",
    ]  # fmt: skip


@pytest.mark.lane("pages")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_chinese_phone(
    open_chat: Callable[..., Chat], tmp_path: Path, scheme: str
) -> None:
    phone = {"width": 390, "height": 844}
    chat = open_chat("zh/", viewport=phone, color_scheme=scheme, locale="zh-CN")
    chat.add(*FILES)
    assert serious(chat.page) == []
    chat.ask("这是什么？")
    chat.until_drawn(chat.sent, 2)
    chat.add(FILES[0])
    chat.choose_model("blind")
    expect(chat.alert).to_have_text("模型 blind 不支持图片。支持图片的模型：eyes。")
    assert serious(chat.page) == []
    chat.page.screenshot(path=tmp_path / "phone.png")
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 390
    box = chat["#sk-box"].bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 844
