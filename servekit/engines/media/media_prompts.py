"""Prompts with images and recordings: decoded, and put in their places by the model's processor."""

from __future__ import annotations

import inspect
import io
import math
import threading
import wave
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from servekit.engines.api.base import MediaPrompt
from servekit.engines.media.image_bounds import TooCostly, bound_exif, check_cost
from servekit.engines.media.recording import MAX_AUDIO_S, Samples, decode_recording
from servekit.engines.text.chat_template import SENTINEL, ChatTemplate
from servekit.engines.text.tokenizer import begins_text
from servekit.errors import RequestError, Unsupported, describe_error
from servekit.protocol.messages import ChatMessage, Media
from servekit.protocol.tasks import NOUNS
from servekit.protocol.types import MODALITIES, Modality

#: Most pixels of an image, as the gateway has read its header, and of a conversation's images. A
#: pixel takes three bytes.
MAX_PIXELS = 2**26
MAX_PIXELS_TOGETHER = 2**28
#: How many times longer than the other a side may be. Processors scale the shorter one to hundreds
#: of pixels: a line of 1 × 60,000 pixels becomes an image of gigabytes.
MAX_RATIO = 100
#: Pillow's names of the formats. A JPEG of several pictures, as cameras write it, is its first.
_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
_ARTICLES: dict[Modality, str] = {"images": "an image", "audio": "a recording"}
_KINDS: dict[Modality, str] = {"images": "image/png", "audio": "audio/wav"}
bound_exif()


class MediaEncoder:
    """The encoder of conversations with images and recordings for one model.

    Any thread may use it. One conversation is encoded at a time, as its decoded images may take a
    gigabyte. `modalities` are those that its processor reads, and that its chat template has a
    place for.
    """

    def __init__(
        self, processor: Any, template: ChatTemplate, max_audio_s: float = MAX_AUDIO_S
    ) -> None:
        """Raises RequestError if the chat template has no place for what the processor reads."""
        self._processor = processor
        self._template = template
        self._max_audio_s = max_audio_s
        self._lock = threading.Lock()
        parts = list_modalities(processor)
        found = {one: self._find_marks(_KINDS[one]) for one in parts}
        self._marks = {modality: marks for modality, marks in found.items() if marks}
        if not self._marks:
            nouns = " or ".join(NOUNS[one] for one in parts)
            raise Unsupported(f"its chat template has no place for {nouns}", param="messages")
        extractor = find_extractor(processor)
        self._rate = int(getattr(extractor, "sampling_rate", 0))
        self._most_samples = count_most_samples(extractor)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return tuple(self._marks)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> MediaPrompt:
        """Return the token ids and the media of a conversation, as `Engine.encode_media`."""
        media = [one for message in messages for one in message.media]
        images = [one for one in media if one.modality == "images"]
        recordings = [one for one in media if one.modality == "audio"]
        with self._lock:
            text = self._template.render(messages, tools, template, continues)
            check_modalities(media, self._marks)
            self._check_marks(text, {"images": len(images), "audio": len(recordings)})
            pictures = decode_images(images)
            sounds = decode_recordings(
                recordings, self._rate, self._max_audio_s, self._most_samples
            )
            try:
                return self._make_prompt(text, pictures, sounds)
            except (MemoryError, RequestError):
                raise
            except Exception as error:  # processors raise anything for a size that they dislike
                nouns = "images" if images else "recordings"
                why = f"the model's processor refuses these {nouns}: {describe_error(error)}"
                raise RequestError(f"messages: {why}", param="messages") from error

    def _make_prompt(self, text: str, pictures: list[Any], sounds: list[Samples]) -> MediaPrompt:
        """Return the prompt of a rendered conversation and its decoded media."""
        asked: dict[str, Any] = {"return_tensors": "pt"}
        if begins_text(self._processor.tokenizer, text):
            asked["add_special_tokens"] = False
        if pictures:
            asked["images"] = [pictures]
        if sounds:
            asked |= {"audio": sounds, "sampling_rate": self._rate}
        made = dict(self._processor(text=[text], **asked))
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)  # of ones
        return MediaPrompt(ids, made)

    def _find_marks(self, kind: str) -> list[str]:
        """Return the added tokens that the template writes for each medium, and only for it."""
        one = Media(b"", kind)
        turns = [ChatMessage("user", SENTINEL, media=(one,) * count) for count in range(3)]
        texts = [self._template.render([turn]) for turn in turns]
        added: list[str] = list(self._processor.tokenizer.get_added_vocab())
        return [mark for mark in added if [text.count(mark) for text in texts] == [0, 1, 2]]

    def _check_marks(self, text: str, counts: Mapping[Modality, int]) -> None:
        """Raise RequestError unless the rendered text has one place for each medium."""
        for modality, marks in self._marks.items():
            for mark in marks:
                _check_mark(mark, text.count(mark), counts[modality], modality)


def _check_mark(mark: str, places: int, count: int, modality: Modality) -> None:
    if places > count:
        raise RequestError(
            f"messages: a text has {mark}, which stands for {_ARTICLES[modality]} in this model's"
            " prompts; leave it out",
            param="messages",
        )
    check_places(places, count, modality)


def check_places(places: int, count: int, modality: Modality) -> None:
    """Raise RequestError if the chat template left media out."""
    if places < count:
        noun = NOUNS[modality]
        raise RequestError(
            f"messages: the model's chat template has places for {places} of these {count} {noun}"
            f" only; {noun} of tools may have to be sent by the user",
            param="messages",
        )


def find_extractor(processor: Any) -> Any | None:
    """Return the part of a processor that reads recordings; None if there is none."""
    for name in ("feature_extractor", "audio_processor"):
        if hasattr(found := getattr(processor, name, None), "sampling_rate"):
            return found
    return None


def count_most_samples(extractor: Any) -> int:
    """Return the most samples of a recording, as the library would cut off the rest; 0: any number.

    Whisper's extractor states them; that of Gemma 3n has them as the default of an argument.
    """
    if stated := getattr(extractor, "n_samples", 0):
        return int(stated)
    asked = inspect.signature(type(extractor).__call__).parameters
    cuts, most = asked.get("truncation"), asked.get("max_length")
    if cuts is None or most is None or cuts.default is not True:
        return 0
    return most.default if isinstance(most.default, int) else 0


def list_modalities(processor: Any) -> list[Modality]:
    """Return what a processor reads beside text."""
    parts = {
        "images": getattr(processor, "image_processor", None),
        "audio": find_extractor(processor),
    }
    return [one for one in MODALITIES if parts[one] is not None]


def check_modalities(media: Iterable[Media], known: Collection[Modality]) -> None:
    """Raise Unsupported for media that the model does not read."""
    for modality in {one.modality for one in media}.difference(known):
        raise Unsupported(f"messages: it takes no {NOUNS[modality]}", param="messages")


def make_probes(modality: Modality) -> list[ChatMessage]:
    """Return messages with one each, to find out whether and how a model reads them."""
    if modality == "audio":
        return [_say("What is this?", _make_tone(440, 1.0)), _say("And?", _make_tone(220, 0.6))]
    return [
        _say("What is this?", _make_picture("red", (64, 48))),
        _say("And?", _make_picture("blue", (48, 96))),
    ]


def _say(text: str, one: Media) -> ChatMessage:
    return ChatMessage("user", text, media=(one,))


def _make_picture(colour: str, size: tuple[int, int]) -> Media:
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return Media(file.getvalue(), "image/png")


def _make_tone(hertz: int, duration_s: float, rate: int = 16_000) -> Media:
    file = io.BytesIO()
    times = np.arange(int(duration_s * rate)) / rate
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((8000 * np.sin(2 * math.pi * hertz * times)).astype("<i2").tobytes())
    return Media(file.getvalue(), "audio/wav")


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


def decode_recordings(
    recordings: Sequence[Media], rate: int, max_audio_s: float, most_samples: int = 0
) -> list[Samples]:
    """Return the samples of recordings, as long together as a single one may be.

    `most_samples` is what the model hears of one; 0: any number. Raises RequestError.
    """
    decoded: list[Samples] = []
    left_s = max_audio_s
    for place, one in enumerate(recordings, 1):
        try:
            decoded.append(decode_recording(one.data, rate, left_s))
        except RequestError as error:
            said = error.message.removeprefix("file: ")
            raise type(error)(f"messages: recording {place}: {said}", param="messages") from error
        if 0 < most_samples < len(decoded[-1]):
            raise RequestError(
                f"messages: recording {place} is longer than the {most_samples / rate:g} s that the"
                " model hears; send it in parts",
                param="messages",
            )
        left_s -= len(decoded[-1]) / rate
    return decoded


def _open_image(image: Media, place: int) -> Any:
    """Read an image's header and refuse what is too large or moves; nothing is decoded yet."""
    try:
        check_cost(image.data, image.kind)
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
    if max(opened.size) > MAX_RATIO * min(opened.size):
        raise RequestError(
            f"messages: image {place} has {opened.width} × {opened.height} pixels, and no side may"
            f" be more than {MAX_RATIO} times as long as the other",
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
    why = str(error) if isinstance(error, TooCostly) else describe_error(error)
    return RequestError(f"messages: image {place} cannot be decoded: {why}", param="messages")
