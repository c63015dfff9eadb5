"""Prompts with images: decoded by Pillow, and put in their places by the model's processor."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps

from servekit.engines.api.base import MediaPrompt
from servekit.engines.text.chat_template import SENTINEL, ChatTemplate
from servekit.engines.text.tokenizer import begins_text
from servekit.errors import RequestError, Unsupported, describe_error
from servekit.protocol.messages import ChatMessage, Media

#: Most pixels of an image, as the gateway has read its header, and of a conversation's images. A
#: pixel takes three bytes.
MAX_PIXELS = 2**26
MAX_PIXELS_TOGETHER = 2**28
#: Pillow's names of the formats. A JPEG of several pictures, as cameras write it, is its first.
_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


class MediaEncoder:
    """The encoder of conversations with images for one model; any thread may use it.

    One conversation is encoded at a time, as its decoded images may take a gigabyte.
    """

    def __init__(self, processor: Any, template: ChatTemplate) -> None:
        """Raises RequestError if the chat template has no place for images."""
        self._processor = processor
        self._template = template
        self._lock = threading.Lock()
        self._marks = self._find_marks()
        if not self._marks:
            raise Unsupported("its chat template has no place for images", param="messages")

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> MediaPrompt:
        """Return the token ids and the images of a conversation, as `Engine.encode_media`."""
        images = [image for message in messages for image in message.media]
        with self._lock:
            text = self._template.render(messages, tools, template, continues)
            self._check_marks(text, len(images))
            pictures = decode_images(images)
            try:
                return self._make_prompt(text, pictures)
            except (MemoryError, RequestError):
                raise
            except Exception as error:  # processors raise anything for a size that they dislike
                why = f"the model's processor refuses these images: {describe_error(error)}"
                raise RequestError(f"messages: {why}", param="messages") from error

    def _make_prompt(self, text: str, pictures: list[Any]) -> MediaPrompt:
        """Return the prompt of a rendered conversation and its decoded images."""
        asked: dict[str, Any] = {"return_tensors": "pt"}
        if begins_text(self._processor.tokenizer, text):
            asked["add_special_tokens"] = False
        made = dict(self._processor(text=[text], images=[pictures], **asked))
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)  # of ones
        return MediaPrompt(ids, made)

    def _find_marks(self) -> list[str]:
        """Return the added tokens that the template writes for each image, and only for images."""
        image = Media(b"", "image/png")
        turns = [ChatMessage("user", SENTINEL, media=(image,) * count) for count in range(3)]
        texts = [self._template.render([turn]) for turn in turns]
        added: list[str] = list(self._processor.tokenizer.get_added_vocab())
        return [mark for mark in added if [text.count(mark) for text in texts] == [0, 1, 2]]

    def _check_marks(self, text: str, images: int) -> None:
        """Raise RequestError unless the rendered text has one place for each image."""
        for mark in self._marks:
            places = text.count(mark)
            if places > images:
                raise RequestError(
                    f"messages: a text has {mark}, which stands for an image in this model's"
                    " prompts; leave it out",
                    param="messages",
                )
            if places < images:
                raise RequestError(
                    f"messages: the model's chat template has places for {places} of these"
                    f" {images} images only; images of tools may have to be sent by the user",
                    param="messages",
                )


def make_probes() -> list[ChatMessage]:
    """Return messages with a picture each, to find out whether and how a model reads them."""
    return [_make_probe("What is this?", "red", (64, 48)), _make_probe("And?", "blue", (48, 96))]


def _make_probe(text: str, colour: str, size: tuple[int, int]) -> ChatMessage:
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return ChatMessage("user", text, media=(Media(file.getvalue(), "image/png"),))


def decode_images(images: Sequence[Media]) -> list[Any]:
    """Return the images in RGB and upright, as the library loads them. Raises RequestError."""
    opened = [_open_image(image, place) for place, image in enumerate(images, 1)]
    together = sum(one.width * one.height for one in opened)
    if together > MAX_PIXELS_TOGETHER:
        raise RequestError(
            f"messages: the images have {together} pixels together, and {MAX_PIXELS_TOGETHER} are"
            " allowed",
            param="messages",
        )
    return [_decode_image(one, place) for place, one in enumerate(opened, 1)]


def _open_image(image: Media, place: int) -> Any:
    """Read an image's header and refuse what is too large or moves; nothing is decoded yet."""
    try:
        opened = Pillow.open(io.BytesIO(image.data), formats=[_FORMATS[image.kind]])
        moves = image.kind != "image/jpeg" and getattr(opened, "is_animated", False)
    except Exception as error:  # of damaged data a decoder may raise anything
        raise _undecodable(place, error) from error
    if opened.width * opened.height > MAX_PIXELS:
        raise RequestError(
            f"messages: image {place} has {opened.width} × {opened.height} pixels, and"
            f" {MAX_PIXELS} are allowed",
            param="messages",
        )
    if moves:
        raise RequestError(
            f"messages: image {place} is animated; send a single picture of it", param="messages"
        )
    return opened


def _decode_image(opened: Any, place: int) -> Any:
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # of damaged data a decoder may raise anything
        raise _undecodable(place, error) from error


def _undecodable(place: int, error: Exception) -> RequestError:
    why = describe_error(error)
    return RequestError(f"messages: image {place} cannot be decoded: {why}", param="messages")
