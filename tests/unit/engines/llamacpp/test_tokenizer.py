"""llama.cpp's tokenizer: the ids that `transformers` has for the same model, and text without
broken characters."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.api.base import TooManyTokens
from servekit.engines.llamacpp.tokenizer import LlamaCodec
from servekit.engines.text.tool_format_detection import find_dialect
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Grammar
from tests.unit.engines.conftest import SMOLLM2, llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.llamacpp import making

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Größe,\tnaïve café\n\n\n",
    "東京 北京 서울 Москва עברית हिन्दी",
    "🎉🚀👩‍👩‍👧 and 1234567890 1,000.50",
    "<|im_start|>user\nHi<|im_end|>\n",
    "def f(x):\n    return x + 1  # don't",
    "",
    " ",
]


@pytest.fixture(scope="module")
def codec(gguf_engine: Harness) -> LlamaCodec:
    found: LlamaCodec = gguf_engine.engine.codec
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(codec: LlamaCodec, text: str) -> None:
    markers = {"<|im_start|>", "<|im_end|>"}
    assert decoded(codec, codec.encode(text), markers) == text


def decoded(codec: LlamaCodec, ids: list[int], markers: Any = ()) -> str:
    """Token by token."""
    decoder = codec.decoder(markers)
    return "".join(decoder.push([token]) for token in ids) + decoder.flush()


def test_a_character_is_never_split(codec: LlamaCodec) -> None:
    drawn = random.Random(1)
    ids = codec.encode("👩‍👩‍👧東é" * 20)
    for _ in range(20):
        decoder, text, rest = codec.decoder(), "", ids
        while rest:
            count = drawn.randrange(1, 5)
            new = decoder.push(rest[:count])
            assert "\ufffd" not in new
            text, rest = text + new, rest[count:]
        assert text == "👩‍👩‍👧東é" * 20
    begun = codec.decoder()
    assert begun.push(codec.encode("é")[:1]) == ""
    assert begun.flush() == ""


def test_special_tokens_have_no_text_unless_asked_for(codec: LlamaCodec) -> None:
    ids = codec.encode("<|im_start|>user")
    assert ids[0] == 1
    assert decoded(codec, ids) == "user"
    assert decoded(codec, ids, {"<|im_start|>"}) == "<|im_start|>user"
    assert codec.tokens_of({"<|im_end|>", "user"}) == {"<|im_end|>": 2}


def test_a_conversation_by_the_files_template(codec: LlamaCodec) -> None:
    ids = codec.render_chat([ChatMessage("user", "Hi")])
    text = decoded(codec, ids, {"<|im_start|>", "<|im_end|>"})
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(TooManyTokens):
        codec.render_chat([ChatMessage("user", "word " * 20_000)], limit=256)


def test_a_model_without_a_template(codec: LlamaCodec) -> None:
    bare = LlamaCodec(codec._vocabulary, "")
    assert not bare.chat
    with pytest.raises(RequestError, match="no chat template"):
        bare.render_chat([ChatMessage("user", "Hi")])


def test_how_the_model_writes_calls_is_told_by_its_template(codec: LlamaCodec) -> None:
    source = (Path(__file__).parents[1] / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    qwen = LlamaCodec(codec._vocabulary, source)
    found = find_dialect(qwen.template)
    assert found.tools == "hermes"
    assert (found.think_begin, found.think_end) == ("<think>", "</think>")
    assert qwen.template.takes_tools


def test_sentencepieces_first_space_is_not_the_texts(tmp_path: Path) -> None:
    engine = llamacpp(making.write_sentencepiece(tmp_path / "sp.gguf"))
    try:
        codec: LlamaCodec = engine.engine.codec
        pieces = codec._vocabulary.piece
        ids = codec.encode("the sea é")
        assert [pieces(token) for token in ids] == [
            *(b"<s>", b" the", b" sea", b" ", b"\xc3", b"\xa9"),
        ]
        assert decoded(codec, ids) == "the sea é"
        assert decoded(codec, ids[2:]) == "sea é"
        grammar = Grammar("regex", "the (sea )?é")
        job = engine.submit("the", grammar=grammar, temperature=1.0, seed=1)
        assert engine.text(job) in ("the é", "the sea é")
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_no_token_stands_for_more_bytes_than_is_said(
    tmp_path: Path, gguf_file: Path, kind: str
) -> None:
    path = gguf_file if kind == "bytes" else making.write_sentencepiece(tmp_path / "sp.gguf")
    engine = llamacpp(path)
    try:
        codec: LlamaCodec = engine.engine.codec
        texts = [
            *TEXTS,
            "▁the▁sea▁▁" * 9,
            "the sea" * 9,
            "<|im_end|>" * 9,
            "\x00\x01",
            "\u0344" * 9,
        ]
        assert codec.token_bytes() > 0
        for text in texts:
            size_bytes = sum(len(part.encode()) for part in text.split())
            assert len(codec.encode(text)) * codec.token_bytes() >= size_bytes
    finally:
        engine.close()


def test_where_bytes_may_vanish_nothing_is_said_of_tokens(
    codec: LlamaCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = codec._vocabulary.piece
    monkeypatch.setattr(codec._vocabulary, "piece", lambda token: piece(token).replace(b"z", b""))
    assert codec.token_bytes() == 0


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def smol_gguf() -> Iterator[Harness]:
    shared = llamacpp(SMOLLM2)
    yield shared
    shared.close()


@pytest.mark.lane("models")
@pytest.mark.model
def test_ids_are_those_of_the_converted_model(smol_gguf: Harness, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    codec: LlamaCodec = smol_gguf.engine.codec
    for text in [*TEXTS, json.dumps({"a": [1, 2.5, None]}), "x" * 300, "\r\n\u200b"]:
        assert codec.encode(text) == tokenizer(text)["input_ids"], text
    chat = [{"role": "user", "content": "Größe?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert codec.render_chat([ChatMessage("user", "Größe?")]) == expected
    assert smol_gguf.engine._eos >= {tokenizer.eos_token_id}


@pytest.mark.lane("models")
@pytest.mark.model
def test_digits_are_cut_off_as_the_models_own_tokenizer_cuts_them(smol_gguf: Harness) -> None:
    """What the conversion to `transformers` loses: white space before a digit is one token."""
    codec: LlamaCodec = smol_gguf.engine.codec
    piece = codec._vocabulary.piece
    assert [piece(token) for token in codec.encode("[\n    12]")] == [
        *(b"[", b"\n    ", b"1", b"2", b"]"),
    ]
