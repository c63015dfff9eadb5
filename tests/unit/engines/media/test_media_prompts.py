"""Decoding of images, with what may be wrong with them, and their places in prompts."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from servekit.engines.media import media_prompts
from servekit.engines.media.media_prompts import MediaEncoder, decode_images
from servekit.engines.text.chat_template import ChatTemplate
from servekit.engines.transformers.vision.processor import load_processor
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Media, ToolCall
from tests.unit.engines.harness import make_spec
from tests.unit.engines.seeing_model import TOKENS_PER_IMAGE, write_seeing_model
from tests.unit.engines.transformers.vision.pictures import BLUE, KINDS, RED, WIDE, paint, say


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Any:
    folder = write_seeing_model(tmp_path_factory.mktemp("eyes"), tiny_model)
    return load_processor(folder, make_spec(folder))


@pytest.fixture(scope="module")
def encoder(processor: Any) -> MediaEncoder:
    return MediaEncoder(processor, ChatTemplate(processor.tokenizer))


def save(picture: Any, kind: str = "PNG", **how: Any) -> Media:
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return Media(file.getvalue(), KINDS[kind])


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_format(kind: str) -> None:
    (picture,) = decode_images([paint("red", (30, 20), kind)])
    assert (picture.size, picture.mode) == ((30, 20), "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_every_mode_becomes_colours(mode: str) -> None:
    (picture,) = decode_images([save(Pillow.new(mode, (3, 2)))])
    assert picture.mode == "RGB"


def test_a_photo_is_turned_upright() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photo = save(Pillow.new("RGB", (30, 20), "red"), "JPEG", exif=exif)
    assert decode_images([photo])[0].size == (20, 30)


def refusal(*images: Media) -> str:
    with pytest.raises(RequestError) as refused:
        decode_images(images)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    return refused.value.message


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.97])
def test_a_cut_file(kind: str, keep: float) -> None:
    whole = paint("red", (300, 200), kind)
    cut = Media(whole.data[: int(len(whole.data) * keep)], whole.kind)
    if kind == "GIF" and keep > 0.9:
        return  # Pillow shows what there is, as browsers do
    assert refusal(RED, cut).startswith("messages: image 2 cannot be decoded: ")


def test_a_damaged_file() -> None:
    for at in range(20, len(RED.data), 7):
        data = bytearray(RED.data)
        data[at] ^= 0xFF
        try:
            decode_images([Media(bytes(data), RED.kind)])
        except RequestError as error:
            assert error.param == "messages"


def test_another_format_than_it_says() -> None:
    assert "cannot be decoded" in refusal(Media(BLUE.data, "image/png"))
    assert "cannot be decoded" in refusal(Media(b"", "image/png"))


def test_a_bomb_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes whose header states gigabytes."""
    side = 60_000
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    ]
    assert "decoded" in refusal(Media(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), "image/png"))
    monkeypatch.setattr(media_prompts, "MAX_PIXELS", 599)
    assert "image 1 has 30 × 20 pixels, and 599 are allowed" in refusal(paint("red", (30, 20)))


def test_too_much_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_prompts, "MAX_PIXELS_TOGETHER", 1000)
    small = paint("red", (20, 30))
    assert len(decode_images([small])) == 1
    assert "have 1200 pixels together, and 1000 are allowed" in refusal(small, small)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_a_moving_picture(kind: str) -> None:
    frames = [Pillow.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    moving = save(frames[0], kind, save_all=True, append_images=frames[1:])
    assert refusal(moving) == "messages: image 1 is animated; send a single picture of it"


def test_places_in_the_prompt(encoder: MediaEncoder, processor: Any) -> None:
    prompt = encoder.encode_chat([say("user", "a", RED, "b", BLUE, WIDE, "c")])
    text = processor.tokenizer.decode(prompt.ids)
    image = "<image>" * TOKENS_PER_IMAGE
    assert f"user\na{image}b{image * 2}c<|im_end|>" in text
    inputs: Any = prompt.inputs
    assert len(inputs["pixel_values"]) == 3
    begun = encoder.encode_chat([*ASKED, ChatMessage("assistant", "It")], continues=True)
    assert processor.tokenizer.decode(begun.ids).endswith("assistant\nIt")


ASKED = [say("user", RED, "What is it?")]
CALL = ToolCall("call_1", "look", "{}")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_images_of_tools(encoder: MediaEncoder, processor: Any) -> None:
    """A template without tools tells them in words; the images stay in their places."""
    result = say("tool", "Here ", BLUE, " it is")
    turns = [
        ASKED[0],
        ChatMessage("assistant", "", tool_calls=(CALL,)),
        ChatMessage("tool", result.content, tool_call_id=CALL.id, media=result.media),
        say("user", "And ", RED),
    ]
    text = processor.tokenizer.decode(encoder.encode_chat(turns, [TOOL]).ids)
    image = "<image>" * TOKENS_PER_IMAGE
    assert f"Result of look: Here {image} it is\n\nAnd {image}<|im_end|>" in text
    assert f"{image}What is it?<|im_end|>" in text and '"name": "look"' in text


def test_a_template_that_leaves_out_images(processor: Any) -> None:
    tokenizer: Any = processor.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' and loop.index0 < 2 else p.text }}"
        "{% endfor %}{% endfor %}"
    )
    try:
        encoder = MediaEncoder(processor, ChatTemplate(tokenizer))
        with pytest.raises(RequestError, match="has places for 2 of these 3 images only"):
            encoder.encode_chat([say("user", RED, BLUE, WIDE)])
    finally:
        tokenizer.chat_template = before


def test_a_processor_that_refuses(encoder: MediaEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("absolute aspect ratio must be smaller than 200")

    monkeypatch.setattr(type(encoder._processor.image_processor), "preprocess", refuse)
    with pytest.raises(RequestError, match=r"refuses these images: .*must be smaller than 200"):
        encoder.encode_chat(ASKED)
