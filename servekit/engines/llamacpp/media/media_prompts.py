"""Conversations with images or recordings: decoded, and put in their places by llama.cpp.

As in llama.cpp's own server, a marker stands for each of them in the text that the chat template
renders, and libmtmd puts what belongs around an image there. A marker is drawn for each
conversation, so that no text can have it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from msgspec.structs import replace

from servekit.engines.api.base import MediaPrompt
from servekit.engines.llamacpp.media.mtmd import Bitmap, ChunkedPrompt, Projector
from servekit.engines.llamacpp.tokenizer import LlamaCodec
from servekit.engines.media.media_prompts import (
    check_modalities,
    check_places,
    decode_images,
    decode_recordings,
)
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Media
from servekit.protocol.types import MODALITIES


class MediaEncoder:
    """The encoder of conversations with images and recordings for one projector.

    Any thread may use it. One conversation is encoded at a time, as its decoded images may take a
    gigabyte.
    """

    def __init__(
        self, projector: Projector, codec: LlamaCodec, max_audio_s: float, batch_tokens: int
    ) -> None:
        """`batch_tokens` are those of one pass."""
        self._projector = projector
        self._codec = codec
        self._max_audio_s = max_audio_s
        self._batch_tokens = batch_tokens
        self._lock = threading.Lock()

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> MediaPrompt:
        """Return the token ids and the media of a conversation, as `Engine.encode_media`."""
        media = [one for message in messages for one in message.media]
        check_modalities(media, self._projector.modalities)
        marker, numbers = f"{secrets.token_hex(16)}_", count()
        marked = [_mark_media(message, marker, numbers) for message in messages]
        with self._lock:
            text = self._codec.template.render(marked, tools, template, continues)
            texts = re.split(f"{marker}([0-9]+)_", text)
            texts, places = texts[::2], [int(number) for number in texts[1::2]]
            _check_places(places, media)
            taken = self._take_media(media)
            parts: list[str | Bitmap] = [texts[0]]
            for place, after in zip(places, texts[1:], strict=True):
                parts += [taken[place], after]
            special = self._codec.completes(text)
            made = self._projector.tokenize([part for part in parts if part], special=special)
            for one in taken:
                one.free()
        self._check_chunks(made)
        return MediaPrompt(made.ids, made)

    def _take_media(self, media: Sequence[Media]) -> list[Bitmap]:
        """Decode media for llama.cpp, in their order. Raises RequestError."""
        images = decode_images([one for one in media if one.modality == "images"])
        recordings = [one for one in media if one.modality == "audio"]
        sounds = iter(decode_recordings(recordings, self._projector.sample_rate, self._max_audio_s))
        taken = []
        for one in media:
            key = hashlib.sha256(one.data).hexdigest().encode()
            if one.modality == "audio":
                taken.append(self._projector.take_recording(next(sounds), key))
            else:
                image = images.pop(0)  # whose memory is then free
                taken.append(self._projector.take_image(image.size, image.tobytes(), key))
        return taken

    def _check_chunks(self, made: ChunkedPrompt) -> None:
        largest = max((one.count for one in made.chunks if one.whole), default=0)
        if largest > self._batch_tokens:
            raise RequestError(
                f"messages: the model reads an image of {largest} tokens in one pass, and a pass"
                f" has {self._batch_tokens}; send a smaller image, or raise options.batch_tokens",
                param="messages",
            )


def _mark_media(message: ChatMessage, marker: str, numbers: Iterator[int]) -> ChatMessage:
    """Return a message with a numbered marker in its text for each of its media."""
    if not message.media:
        return message
    parts = [
        part if isinstance(part, str) else f"{marker}{next(numbers)}_" for part in message.parts
    ]
    return replace(message, content="".join(parts), media=())


def _check_places(found: Collection[int], media: Sequence[Media]) -> None:
    """Raise RequestError if the chat template left media out, of which `found` are there."""
    for modality in MODALITIES:
        asked = [number for number, one in enumerate(media) if one.modality == modality]
        check_places(sum(number in found for number in asked), len(asked), modality)
