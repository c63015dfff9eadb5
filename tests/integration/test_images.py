"""Images through every API to servers that take them, with odd servers that tell what they saw."""

from __future__ import annotations

import base64
import io
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from PIL import Image as Pillow

from tests.integration.instance import Instance, echo
from tests.integration.test_command import numbers, odd, streamed
from tests.odd_server import IMAGE_TOKENS
from tests.polling import poll
from tests.unit.engines.hearing_model import make_samples, write_wav


def make_file(kind: str, colour: str) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (20, 10), colour).save(file, kind)
    return file.getvalue()


RED, BLUE = make_file("PNG", "red"), make_file("JPEG", "blue")
TONE = write_wav(make_samples(0.2))


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/{'png' if data is RED else 'jpeg'};base64,{encode(data)}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


class Pictures(ThreadingHTTPServer):
    """A server of the two pictures, which notes the paths that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()  # to /slow
        super().__init__(("127.0.0.1", 0), _Pages)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Pages(BaseHTTPRequestHandler):
    server: Pictures

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/slow":
            assert self.server.may_answer.wait(60)
        data = {"/red": RED, "/blue": BLUE, "/slow": RED}.get(self.path)
        self.send_response(404 if data is None else 200)
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[Pictures]:
    with Pictures() as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory, pictures: Pictures) -> Iterator[Instance]:
    models = [
        odd("eyes", "--images", "taken", "--step-s", "0.005"),
        odd("ignorant", "--images", "ignored"),
        odd("blind"),
        odd("told", "--images", "ignored", options={"images": True}),
        odd("ears", "--audio"),
        echo("a"),
    ]
    hosts = [pictures.url.removeprefix("http://")]
    settings: dict[str, Any] = {"limits": {"images": 3}, "max_queue_bytes": 2**20}
    settings["fetch_images"] = {"hosts": hosts, "private_addresses": True, "timeout_s": 60}
    sections = {"logging": {"prompts": True}}
    folder = tmp_path_factory.mktemp("images")
    with Instance.up(folder, models, server=settings, sections=sections) as instance:
        instance.until_settled()
        yield instance


def seen(instance: Instance, model: str = "eyes") -> Any:
    """The messages of the last chat, as the server got them."""
    answer = httpx.post(f"{instance.url}/v1/seen", json={"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_openai_client(instance: Instance) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none")
    parts: Any = [text("Which is"), image(RED), image(BLUE), text("red?"), text("Say.")]
    parts[1]["image_url"]["detail"] = "low"
    messages: Any = [
        {"role": "user", "content": [image(BLUE)]},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": parts},
    ]
    answer = client.chat.completions.create(model="eyes", messages=messages, max_tokens=5)
    assert answer.choices[0].message.content == numbers(5)
    assert answer.usage is not None and answer.usage.prompt_tokens == 5 + 3 * IMAGE_TOKENS
    whole = [*parts[:3], text("red?\nSay.")]
    assert [one["content"] for one in seen(instance)] == [[image(BLUE)], "Blue.", whole]
    stream = client.chat.completions.create(
        model="eyes", messages=messages[2:], max_tokens=5, stream=True
    )
    assert "".join(one.choices[0].delta.content or "" for one in stream) == numbers(5)
    assert [one["content"] for one in seen(instance)] == [whole]

    asked: Any = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": uri(RED)},
    ]
    given: Any = [{"role": "user", "content": asked}]
    response = client.responses.create(model="eyes", input=given, max_output_tokens=5)
    assert response.output_text == numbers(5)
    assert [one["content"] for one in seen(instance)] == [[text("See"), image(RED)]]


def test_the_anthropic_client(instance: Instance) -> None:
    import anthropic  # two seconds, and every worker of pytest-xdist imports this file

    client = anthropic.Anthropic(base_url=instance.url, api_key="none")
    source = {"type": "base64", "media_type": "image/gif", "data": encode(RED)}
    result = [{"type": "text", "text": "Here"}, {"type": "image", "source": source}]
    tool: Any = {"name": "look", "input_schema": {"type": "object"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "image", "source": source}, text("Look.")]},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]  # fmt: skip
    answer = client.messages.create(model="eyes", messages=messages, max_tokens=5, tools=[tool])
    assert answer.content[0].text == numbers(5)
    assert answer.usage.input_tokens == 5 + 2 * IMAGE_TOKENS
    told = seen(instance)
    assert told[0]["content"] == [image(RED), text("Look.")]
    assert told[2]["content"] == [text("Here"), image(RED)] and told[2]["role"] == "tool"


def test_the_ollama_client(instance: Instance) -> None:
    client = ollama.Client(host=instance.url)
    assert "vision" in (client.show("eyes").capabilities or [])
    assert "vision" not in (client.show("blind").capabilities or [])
    message = {"role": "user", "content": "See", "images": [RED, BLUE]}
    answer = client.chat("eyes", messages=[message], options={"num_predict": 5})
    assert answer.message.content == numbers(5)
    assert [one["content"] for one in seen(instance)] == [[image(RED), image(BLUE), text("See")]]
    made = client.generate("eyes", "See", images=[BLUE], options={"num_predict": 5}, stream=True)
    assert "".join(one.response or "" for one in made) == numbers(5)
    assert [one["content"] for one in seen(instance)] == [[image(BLUE), text("See")]]


def ask(instance: Instance, model: str, *parts: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3}
    return httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("model", ["blind", "ignorant", "a"])
def test_models_without_eyes_say_who_has_them(instance: Instance, model: str) -> None:
    assert ask(instance, model, text("See")).status_code == 200
    refused = ask(instance, model, text("See"), image(RED))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages")
    engine = "echo" if model == "a" else "command"
    assert error["message"] == (
        f"messages: the {engine} engine of '{model}' takes no images; models that do: 'eyes', "
        "'told'"
    )
    assert ask(instance, "told", image(RED)).status_code == 200  # the file's word counts


def test_recordings_by_every_form(instance: Instance) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x", max_retries=0)
    heard: Any = {"type": "input_audio", "input_audio": {"data": encode(TONE), "format": "wav"}}
    chat: Any = [{"role": "user", "content": [text("Hear "), heard, text("!")]}]
    made = client.chat.completions.create(model="ears", messages=chat, max_tokens=5)
    assert made.usage is not None and made.usage.prompt_tokens > IMAGE_TOKENS
    assert seen(instance, "ears")[-1]["content"] == [text("Hear "), heard, text("!")]
    url: Any = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encode(TONE)}"}}
    client.chat.completions.create(model="ears", messages=[{"role": "user", "content": [url]}])
    assert seen(instance, "ears")[-1]["content"] == [heard]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hear"}, heard]}]
    client.responses.create(model="ears", input=items, max_output_tokens=5)
    assert seen(instance, "ears")[-1]["content"] == [text("Hear"), heard]


def test_recordings_are_refused_by_name(instance: Instance) -> None:
    heard = {"type": "input_audio", "input_audio": {"data": encode(TONE), "format": "wav"}}
    wrong = {"type": "input_audio", "input_audio": {"data": encode(RED), "format": "wav"}}
    far = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}
    for model, parts, words in (
        ("eyes", [heard], "takes no recordings; models that do: 'ears'"),
        ("ears", [image(RED)], "takes no images; models that do: 'eyes', 'told'"),
        ("ears", [wrong], "this is no WAV, MP3, FLAC or Ogg file"),
        ("ears", [far], "expected data:audio/wav;base64"),
        ("ears", [{"type": "input_audio"}], "input_audio is required"),
        ("ears", [heard] * 4, "4 recordings are over the limit of 3; see server.limits.images"),
    ):
        refused = ask(instance, model, *parts)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text


def test_too_many_and_wrong_ones(instance: Instance) -> None:
    refused = ask(instance, "eyes", *[image(RED)] * 4)
    assert refused.status_code == 400
    assert "4 images are over the limit of 3; see server.limits.images" in refused.text
    refused = ask(instance, "eyes", text("x"), {"type": "image_url", "image_url": "/etc/passwd"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages[0].content[1].image_url")
    tokens = {"model": "a", "messages": [{"role": "user", "content": [image(RED)]}]}
    for page in ("/tokenize", "/v1/messages/count_tokens"):
        assert httpx.post(f"{instance.url}{page}", json=tokens).status_code == 400


def test_images_of_allowed_hosts_are_fetched(instance: Instance, pictures: Pictures) -> None:
    def named(path: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": pictures.url + path, "detail": "low"}}

    given = [text("See"), named("/red"), image(BLUE), named("/blue")]
    answer = ask(instance, "eyes", *given)
    assert answer.json()["usage"]["prompt_tokens"] == 5 + 3 * IMAGE_TOKENS
    fetched: list[dict[str, Any]] = [image(RED), image(BLUE)]
    for one in fetched:
        one["image_url"]["detail"] = "low"
    whole = [text("See"), fetched[0], image(BLUE), fetched[1]]
    assert [one["content"] for one in seen(instance)] == [whole]

    import anthropic

    client = anthropic.Anthropic(base_url=instance.url, api_key="none")
    block: Any = {"type": "image", "source": {"type": "url", "url": f"{pictures.url}/red"}}
    messages: Any = [{"role": "user", "content": [block, text("Look.")]}]
    said = client.messages.create(model="eyes", messages=messages, max_tokens=5)
    assert said.content[0].text == numbers(5)
    assert seen(instance)[0]["content"] == [image(RED), text("Look.")]

    part = {"type": "input_image", "image_url": f"{pictures.url}/blue"}
    body = {"model": "eyes", "input": [{"role": "user", "content": [part]}], "stream": True}
    streamed = httpx.post(f"{instance.url}/v1/responses", json=body, timeout=60)
    assert "response.output_text.done" in streamed.text
    assert seen(instance)[0]["content"] == [image(BLUE)]

    missing = ask(instance, "eyes", named("/green"))
    assert missing.status_code == 400
    assert "/green cannot be fetched: its server answered 404" in missing.json()["error"]["message"]


def test_nothing_is_fetched_for_a_request_that_is_refused(
    instance: Instance, pictures: Pictures
) -> None:
    before = list(pictures.asked)
    named = {"type": "image_url", "image_url": f"{pictures.url}/red"}
    for model, parts in (("blind", [named]), ("eyes", [named] * 4), ("nobody", [named])):
        assert ask(instance, model, *parts).status_code in (400, 404)
    other = ask(instance, "eyes", {"type": "image_url", "image_url": "https://example.com/a.png"})
    assert "example.com is not among the hosts of server.fetch_images" in other.text
    tokens = {"model": "eyes", "messages": [{"role": "user", "content": [named]}]}
    for page in ("/tokenize", "/v1/messages/count_tokens"):
        assert httpx.post(f"{instance.url}{page}", json=tokens).status_code == 400
    assert pictures.asked == before


def test_requests_that_wait_for_images_hold_so_many_bytes(
    instance: Instance, pictures: Pictures
) -> None:
    slow = {"type": "image_url", "image_url": f"{pictures.url}/slow"}
    long = text("x" * 600_000)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, instance, "eyes", long, slow)
        poll("it is asked for", lambda: "/slow" in pictures.asked)
        refused = ask(instance, "eyes", long, slow)
        assert ask(instance, "eyes", text("Short"), image(RED)).status_code == 200
        pictures.may_answer.set()
        assert first.result().status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert ask(instance, "eyes", long, slow).status_code == 200


@pytest.mark.parametrize("in_time", [True, False])
def test_a_request_that_waits_for_images_is_answered_while_servekit_ends(
    tmp_path: Path, in_time: bool
) -> None:
    with Pictures() as pictures, ThreadPoolExecutor(1) as pool:
        threading.Thread(target=pictures.serve_forever).start()
        fetching = {
            "hosts": [pictures.url.removeprefix("http://")],
            "private_addresses": True,
            "timeout_s": 60,
        }
        settings = {"fetch_images": fetching, "drain_timeout_s": 30 if in_time else 1}
        with Instance.up(tmp_path, [odd("eyes", "--images", "taken")], server=settings) as ending:
            ending.until_settled()
            slow = {"type": "image_url", "image_url": f"{pictures.url}/slow"}
            asked = pool.submit(ask, ending, "eyes", text("Which?"), slow)
            poll("it is asked for", lambda: "/slow" in pictures.asked)
            ending.signal(signal.SIGTERM)
            ending.until("it drains", lambda: "draining" in ending.log)
            if in_time:
                pictures.may_answer.set()
            answer = asked.result(60)
            pictures.may_answer.set()
            assert ending.wait() == 0
        pictures.shutdown()
    if in_time:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_unavailable"


def test_an_answer_goes_on_in_another_server_with_its_images(instance: Instance) -> None:
    content = [text("DIE=7"), image(RED)]
    said, usage = streamed(
        instance, "chat/completions", model="eyes", messages=[{"role": "user", "content": content}]
    )
    assert (said, usage["prompt_tokens"]) == (numbers(20), 5 + IMAGE_TOKENS)
    first, begun = seen(instance)
    assert first["content"] == content and begun["role"] == "assistant"


def test_no_image_is_in_any_file(instance: Instance) -> None:
    assert ask(instance, "eyes", image(RED)).status_code == 200
    files = [path for path in instance.run_dir.parent.rglob("*") if path.is_file()]
    log = (instance.run_dir / "logs" / "gateway-0.log").read_text()
    assert f"Media(image/png, {len(RED)} bytes)" in log
    for path in files:
        data = path.read_bytes()
        assert RED not in data and encode(RED).encode() not in data, path
