"""Tokens as bytes: joined, they are the text's."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from servekit.engines.text.token_bytes import Pieces
from tests.unit.engines.harness import CORPUS, Harness, byte_level_tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: ▁ for spaces, and bytes for what it does not know."""
    words = ["▁The", "▁quick", "▁brown", "fox", "▁", *"Thequickbrownfx"]
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocabulary += [(word, -float(10 - len(word))) for word in dict.fromkeys(words)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    make: Any = PreTrainedTokenizerFast  # untyped in the library
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, unk_token="<unk>")
    return fast


@pytest.mark.parametrize("text", CORPUS)
def test_the_bytes_of_all_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    pieces = Pieces(tokenizer)
    ids = tokenizer(text)["input_ids"]
    assert b"".join(pieces.find_bytes(token) for token in ids) == text.encode()


def test_sentencepiece_has_spaces_and_bytes() -> None:
    tokenizer = sentencepiece_like()
    pieces = Pieces(tokenizer)
    vocabulary = tokenizer.get_vocab()
    assert pieces.find_bytes(vocabulary["<0x0A>"]) == b"\n"
    ids = tokenizer("The quick é fox")["input_ids"]
    assert b"".join(pieces.find_bytes(token) for token in ids) == " The quick é fox".encode()


def test_special_tokens_are_their_names_and_padding_is_nothing() -> None:
    pieces = Pieces(byte_level_tokenizer())
    assert pieces.find_bytes(2) == b"<|im_end|>"
    assert pieces.find_bytes(100_000) == b""


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2s_pieces_are_those_that_grammars_are_made_of(smol: Harness) -> None:
    assert smol.engine._grammars is not None
    theirs = smol.engine._grammars._tokenizer
    ours = smol.engine._pieces
    for token in range(49152):
        assert ours.find_bytes(token) == theirs.decode_bytes([token]), token
    assert set(theirs.eos_tokens) == smol.engine._eos
