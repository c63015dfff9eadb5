"""The ollama package: chat, generate, what it is told of the model, pictures."""

from __future__ import annotations

import ollama
from report import EYES, KEY, MEDIA_TOKENS, MODEL, PICTURE, QUESTION, URL, check, encode

client = ollama.Client(URL, headers={"Authorization": f"Bearer {KEY}"})
ASKED = [{"role": "user", "content": QUESTION}]
SHORT = {"num_predict": 16}


def chat() -> None:
    assert client.chat(MODEL, ASKED, options=SHORT).message.content


def stream() -> None:
    pieces = list(client.chat(MODEL, ASKED, options=SHORT, stream=True))
    assert pieces[-1].done and any(piece.message.content for piece in pieces)


def generate() -> None:
    assert client.generate(MODEL, QUESTION, options=SHORT).response


def show() -> None:
    told = client.show(MODEL)
    assert told.details.quantization_level and told.details.parameter_size, told
    assert "completion" in told.capabilities, told


def ps() -> None:
    assert [one.model for one in client.ps().models]
    assert [one.model for one in client.list().models]


def structured() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    made = client.chat(MODEL, ASKED, format=schema, options={"num_predict": 40})
    assert '"n"' in made.message.content, made


def picture() -> None:
    """As a path, as bytes and as base64, whole and streamed."""
    assert "vision" in client.show(EYES).capabilities
    short = {"num_predict": 12, "temperature": 0}
    for image in (PICTURE, PICTURE.read_bytes(), encode(PICTURE)):
        turns = [{"role": "user", "content": "What is this?", "images": [image]}]
        whole = client.chat(EYES, turns, options=short)
        assert whole.prompt_eval_count > MEDIA_TOKENS, whole
        pieces = client.chat(EYES, turns, options=short, stream=True)
        text = "".join(piece.message.content or "" for piece in pieces)
        assert text and text == whole.message.content, (text, whole)
        made = client.generate(EYES, "What is this?", images=[image], options=short)
        assert made.response and made.prompt_eval_count > MEDIA_TOKENS, made


for test in (chat, stream, generate, show, ps, structured):
    check(test.__name__, test)
if EYES:
    check("picture", picture)
