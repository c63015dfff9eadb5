"""Requests with hostile pictures and sounds, to each API that takes them."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

from tests.fuzz.cases import Case, asked, head, post
from tests.fuzz.media.pictures import make_picture
from tests.fuzz.media.sounds import make_sound
from tests.media_models import EARS, EYES, WHISPER

KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/svg+xml", "audio/wav",
         "application/pdf", "text/html", "", "image/png;charset=utf-8", "IMAGE/PNG",
         "x" * 150)  # fmt: skip
SEEING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
          "/api/chat", "/api/generate", "/tokenize")  # fmt: skip
HEARING = ("/v1/chat/completions", "/v1/responses", "/tokenize")
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
#: Models are slow beside decoders: most answers are of two tokens.
TOKENS = 2


class MediaMaker:
    """Makes cases, as `tests.fuzz.cases.Maker` does."""

    def __init__(self, seed: int, references: tuple[bytes, ...]) -> None:
        self._seed = seed
        self._references = references

    def case(self, number: int) -> Case:
        rng = random.Random(f"media:{self._seed}:{number}")
        match rng.randrange(8):
            case 0:
                return self._hear(rng, number)
            case 1 | 2:
                return self._transcribe(rng, number)
            case _:
                return self._see(rng, number)

    def _see(self, rng: random.Random, number: int) -> Case:
        path = rng.choice(SEEING)
        count = rng.choice((1, 1, 1, 1, 1, 2, 3, 17))
        texts = [encode(rng, make_picture(rng, self._references)[1]) for _ in range(count)]
        return self._send(number, path, "pictures", ask_about_pictures(rng, path, texts))

    def _hear(self, rng: random.Random, number: int) -> Case:
        path = rng.choice(HEARING)
        text = encode(rng, make_sound(rng, self._references)[1])
        return self._send(number, path, "sounds", ask_about_sound(rng, path, text))

    def _transcribe(self, rng: random.Random, number: int) -> Case:
        path = rng.choice(SPEECH)
        kind, body = make_form(rng, make_sound(rng, self._references)[1])
        data = head("POST", path, f"content-length: {len(body)}", f"content-type: {kind}") + body
        return Case(number, f"{path}, sounds", (data,), (asked("POST", path, b""),))

    def _send(self, number: int, path: str, what: str, body: Any) -> Case:
        data = json.dumps(body).encode()
        return Case(number, f"{path}, {what}", (post(path, data),), (asked("POST", path, data),))


def encode(rng: random.Random, file: bytes) -> str:
    """Base64, which may be broken."""
    text = base64.b64encode(file).decode()
    if rng.random() > 0.08:
        return text
    at = rng.randrange(len(text) + 1)
    return rng.choice((
        text[:at], text[:at] + "!" + text[at:], text.rstrip("="), text + "=", text[:at] + "\n",
        text.replace("+", "-").replace("/", "_"), text.replace("A", "%41"), "=" * 8, "",
        text[:at] + "\0é😀" + text[at:],
        "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
    ))  # fmt: skip


def make_uri(rng: random.Random, text: str, kind: str) -> str:
    if rng.random() < 0.15:
        kind = rng.choice(KINDS)
    if rng.random() < 0.03:
        return rng.choice((text, f"data:{kind},{text}", f"data:;base64;base64,{text}",
                           f"data:{kind};base64", "file:///etc/passwd", "http://127.0.0.1:1/a.png",
                           f"DATA:{kind};BASE64,{text}"))  # fmt: skip
    return f"data:{kind};base64,{text}"


def ask_about_pictures(rng: random.Random, path: str, texts: list[str]) -> dict[str, Any]:
    uris = [make_uri(rng, text, "image/png") for text in texts]
    stream = rng.random() < 0.3
    match path:
        case "/v1/responses":
            parts = [{"type": "input_image", "image_url": uri} for uri in uris]
            turns = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "a"}]}]
            return {"model": EYES, "input": turns, "stream": stream, "max_output_tokens": TOKENS}
        case "/v1/messages" | "/v1/messages/count_tokens":
            blocks = [
                {"type": "image", "source": {"type": "base64", "media_type": rng.choice(KINDS[:4]),
                                             "data": text}}
                for text in texts
            ]  # fmt: skip
            body: dict[str, Any] = {
                "model": EYES,
                "messages": [{"role": "user", "content": blocks}],
            }
            if path == "/v1/messages":
                body |= {"stream": stream, "max_tokens": TOKENS}
            return body
        case "/api/chat":
            asking = {"role": "user", "content": "a", "images": texts}
            return _ollama(stream=stream) | {"messages": [asking]}
        case "/api/generate":
            return _ollama(stream=stream) | {"prompt": "a", "images": texts}
        case _:
            shown: list[Any] = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
            return _chat(path, EYES, shown, stream=stream)


def _ollama(*, stream: bool) -> dict[str, Any]:
    return {"model": EYES, "stream": stream, "options": {"num_predict": TOKENS}}


def ask_about_sound(rng: random.Random, path: str, text: str) -> dict[str, Any]:
    form = rng.choice(("wav", "mp3", "wav", "flac", "opus", ""))
    stream = rng.random() < 0.3
    part: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": text, "format": form}}
    if path == "/v1/responses":
        turns = [{"role": "user", "content": [part]}]
        return {"model": EARS, "input": turns, "stream": stream, "max_output_tokens": TOKENS}
    if rng.random() < 0.3:
        part = {"type": "audio_url", "audio_url": {"url": make_uri(rng, text, "audio/wav")}}
    return _chat(path, EARS, [part], stream=stream)


def _chat(path: str, model: str, parts: list[Any], *, stream: bool) -> dict[str, Any]:
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}]
    body: dict[str, Any] = {"model": model, "messages": turns}
    return body if path == "/tokenize" else body | {"stream": stream, "max_tokens": TOKENS}


def make_form(rng: random.Random, file: bytes) -> tuple[str, bytes]:
    """The content type and the body of a form; one in ten is broken."""
    fields = {"model": WHISPER}
    if rng.random() < 0.5:
        fields["response_format"] = rng.choice(("json", "text", "srt", "vtt", "verbose_json", "x"))
    if rng.random() < 0.2:
        fields["stream"] = "true"
    if rng.random() < 0.2:
        fields["timestamp_granularities[]"] = rng.choice(("word", "segment", ""))
    if rng.random() < 0.1:
        fields["prompt"] = rng.choice(("a", "\0", "x" * 3000, "<|endoftext|>"))
    name = rng.choice((b"a.wav", b"a.mp3", b"../../a", b"", b'a"\\\r\nb', b"\xff\xfe.m3u8"))
    parts = [
        b'content-disposition: form-data; name="%b"\r\n\r\n%b' % (key.encode(), value.encode())
        for key, value in fields.items()
    ]
    parts.insert(
        rng.randrange(len(parts) + 1),
        b'content-disposition: form-data; name="file"; filename="%b"\r\n'
        b"content-type: audio/wav\r\n\r\n%b" % (name, file),
    )
    body = b"".join(b"--b0undary\r\n%b\r\n" % part for part in parts) + b"--b0undary--\r\n"
    kind = "multipart/form-data; boundary=b0undary"
    if rng.random() < 0.1:
        at = rng.randrange(len(body))
        body = rng.choice(
            (body[:at], body[at:], body[:at] + b"\r\n--b0undary\r\n" + body[at:], b"")
        )
        kind = rng.choice((kind, kind, "multipart/form-data", 'multipart/form-data; boundary=""',
                           "application/json", "multipart/mixed; boundary=b0undary"))  # fmt: skip
    return kind, body
