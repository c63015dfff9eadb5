"""The page Transcribe in Chromium, whose microphone plays a file, on an instance with keys."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, expect

from servekit.errors import ClientClosed
from servekit.request_log import RequestRecord, read_records
from tests.api_keys import new_key
from tests.integration.chromium import start_chromium
from tests.integration.instance import Instance, bearer, echo
from tests.integration.test_ui import away, running, serious
from tests.integration.test_ui_images import HAND_OVER, _base64
from tests.integration.test_ui_pages import Visitor
from tests.polling import poll
from tests.unit.engines.hearing_model import make_samples, read_wav, write_wav, write_whisper

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

GUEST, GUEST_HASH = new_key("guest")
POOR, POOR_HASH = new_key("poor")
DEAF, DEAF_HASH = new_key("deaf")
KEYS: list[dict[str, Any]] = [
    {"name": "guest", "hash": GUEST_HASH},
    {"name": "poor", "hash": POOR_HASH, "requests_per_minute": 1},
    {"name": "deaf", "hash": DEAF_HASH, "models": ["talker"]},
]
MOST_BYTES = 3 * 2**20
SHORT = write_wav(make_samples(5, 1))
#: So long that its transcription can be left, stopped, and waited for.
LONG = write_wav(make_samples(80, 2))
API = "/v1/audio/transcriptions"
#: Another host than localhost to the browser, which lends it no microphone.
ELSEWHERE = "elsewhere.test"
#: Makes a file that only browsers read.
WEBM = """(seconds) => new Promise(async (resolve) => {
    const context = new AudioContext();
    const tone = context.createOscillator();
    const target = context.createMediaStreamDestination();
    tone.connect(target);
    tone.start();
    const recorder = new MediaRecorder(target.stream, { mimeType: "audio/webm" });
    recorder.ondataavailable = async ({ data }) =>
        resolve([...new Uint8Array(await data.arrayBuffer())]);
    recorder.start();
    setTimeout(() => recorder.stop(), seconds * 1000);
})"""

#: Keeps the forms that the page sends, which no event of Playwright has.
KEEP = """
const ask = window.fetch;
window.asked = [];
window.fetch = (url, more, ...rest) => {
    if (String(url).includes("/ui/v1/")) window.asked.push([url, more.body]);
    return ask(url, more, ...rest);
};"""
SENT = """async () => {
    const [url, form] = asked.at(-1);
    const file = await servekitStore.readDataUri(form.get("file"));
    return [url, Object.fromEntries([...form].filter(([name]) => name !== "file")), file];
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui-transcribe")
    (folder / "spoken.wav").write_bytes(write_wav(make_samples(4, 3, rate=48_000), 48_000))
    return folder


@pytest.fixture(scope="module")
def instance(folder: Path) -> Iterator[Instance]:
    whisper = {
        "name": "whisper",
        "path": str(write_whisper(folder / "whisper", decoder_layers=6)),
        "device": "cpu",
        "standby": False,
        "options": {"threads": 1, "slots": 1, "max_audio_s": 85},
    }
    server = {"ui": True, "max_body_bytes": MOST_BYTES}
    models = [echo("talker"), whisper]
    with Instance.up(folder, models, server=server, sections={"keys": KEYS}) as instance:
        instance.until_settled(120)
        instance.until_ui(GUEST)
        yield instance


@pytest.fixture(scope="module")
def browser(url: str, folder: Path) -> Iterator[Browser]:
    speaks = [
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
        f"--use-file-for-fake-audio-capture={folder / 'spoken.wav'}",
        f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
        "--autoplay-policy=no-user-gesture-required",
    ]
    with start_chromium(*speaks) as browser:
        yield browser


class Desk(Visitor):
    """The page of a visitor, and what it has asked the API."""

    def __init__(self, browser: Browser, url: str, key: str = GUEST, **options: Any) -> None:
        super().__init__(browser, url, key, **options)
        self.page.add_init_script(KEEP)
        self.open("transcribe")
        expect(self["#sk-workers :is(section, p)"].first).to_be_visible()

    @property
    def sent(self) -> tuple[str, dict[str, str], bytes]:
        """The address, the fields and the file of the last request."""
        url, fields, file = self.page.evaluate(SENT)
        return url, fields, base64.b64decode(file.partition(",")[2])

    @property
    def alert(self) -> Locator:
        return self[".sk-recorder [role=alert]"]

    @property
    def fault(self) -> Locator:
        return self["#sk-fault [role=alert]"]

    @property
    def note(self) -> Locator:
        return self[".sk-progress"]

    @property
    def segments(self) -> Locator:
        return self[".sk-segment"]

    def give(self, data: bytes, name: str = "speech.wav") -> None:
        file: Any = {"name": name, "mimeType": "", "buffer": data}
        self[".sk-recorder input"].set_input_files([file])

    def take(self, data: bytes, name: str = "speech.wav") -> None:
        self.give(data, name)
        expect(self[".sk-taken b"]).to_have_text(name)
        expect(self.alert).to_be_empty()

    def run(self) -> None:
        self["#sk-run"].click()

    def until_done(self) -> str:
        expect(self[".sk-about"]).to_contain_text("0:")
        return self["#sk-transcript pre"].text_content() or ""

    def download(self, form: str) -> str:
        with self.page.expect_download() as coming:
            self.page.get_by_role("button", name=f"Download {form}").click()
        assert coming.value.suggested_filename == f"speech.{form.lower()}"
        return Path(coming.value.path()).read_text()


@pytest.fixture
def desk(browser: Browser, url: str) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def sit_down(*args: Any, **options: Any) -> Desk:
        desks.append(Desk(browser, url, *args, **options))
        return desks[-1]

    yield sit_down
    for one in desks:
        one.context.close()
    assert [problem for one in desks for problem in (*one.strays, *one.problems)] == []


def post(url: str, file: bytes, **fields: Any) -> httpx.Response:
    """The same without a browser."""
    form = {"model": "whisper"} | fields
    asked: dict[str, Any] = {"files": {"file": file}, "data": form, "headers": bearer(GUEST)}
    answer: httpx.Response = away(lambda: httpx.post(f"{url}{API}", timeout=120, **asked))
    return answer


def records(instance: Instance) -> list[RequestRecord]:
    return [one for one in read_records(instance.run_dir) if one.endpoint == API]


def test_what_is_spoken_is_heard(desk: Callable[..., Desk], instance: Instance, url: str) -> None:
    page = desk()
    page.page.get_by_role("button", name="Record", exact=True).click()
    expect(page[".sk-level [role=timer]"]).to_have_text("0:02")
    assert serious(page.page) == []
    page.page.get_by_role("button", name="End the recording").click()
    expect(page[".sk-taken"]).to_contain_text("Your recording 0:0")
    before = len(away(lambda: records(instance)))
    page.run()
    text = page.until_done()
    _, fields, file = page.sent
    samples = read_wav(file)
    assert 2 <= len(samples) / 16_000 < 20
    assert file[:4] == b"RIFF" and float(np.sqrt(np.mean(samples**2))) > 0.02  # not silence
    assert (
        fields.items() >= {"model": "whisper", "stream": "true", "queue_position": "true"}.items()
    )
    whole = post(url, file, response_format="verbose_json").json()
    assert text.strip() == whole["text"]
    assert page["audio"].evaluate("(audio) => audio.duration") == whole["duration"]
    poll("both are logged", lambda: len(away(lambda: records(instance))) == before + 2)
    ours, _ = away(lambda: records(instance))[-2:]
    assert (ours.status, ours.key, ours.model) == (200, "guest", "whisper")


def test_a_file_is_heard_saved_and_played_along(desk: Callable[..., Desk], url: str) -> None:
    page = desk()
    page.take(SHORT)
    page.run()
    text = page.until_done()
    whole = post(url, SHORT, response_format="verbose_json").json()
    assert text.strip() == whole["text"]
    assert page["#sk-transcript .sk-about"].text_content() == f"{whole['language']} · 0:05"
    assert page.download("TXT") == f"{whole['text']}\n"
    assert page.download("SRT") == post(url, SHORT, response_format="srt").text
    assert page.download("VTT") == post(url, SHORT, response_format="vtt").text
    told = json.loads(page.download("JSON"))
    times = [(one["start"], one["end"], one["text"]) for one in whole["segments"]]
    assert [(one["start"], one["end"], one["text"]) for one in told["segments"]] == times
    assert serious(page.page) == []
    page.segments.first.focus()
    page.page.keyboard.press("End")
    expect(page.segments.last).to_be_focused()
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("Enter")
    expect(page["[data-now]"].first).to_be_visible()
    assert page["audio"].evaluate("(audio) => audio.currentTime") >= times[1][0]
    # without times, into English, and of this language
    page.page.get_by_label("Times of segments").uncheck()
    page.page.get_by_label("Translate into English").check()
    page.page.get_by_label("Language").fill("de")
    page.page.get_by_label("Prompt").fill("Dr. Ödön")
    page.run()
    expect(page.segments).to_have_count(0)
    expect(page["#sk-transcript pre"]).not_to_be_empty()
    asked, fields, _ = page.sent
    assert asked == "/ui/v1/audio/translations"
    assert (fields["language"], fields["prompt"]) == ("de", "Dr. Ödön")
    expect(page["[data-save=srt]"]).to_be_hidden()


def test_who_leaves_or_stops_leaves_nothing_running(
    desk: Callable[..., Desk], instance: Instance
) -> None:
    page = desk()
    page.take(LONG)
    page.run()
    expect(page.segments.nth(1)).to_be_visible()
    page["#sk-stop"].click()
    expect(page.note).to_have_text("Stopped")
    kept = page.segments.count()
    assert kept >= 2
    poll("it is stopped", lambda: running(instance, "whisper") == 0)
    assert page.segments.count() == kept
    page.run()
    expect(page.note).to_contain_text("Heard")
    page.page.goto("about:blank")
    poll("it is left", lambda: running(instance, "whisper") == 0)
    poll("both are logged", lambda: _count_left(instance) == 2)


def _count_left(instance: Instance) -> int:
    return sum(one.outcome == ClientClosed.code for one in away(lambda: records(instance)))


@pytest.mark.lane("pages")
def test_files_that_are_none_too_large_or_too_long(
    desk: Callable[..., Desk], instance: Instance
) -> None:
    page = desk()
    before = len(away(lambda: records(instance)))
    for data, name, said in (
        (b"", "a.wav", "a.wav is empty."),
        (b"just words " * 1000, "words.txt", "words.txt has no sound"),
        (SHORT[44:], "torn.wav", "torn.wav has no sound"),
        (write_wav(make_samples(100)), "b.wav", "b.wav is too long (1:40): 1:36 can be sent"),
    ):
        page.give(data, name)
        expect(page.alert).to_contain_text(said)
        expect(page[".sk-taken"]).to_be_hidden()
    page.run()
    expect(page.alert).to_contain_text("There is no recording yet")
    page.take(write_wav(make_samples(90)))  # which can be sent
    page.run()
    expect(page.alert).to_contain_text("too long (1:30): this model takes 1:25")
    assert len(away(lambda: records(instance))) == before
    page.take(SHORT[:-1000], "cut.wav")
    page.run()
    expect(page.fault).to_contain_text("File: the recording is cut short")
    page.run()  # the same again
    expect(page.fault).to_be_visible()
    page.take(SHORT)
    page.page.get_by_label("Language").fill("klingon")
    page.run()
    expect(page.fault).to_contain_text("this model does not know 'klingon'")
    page.page.get_by_label("Language").fill("")
    page.run()
    page.until_done()
    expect(page.fault).to_be_hidden()


@pytest.mark.lane("pages")
def test_what_servekit_does_not_read_the_browser_turns_into_wav(desk: Callable[..., Desk]) -> None:
    page = desk()
    webm = bytes(page.page.evaluate(WEBM, 1.5))
    page.take(webm, "spoken.webm")
    expect(page[".sk-taken"]).to_contain_text("turned into WAV by this browser")
    page.run()
    page.until_done()
    samples = read_wav(page.sent[2])
    assert 1 < len(samples) / 16_000 < 3
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) * 16_000 / len(samples) == pytest.approx(440, abs=5)
    large = write_wav(np.stack([make_samples(20, rate=44_100)] * 2, axis=1), 44_100)
    assert len(large) > MOST_BYTES
    page.take(large, "stereo.wav")  # fits once it is mixed
    page.run()
    expect(page.fault).to_be_hidden()
    expect(page[".sk-about"]).to_contain_text("0:20")
    assert len(read_wav(page.sent[2])) / 16_000 == pytest.approx(20, abs=0.01)


@pytest.mark.lane("pages")
def test_files_are_dropped_and_pasted_but_not_meanwhile(desk: Callable[..., Desk]) -> None:
    page = desk()

    def hand_over(kind: str, *files: tuple[str, bytes]) -> bool:
        given = [[name, "audio/wav", _base64(data)] for name, data in files]
        return bool(page.page.evaluate(HAND_OVER, [kind, given]))

    assert hand_over("dragover", ("a.wav", SHORT))
    expect(page[".sk-recorder"]).to_have_attribute("data-dropping", "")
    assert hand_over("drop", ("a.wav", SHORT), ("b.wav", SHORT))
    expect(page.alert).to_have_text("Only a.wav was taken: it is one recording at a time.")
    assert hand_over("paste", ("pasted.wav", LONG))
    expect(page[".sk-taken b"]).to_have_text("pasted.wav")
    page.run()
    expect(page.segments.first).to_be_visible()
    page.give(SHORT, "other.wav")
    expect(page.alert).to_contain_text("Another recording is under way")
    expect(page[".sk-taken b"]).to_have_text("pasted.wav")
    page["#sk-stop"].click()
    page.take(SHORT, "other.wav")
    time = page["audio"].evaluate("(audio) => audio.currentTime")
    page.segments.nth(1).click()  # of the other recording
    assert page["audio"].evaluate("(audio) => [audio.currentTime, audio.paused]") == [time, True]


@pytest.mark.lane("pages")
def test_a_microphone_that_is_refused_or_missing_is_a_sentence(
    desk: Callable[..., Desk], url: str
) -> None:
    page = desk()
    refuse = (
        "(name) => { navigator.mediaDevices.getUserMedia = async () => {"
        " throw new DOMException('', name); } }"
    )
    for name, said in (
        ("NotAllowedError", "was not allowed to use the microphone"),
        ("NotFoundError", "finds no microphone"),
        ("NotReadableError", "The microphone cannot be used"),
    ):
        page.page.evaluate(refuse, name)
        page.page.get_by_role("button", name="Record", exact=True).click()
        expect(page.alert).to_contain_text(said)
    other = page.context.new_page()
    other.goto(url.replace("127.0.0.1", ELSEWHERE) + "/ui/transcribe")
    other.get_by_label("API key").fill(GUEST)
    other.get_by_role("button", name="Sign in").click()
    other.get_by_role("button", name="Record", exact=True).click()
    alert = other.locator(".sk-recorder [role=alert]")
    expect(alert).to_contain_text("only to pages that come over https")
    file: Any = {"name": "a.wav", "mimeType": "", "buffer": SHORT}
    other.locator(".sk-recorder input").set_input_files([file])
    expect(other.locator(".sk-taken b")).to_have_text("a.wav")
    expect(other.get_by_role("combobox", name="Model")).to_have_value("whisper")
    other.locator("#sk-run").click()
    expect(other.locator(".sk-about")).to_contain_text("0:05")


@pytest.mark.lane("pages")
def test_a_recording_is_not_lost_by_leaving_and_ends_at_its_limit(
    desk: Callable[..., Desk],
) -> None:
    page = desk()
    page["#sk-workers .sk-hears"].evaluate("(hears) => { hears.dataset.mostS = 1.5 }")
    page["#sk-workers"].evaluate("(status) => status.id = 'kept'")  # no update undoes it
    page.page.get_by_role("button", name="Record", exact=True).click()
    expect(page.alert).to_contain_text("has ended at 0:01")
    expect(page[".sk-taken b"]).to_have_text("Your recording")
    page.page.once("dialog", lambda dialog: dialog.dismiss())
    with page.page.expect_event("dialog") as asked:
        page.page.get_by_role("link", name="Dashboard").click(no_wait_after=True)
    assert asked.value.type == "beforeunload"
    expect(page[".sk-taken b"]).to_have_text("Your recording")
    page.run()  # what has ended at the limit is not over it
    page.until_done()
    page.page.get_by_role("link", name="Dashboard").click()  # it is heard, and may be left
    expect(page["h1"]).to_have_text("Dashboard")


@pytest.mark.lane("pages")
def test_who_waits_is_told_the_place(
    desk: Callable[..., Desk], instance: Instance, url: str
) -> None:
    page = desk()
    page.take(SHORT)
    with ThreadPoolExecutor() as clients:
        posts = [clients.submit(post, url, LONG) for _ in range(3)]
        poll("one runs", lambda: running(instance, "whisper") == 1)
        with held(instance):
            page.run()
            expect(page.note).to_have_text(re.compile("before yours|Your request is next"))
        page.until_done()
        assert all(one.result().is_success for one in posts)


@contextmanager
def held(instance: Instance) -> Iterator[None]:
    """Keep the worker from transcribing for a while."""
    (worker,) = away(lambda: instance.model("whisper")).replicas
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.lane("pages")
def test_many_tabs_leave_the_browser_connections(
    desk: Callable[..., Desk], instance: Instance
) -> None:
    page = desk()
    tabs = [page.page, *(page.context.new_page() for _ in range(5))]
    for tab in tabs[1:]:
        tab.goto(page.page.url)
        expect(tab.locator("#sk-workers section")).to_be_visible()
    for tab in tabs:
        file: Any = {"name": "a.wav", "mimeType": "", "buffer": LONG}
        tab.locator(".sk-recorder input").set_input_files([file])
        expect(tab.locator(".sk-taken b")).to_have_text("a.wav")
    with held(instance):
        for tab in tabs:
            tab.locator("#sk-run").click()
        for tab in tabs[-2:]:
            expect(tab.locator(".sk-progress")).to_contain_text("Other tabs of this browser")
        more = page.context.new_page()
        more.goto(page.page.url)  # a page loads, as connections are left
        expect(more.locator("#sk-workers section")).to_be_visible()
        tabs[1].close()  # gives its turn up
    for tab in (tabs[0], *tabs[2:]):
        expect(tab.locator(".sk-about")).to_contain_text("1:20", timeout=120_000)


@pytest.mark.lane("pages")
def test_quotas_and_models_are_those_of_the_key(desk: Callable[..., Desk]) -> None:
    page = desk(POOR, locale="zh-CN")
    page.take(SHORT)
    page.run()
    page.until_done()
    page.run()
    expect(page.fault).to_contain_text("poor")
    page = desk(DEAF)
    expect(page[".sk-hint"]).to_contain_text("No model here transcribes")
    expect(page.page.get_by_role("combobox", name="Model")).to_have_value("")
    page.take(SHORT)
    page.run()
    expect(page.alert).to_have_text("Choose a model first.")


@pytest.mark.lane("pages")
def test_a_dark_chinese_phone_and_the_keyboard_alone(
    desk: Callable[..., Desk], tmp_path: Path
) -> None:
    size = {"width": 390, "height": 844}
    page = desk(viewport=size, color_scheme="dark", locale="zh-CN")
    expect(page["h1"]).to_have_text("转写")
    with page.page.expect_file_chooser() as chooser:
        page[".sk-choose"].focus()
        page.page.keyboard.press("Enter")
    file: Any = {"name": "录音.wav", "mimeType": "", "buffer": SHORT}
    chooser.value.set_files([file])
    expect(page[".sk-taken b"]).to_have_text("录音.wav")
    for _ in range(20):
        if page.page.evaluate("document.activeElement.id") == "sk-run":
            break
        page.page.keyboard.press("Tab")
    page.page.keyboard.press("Enter")
    page.until_done()
    page.page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert serious(page.page) == []
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    page.page.get_by_label("语言").fill("klingon")
    page.run()
    expect(page.fault).to_contain_text("此模型不支持语言 klingon")


@pytest.mark.lane("pages")
def test_an_answer_that_breaks_off_is_a_sentence(
    desk: Callable[..., Desk], instance: Instance, url: str
) -> None:
    page = desk()
    page.take(LONG)
    page.page.route("**/ui/v1/**", lambda route: route.abort())
    page.run()
    expect(page.alert).to_contain_text("The server does not answer")
    page.page.unroute("**/ui/v1/**")
    page.run()
    expect(page.segments.first).to_be_visible()
    (worker,) = away(lambda: instance.model("whisper")).replicas
    os.kill(worker.pid, signal.SIGKILL)  # the transcript outlives it
    expect(page[".sk-about"]).to_contain_text("1:20", timeout=120_000)
    assert (
        page["#sk-transcript pre"].text_content()
        == post(url, LONG, response_format="verbose_json").json()["text"]
    )
