"""Images of requests: their formats, sizes and places, and wrong ones."""

from __future__ import annotations

import base64
import io
import random
import struct
import time
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.images import (
    MAX_PIXELS,
    has_addresses,
    inspect_media,
    join_parts,
    list_media,
    make_message,
    read_base64,
    read_data_uri,
)
from servekit.protocol.messages import ChatMessage, Media

Format = Literal["PNG", "JPEG", "GIF", "WEBP"]
FORMATS: tuple[Format, ...] = ("PNG", "JPEG", "GIF", "WEBP")
PICTURE = Media(b"a file", "image/png")


def make_file(kind: Format, size: tuple[int, int] = (33, 17), **options: bool) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", size, "red").save(file, kind, **options)
    return file.getvalue()


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(33, 17), (1, 1), (4000, 3)])
def test_the_file_says_what_it_is(kind: Format, size: tuple[int, int]) -> None:
    data = make_file(kind, size)
    assert inspect_media(data) == (f"image/{kind.lower()}", size)
    for told in ("image/png", "text/html", ""):  # which may be wrong
        image = read_data_uri(f"data:{told};base64,{encode(data)}", "here", "low")
        assert image == Media(data, f"image/{kind.lower()}", detail="low")


@pytest.mark.parametrize("more", [b"\xff", b"\xff\xe0\0\2", b"\xff\xff\xe0\0\2"])
def test_a_jpeg_of_segments_alone_does_not_keep_the_event_loop(more: bytes) -> None:
    """They took a second and more, in which no stream went on."""
    data = b"\xff\xd8" + more * (6_000_000 // len(more))
    began_s = time.process_time()
    assert inspect_media(data + make_file("JPEG")[2:])[0] == "image/jpeg"
    assert time.process_time() - began_s < 0.3
    assert inspect_media(b"\xff\xd8" + more * 100 + make_file("JPEG")[2:]) == (
        "image/jpeg",
        (33, 17),
    )


def test_webp_has_three_headers() -> None:
    for options in ({"lossless": True}, {"lossless": False}):
        assert inspect_media(make_file("WEBP", (300, 200), **options)) == ("image/webp", (300, 200))
    file = io.BytesIO()
    Pillow.new("RGBA", (300, 200)).save(file, "WEBP", save_all=True, append_images=[
        Pillow.new("RGBA", (300, 200), "blue")])  # fmt: skip
    assert file.getvalue()[12:16] == b"VP8X"
    assert inspect_media(file.getvalue()) == ("image/webp", (300, 200))


def test_jpeg_with_much_before_its_size() -> None:
    file = io.BytesIO()
    picture = Pillow.new("RGB", (640, 480))
    picture.save(file, "JPEG", progressive=True, comment=b"c" * 60_000, icc_profile=b"p" * 90_000)
    assert inspect_media(file.getvalue()) == ("image/jpeg", (640, 480))


def test_line_breaks_in_base64() -> None:
    data = make_file("PNG")
    assert read_base64(base64.encodebytes(data).decode(), "here").data == data


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("file:///etc/passwd", "expected data:image/png;base64,…"),
        ("ftp://example.com/a.png", "expected data:image/png;base64,…"),
        ("data:image/png,abc", "expected data:image/png;base64,…"),
        ("/etc/passwd", "expected data:image/png;base64,…"),
        ("", "expected data:image/png;base64,…"),
        ("data:image/png;base64,", "this is no PNG, JPEG, WebP or GIF file"),
        ("data:image/png;base64,%%%", "this is not base64"),
        ("data:image/png;base64,YQ", "this is not base64"),
        ("data:image/png;base64,ü", "this is not base64"),
        (f"data:image/png;base64,{encode(b'<svg/>')}", "this is no PNG"),
    ],
)
def test_wrong_ones(address: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_data_uri(address, "messages[0].content[1].image_url")
    assert str(caught.value).startswith("messages[0].content[1].image_url: " + said)
    assert caught.value.param == "messages[0].content[1].image_url"


def test_an_address_is_left_to_be_fetched() -> None:
    for address in ("https://example.com/a.png", "HTTP://example.com/a.png"):
        image = read_data_uri(address, "here", "low")
        assert image == Media(b"", "", detail="low", address=address)
        message = ChatMessage("user", "", media=(PICTURE, image))
        assert has_addresses([message]) and list_media([message]) == [PICTURE, image]
    assert not has_addresses([ChatMessage("user", "", media=(PICTURE,))])


def test_a_header_of_too_many_pixels() -> None:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 8192, 8193)
    assert MAX_PIXELS < 8192 * 8193
    with pytest.raises(RequestError, match="the image has 8192 × 8193 pixels"):
        read_base64(encode(header), "here")


def test_damaged_files_are_images_or_refused() -> None:
    chance = random.Random(7)
    files = [make_file(kind) for kind in FORMATS]
    for number in range(4000):
        data = bytearray(files[number % len(files)])
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = data[: chance.randrange(len(data) + 1)]
        try:
            image = read_base64(encode(bytes(data)), "here")
        except RequestError:
            continue
        assert image.data == data and image.kind.startswith("image/")


@given(st.lists(st.text(max_size=5) | st.just(PICTURE), max_size=8))
def test_parts_come_back_as_they_were(parts: list[str | Media]) -> None:
    text, images = join_parts(parts)
    message = ChatMessage("user", text, media=images)
    assert [image.data for image in images] == [PICTURE.data] * parts.count(PICTURE)
    whole = ["\x1f" if isinstance(part, Media) else part for part in message.parts]
    given_ = ["\x1f" if isinstance(part, Media) else part for part in parts]
    for sign in ("\n", ""):  # texts that follow each other are joined by a line break
        assert "".join(whole).replace("\n", "") == sign.join(given_).replace("\n", "")


def test_places() -> None:
    text, images = join_parts(["one", "two", PICTURE, PICTURE, "three"])
    assert (text, [image.at for image in images]) == ("one\ntwothree", [7, 7])
    message = ChatMessage("user", text, media=images)
    assert [p if isinstance(p, str) else p.at for p in message.parts] == ["one\ntwo", 7, 7, "three"]


def test_only_users_and_tools_show_images() -> None:
    assert make_message("tool", ["text", PICTURE], "here").media
    for role in ("system", "assistant"):
        with pytest.raises(Unsupported, match=f"here: a message of the {role} holds no images"):
            make_message(role, ["text", PICTURE], "here")
