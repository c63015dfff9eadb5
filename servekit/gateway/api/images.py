"""Images, recordings and files of a request's messages: decoded from base64, known by their bytes.

A gateway has no decoder of them. It looks for the signature of a format, and for the size that an
image's file states; the engine decodes the file.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import ChatMessage, Media
from servekit.protocol.tasks import NOUNS

#: An image of more pixels is refused: a few bytes of a file can stand for gigabytes in memory.
MAX_PIXELS = 2**26
#: Signatures of recordings; MP3 also begins with the eleven bits of a frame.
_SOUNDS = {b"fLaC": "audio/flac", b"OggS": "audio/ogg", b"ID3": "audio/mpeg"}
_DATA_URI = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)
_FETCHED = ("https://", "http://")
#: Markers of a JPEG that are followed by its size: start of frame, but not DHT, JPG and DAC.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_FILL = re.compile(rb"\xff+")
#: A photo has a dozen segments before its size, each of up to 64 KiB: this is on the event loop.
_MOST_SEGMENTS = 2000
#: Roles whose messages may hold images and recordings.
_ROLES = ("user", "tool")


def read_data_uri(address: str, where: str, detail: str | None = None) -> Media:
    """Return the image of a `data:` URI, or of an address that is yet to be fetched.

    Raises RequestError.
    """
    found = _DATA_URI.match(address)
    if found is None:
        if address[:8].lower().startswith(_FETCHED):
            return Media(b"", "", detail=detail or "", address=address)
        raise RequestError(f"{where}: expected data:image/png;base64,…", param=where)
    return read_base64(address[found.end() :], where, detail)


def read_base64(text: str, where: str, detail: str | None = None) -> Media:
    """Return the image that base64 stands for. Raises RequestError."""
    image = read_file(_decode(text, where), where)
    return replace(image, detail=detail) if detail else image


def read_file(data: bytes, where: str, param: str | None = None) -> Media:
    """Return the image of a file, whose kind its bytes tell.

    Raises RequestError, for the parameter `param`, by default `where`.
    """
    param = param or where
    kind, (width, height) = inspect_media(data)
    if not kind:
        raise RequestError(f"{where}: this is no PNG, JPEG, WebP or GIF file", param=param)
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"{where}: the image has {width} × {height} pixels, and {MAX_PIXELS} are allowed",
            param=param,
        )
    return Media(data, kind)


def read_base64_audio(text: str, where: str) -> Media:
    """Return the recording that base64, or a `data:` URI, stands for. Raises RequestError."""
    if (found := _DATA_URI.match(text)) is not None:
        text = text[found.end() :]
    data = _decode(text, where)
    kind = next((kind for begin, kind in _SOUNDS.items() if data.startswith(begin)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        kind = "audio/wav"
    elif not kind and data[:1] == b"\xff" and data[1:2] >= b"\xe0":
        kind = "audio/mpeg"
    if not kind:
        raise RequestError(f"{where}: this is no WAV, MP3, FLAC or Ogg file", param=where)
    return Media(data, kind)


def read_text_file(data: str | None, name: str | None, where: str) -> str:
    """Return the text of a file in base64, or in a `data:` URI, after its name.

    Raises RequestError, for files that are no text as well: no model here reads them.
    """
    if data is None:
        said = f"{where}: a file needs `file_data`; one that was uploaded cannot be read here"
        raise Unsupported(said, param=where)
    found = _DATA_URI.match(data)
    raw = _decode(data if found is None else data[found.end() :], where)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or raw.startswith(b"%PDF-"):
        raise Unsupported(
            f"{where}: files are read here if they are text in UTF-8; send the text of others, such"
            " as PDF",
            param=where,
        )
    return f"{name}\n{text}" if name else text


def _decode(text: str, where: str) -> bytes:
    """Return the bytes of base64, with line breaks or without. Raises RequestError.

    msgspec takes a seventh of binascii's time: 5 ms for the largest body, on the event loop.
    """
    try:
        return msgspec.convert(text, bytes)
    except msgspec.ValidationError:
        pass
    try:
        plain = text.encode("ascii").translate(None, string.whitespace.encode())
        return msgspec.convert(plain.decode(), bytes)
    except (UnicodeEncodeError, msgspec.ValidationError):
        raise RequestError(f"{where}: this is not base64", param=where) from None


def inspect_media(data: bytes) -> tuple[str, tuple[int, int]]:
    """Return the kind of an image and its width and height, as far as its header states them."""

    def little(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png", (int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif", (little(6, 2), little(8, 2))
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg", _size_of_jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if data[12:16] == b"VP8X":
            return "image/webp", (little(24, 3) + 1, little(27, 3) + 1)
        if data[12:16] == b"VP8L":
            return "image/webp", ((little(21, 4) & 0x3FFF) + 1, (little(21, 4) >> 14 & 0x3FFF) + 1)
        return "image/webp", (little(26, 2) & 0x3FFF, little(28, 2) & 0x3FFF)
    return "", (0, 0)


def _size_of_jpeg(data: bytes) -> tuple[int, int]:
    """Return the size that a JPEG states; 0 if it is not among its first segments."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        found = _FILL.match(data, at)
        if found is None or (at := found.end()) + 8 > len(data):
            break
        marker = data[at]
        if marker in _FRAMES:
            return int.from_bytes(data[at + 6 : at + 8]), int.from_bytes(data[at + 4 : at + 6])
        at += 1 + int.from_bytes(data[at + 1 : at + 3])
    return 0, 0


def list_media(messages: Iterable[ChatMessage]) -> list[Media]:
    """Return the images and recordings of all messages."""
    return [one for message in messages for one in message.media]


def has_addresses(messages: Iterable[ChatMessage]) -> bool:
    """Return whether any image of the messages is yet to be fetched."""
    return any(one.address for one in list_media(messages))


def make_message(role: str, parts: Sequence[str | Media], where: str) -> ChatMessage:
    """Return a message of texts and media. Raises Unsupported for media of another role."""
    text, media = join_parts(parts)
    if media and role not in _ROLES:
        noun = NOUNS[media[0].modality]
        raise Unsupported(f"{where}: a message of the {role} holds no {noun}", param=where)
    return ChatMessage(role, text, media=media)


def join_parts(parts: Iterable[str | Media]) -> tuple[str, tuple[Media, ...]]:
    """Return the text of a message's parts, and its media with their places.

    Texts that follow each other are joined by a line break.
    """
    texts: list[str] = []
    media: list[Media] = []
    size = 0
    for before, part in pairwise((None, *parts)):
        if isinstance(part, Media):
            media.append(replace(part, at=size))
        elif part is not None:
            texts.append(f"\n{part}" if isinstance(before, str) else part)
            size += len(texts[-1])
    return "".join(texts), tuple(media)
