"""A model's vocabulary as llama.cpp has it, of tiny models of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.llamacpp.vocabulary import Vocabulary
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.llamacpp import making
from tests.unit.engines.origins import SPECIAL, write_tiny_gguf


def opened(path: Path) -> Iterator[Vocabulary]:
    engine = llamacpp(path)
    yield engine.engine.codec._vocabulary
    engine.close()


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """Bytes, two pieces, and added tokens that are no control tokens."""
    path = tmp_path_factory.mktemp("bytes") / "tiny.gguf"
    yield from opened(write_tiny_gguf(path, float32=True, added=(["<think>", "x" * 300], 4)))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    yield from opened(making.write_sentencepiece(tmp_path_factory.mktemp("pieces") / "sp.gguf"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    path = tmp_path_factory.mktemp("words") / "bert.gguf"
    making.write_tiny_bert(path)
    yield from opened(path)


def test_text_becomes_tokens_with_or_without_those_of_its_ends(words: Vocabulary) -> None:
    assert words.tokenize("the sea", special=False) == [4, 5]
    assert words.tokenize("the sea", special=True) == [2, 4, 5, 3]
    assert words.tokenize("", special=False) == []


def test_a_text_of_any_length_is_read(bytes_: Vocabulary) -> None:
    ids = bytes_.tokenize("\x00é" * 5000, special=False)
    assert b"".join(map(bytes_.piece, ids)) == ("\x00é" * 5000).encode()
    assert bytes_.tokenize("\ud800", special=False) == bytes_.tokenize("?", special=False)
    assert bytes_.tokenize("<|im_end|>", special=False) == [2], "special tokens are recognised"


def test_a_piece_may_be_longer_than_the_first_room_for_it(bytes_: Vocabulary) -> None:
    assert bytes_.piece(bytes_.size - 1) == b"x" * 300
    assert bytes_.piece(bytes_.size - 1) == b"x" * 300, "again, from memory"
    assert bytes_.piece(1) == b"<|im_start|>"


def test_padding_of_a_vocabulary_has_no_bytes(tmp_path: Path) -> None:
    unused = ["[PAD300]", "[PAD301]"]
    for vocabulary in opened(write_tiny_gguf(tmp_path / "tiny.gguf", added=(unused, 5))):
        assert vocabulary.piece(vocabulary.size - 1) == b""
        assert vocabulary._mark_special(vocabulary.size - 1) == b""


def test_the_space_of_a_piece_stays(bytes_: Vocabulary, pieces: Vocabulary) -> None:
    assert [bytes_.piece(token) for token in bytes_.tokenize(" t", special=False)] == [b" t"]
    assert pieces.piece(pieces.tokenize("the", special=False)[0]) == b" the"


def test_special_tokens_are_told_from_those_that_were_only_added(
    bytes_: Vocabulary, pieces: Vocabulary
) -> None:
    assert bytes_.special == dict(enumerate(SPECIAL))
    more = bytes_.added.items() - bytes_.special.items()
    assert sorted(text for _, text in more) == ["<think>", "x" * 300]
    assert pieces.special == {0: "<unk>", 1: "<s>", 2: "</s>"}


def test_the_ends_of_a_completion_and_the_names_for_templates(
    bytes_: Vocabulary, words: Vocabulary
) -> None:
    assert {0, 2} >= bytes_.eos >= {2}
    assert bytes_.special_tokens_map == {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    assert words.special_tokens_map["pad_token"] == "[PAD]"


def test_a_first_space_is_added_by_sentencepiece_alone(
    bytes_: Vocabulary, pieces: Vocabulary
) -> None:
    assert pieces.drops_first_space and not bytes_.drops_first_space


def test_how_many_bytes_a_token_may_stand_for(
    bytes_: Vocabulary, pieces: Vocabulary, words: Vocabulary
) -> None:
    assert bytes_.token_bytes == 300
    assert pieces.token_bytes >= len("▁the".encode())
    assert words.token_bytes == 0, "a word that is not known may be of any length"


def test_the_texts_of_a_pair_are_separated_as_the_model_was_trained(
    tmp_path: Path, words: Vocabulary, bytes_: Vocabulary
) -> None:
    assert words.pair_tokens == ([2], [3], [])
    assert bytes_.pair_tokens == ([], [], [])
    words.check_pairs()
    stated: dict[str, Any] = {
        "tokenizer__ggml__add_bos_token": True,
        "tokenizer__ggml__add_eos_token": True,
        "tokenizer__ggml__add_sep_token": True,
        "tokenizer__ggml__seperator_token_id": 0,
    }
    path = write_tiny_gguf(tmp_path / "tiny.gguf", float32=True, **stated)
    for vocabulary in opened(path):
        assert vocabulary.pair_tokens == ([1], [2, 0], [2])


def test_metadata_is_text_or_empty(bytes_: Vocabulary) -> None:
    assert bytes_.read_metadata("general.name") == "tiny"
    assert bytes_.read_metadata("no.such.key") == ""


def test_no_text_is_a_special_token_in_a_grammar(bytes_: Vocabulary) -> None:
    think = next(token for token, text in bytes_.added.items() if text == "<think>")
    assert bytes_._mark_special(2) == b"\xff<|im_end|>"
    assert bytes_._mark_special(think) == b"\xff<think>"
    assert bytes_._mark_special(bytes_.size - 1) == b"x" * 300, "it is no tag"
    assert bytes_._mark_special(bytes_.tokenize("a", special=False)[0]) == b"a"
    assert bytes_.for_grammars().vocab_size == bytes_.size
