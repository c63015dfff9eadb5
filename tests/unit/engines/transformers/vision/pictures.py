"""Pictures, conversations with them, and what the library's own `generate` says to these."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from PIL import ImageDraw

from servekit.engines.media.recording import decode_recording
from servekit.engines.transformers.vision.processor import load_processor
from servekit.protocol.messages import ChatMessage, Media
from tests.unit.engines.harness import make_spec
from tests.unit.engines.seeing_model import LIBRARY

KINDS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def paint(colour: str, size: tuple[int, int] = (60, 40), kind: str = "PNG") -> Media:
    picture = Pillow.new("RGB", size, colour)
    ImageDraw.Draw(picture).ellipse((2, 2, size[0] // 2, size[1] - 2), "white")
    file = io.BytesIO()
    picture.save(file, kind)
    return Media(file.getvalue(), KINDS[kind])


def say(role: str, *parts: str | Media) -> ChatMessage:
    text, images = "", []
    for part in parts:
        if isinstance(part, Media):
            images.append(Media(part.data, part.kind, at=len(text)))
        else:
            text += part
    return ChatMessage(role, text, media=tuple(images))


RED, BLUE, WIDE = paint("red"), paint("blue", kind="JPEG"), paint("green", (100, 30), "WEBP")
ONE = [say("user", RED, "What is this?")]
OTHER = [say("user", BLUE, "What is this?")]
HISTORY = [
    say("user", "Look ", RED, " and ", WIDE, " here."),
    say("assistant", "Fine."),
    say("user", "And now?", BLUE),
]
NONE = [say("user", "What is this?")]


class Reference:
    """Plain transformers: the model, and the processor that servekit loads."""

    def __init__(self, folder: Path, **loading: Any) -> None:
        """Load the model in float32 on the CPU, if `loading` does not say otherwise."""
        self.processor: Any = load_processor(folder, make_spec(folder))
        known = {"dtype": torch.float32} | loading
        made = LIBRARY.AutoModelForMultimodalLM.from_pretrained(folder, **known)
        self.model = made.eval()
        self._answers: dict[Any, tuple[list[int], list[int]]] = {}

    def ask(self, messages: list[ChatMessage], tokens: int) -> tuple[list[int], list[int]]:
        """The ids of the prompt, and those of the greedy answer; made once for all tests."""
        key = (tuple(messages), tokens)
        if key not in self._answers:
            self._answers[key] = self.generate(messages, tokens)
        return self._answers[key]

    def generate(self, messages: list[ChatMessage], tokens: int) -> tuple[list[int], list[int]]:
        asked = self.processor.apply_chat_template(
            [
                {"role": one.role, "content": [_part(part) for part in one.parts]}
                for one in messages
            ],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self.model.device)
        whole = self.model.generate(
            **asked, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        count = asked["input_ids"].shape[1]
        return whole[:count], whole[count:]


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.modality == "audio":
        return {"type": "audio", "audio": decode_recording(part.data, 16_000, 60.0)}
    return {"type": "image", "image": Pillow.open(io.BytesIO(part.data))}
