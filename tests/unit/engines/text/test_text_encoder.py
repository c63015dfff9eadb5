"""The library that tokenises: the fastest whose ids are the tokenizer's own, and no other."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_python import PreTrainedTokenizer

from servekit.engines.text.probe_texts import make_probe_texts
from servekit.engines.text.text_encoder import TextEncoder
from servekit.engines.text.tokenizer import TokenizerCodec
from tests.polling import poll
from tests.unit.engines.harness import byte_level_tokenizer, write_tiny_llama
from tests.unit.engines.text.test_tokenizer import sentencepiece_like


def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, whole words or their pieces, tokens at both ends."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh.,", "the", "##e", "##a"]
    made = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends: Any = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    make: Any = PreTrainedTokenizerFast  # untyped in the library
    return make(tokenizer_object=made, unk_token="[UNK]")  # type: ignore[no-any-return]


def unigram() -> PreTrainedTokenizerFast:
    """T5's kind."""
    scores = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("th", -3.0), ("▁a", -2.5)]
    made = Tokenizer(models.Unigram([*scores, *((one, -5.0) for one in "abcdefghte")], 0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=made, unk_token="<unk>")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def proven(tokenizer: Any) -> TextEncoder:
    encoder = TextEncoder(tokenizer)
    encoder.prove_libraries()
    return encoder


BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL.chat_template = "<|im_start|> {{ messages }} <|im_end|>"
TOKENIZERS: dict[str, Any] = {
    "fastokens": BYTE_LEVEL,
    "tokenizers": sentencepiece_like(),
    "word pieces": word_pieces(),
    "unigram": unigram(),
}


@cache
def encoder_of(name: str) -> TextEncoder:
    return proven(TOKENIZERS[name])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_fastest_library_that_reads_a_tokenizer_is_used(name: str) -> None:
    encoder = encoder_of(name)
    assert encoder.library == ("fastokens" if name == "fastokens" else "tokenizers")
    assert encoder.quick_chars == (4096 if name == "fastokens" else 256)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=80), special=st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_text_has_the_tokenizers_own_ids(name: str, text: str, special: bool) -> None:
    tokenizer, encoder = TOKENIZERS[name], encoder_of(name)
    assert encoder.encode(text, special) == tokenizer(text, add_special_tokens=special).input_ids


def test_a_byte_without_a_token_is_left_out_as_before() -> None:
    """fastokens refuses it; in SmolLM2's vocabulary some control characters are missing."""
    stated = json.loads(BYTE_LEVEL.backend_tokenizer.to_str())
    vocabulary = stated["model"]["vocab"]
    vocabulary["another"] = vocabulary.pop("Ā")  # NUL
    model = Tokenizer.from_str(json.dumps(stated))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=model)
    with pytest.raises(ValueError, match="no token"):
        fastokens.Tokenizer.from_json_str(model.to_str()).encode("a\0b")
    encoder = proven(tokenizer)
    assert encoder.library == "fastokens"
    assert encoder.encode("a\0b", False) == tokenizer("a\0b", add_special_tokens=False).input_ids
    assert encoder.library == "fastokens"


def refusals(prove: Callable[[], None]) -> dict[str, str]:
    with capture_logs() as logs:
        prove()
    unused = [line for line in logs if line["event"] == "tokenizer_library_unused"]
    return {line["library"]: line["reason"] for line in unused}


def test_other_ids_are_noticed_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BYTE_LEVEL.backend_tokenizer.to_str()
    other = plain.replace('"use_regex":true', '"use_regex":false')
    assert other != plain
    make = fastokens.Tokenizer.from_json_str
    monkeypatch.setattr(fastokens, "Tokenizer", Lookalike(lambda text: make(other)))
    encoder = TextEncoder(BYTE_LEVEL)
    found = refusals(encoder.prove_libraries)
    assert encoder.library == "tokenizers"
    assert found.keys() == {"fastokens"} and "it gives other ids for '" in found["fastokens"]


class Lookalike:
    """A library whose tokenizers `make` returns."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.from_json_str = make


class PanicException(BaseException):
    """As pyo3 has it: no Exception."""


def test_a_panic_costs_no_request_and_retires_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fastokens.Tokenizer.from_json_str(BYTE_LEVEL.backend_tokenizer.to_str())

    class Panicking:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def encode(self, text: str, special: bool) -> Any:
            if text == "boom":
                raise PanicException("index out of bounds")
            return real.encode(text, special)

    monkeypatch.setattr(fastokens, "Tokenizer", Lookalike(lambda text: Panicking()))
    encoder = proven(BYTE_LEVEL)
    assert encoder.library == "fastokens"
    found: list[list[int]] = []
    told = refusals(lambda: found.append(encoder.encode("boom", False)))
    assert found == [BYTE_LEVEL("boom", add_special_tokens=False).input_ids]
    assert told == {"fastokens": "it has panicked"}
    assert encoder.library == "tokenizers"


def test_a_library_that_keeps_splits_of_the_last_text_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As fastokens 0.3.2 did: the white space before the first letter that differs is kept."""
    real = fastokens.Tokenizer.from_json_str(BYTE_LEVEL.backend_tokenizer.to_str())

    class Remembering:
        last = ""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def encode(self, text: str, special: bool) -> Any:
            pairs = enumerate(zip(self.last, text, strict=False))
            same = next((at for at, (old, new) in pairs if old != new), 0)
            self.last = text
            if same < 4096 or not text[same - 1 : same + 1].isspace():
                return real.encode(text, special)
            halves = real.encode(text[:same], special), real.encode(text[same:], False)
            return SimpleNamespace(ids=[0, *(id for half in halves for id in half.ids)])

    monkeypatch.setattr(fastokens, "Tokenizer", Lookalike(lambda text: Remembering()))
    encoder = TextEncoder(BYTE_LEVEL)
    found = refusals(encoder.prove_libraries)
    assert encoder.library == "tokenizers"
    assert found.keys() == {"fastokens"}


def test_a_long_text_starts_no_threads_of_the_library() -> None:
    """They poll after each text, which costs a server more than a long text gains."""
    encoder = encoder_of("fastokens")
    assert len(encoder.encode("many words " * 100_000, False)) > 100_000
    threads = [path.joinpath("comm").read_text() for path in Path("/proc/self/task").iterdir()]
    assert not [name for name in threads if name.startswith("fastokens")]


def test_it_does_without_fastokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = TextEncoder(BYTE_LEVEL)
    assert refusals(encoder.prove_libraries) == {}
    assert encoder.library == "tokenizers"
    assert encoder.encode("x", False) == BYTE_LEVEL("x", add_special_tokens=False).input_ids


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python."""

    vocab_size = 128

    def get_vocab(self) -> dict[str, int]:
        return {chr(at): at for at in range(128)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)


def test_a_tokenizer_in_python_stays_as_it_is() -> None:
    make: Any = Letters
    encoder = proven(make())
    assert encoder.library == "transformers"
    assert encoder.encode("ab", False) == [97, 98]


class Reversed(PreTrainedTokenizerFast):
    """A tokenizer that does more than its backend, as a model's own code may."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made["input_ids"] = made["input_ids"][::-1]
        return made


def test_a_tokenizer_that_does_more_than_its_backend_stays_as_it_is() -> None:
    make: Any = Reversed
    encoder = TextEncoder(make(tokenizer_object=BYTE_LEVEL.backend_tokenizer))
    assert refusals(encoder.prove_libraries).keys() == {"tokenizers"}
    assert encoder.library == "transformers"


def test_limits_of_the_file_are_not_applied() -> None:
    backend = Tokenizer.from_str(BYTE_LEVEL.backend_tokenizer.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    make: Any = PreTrainedTokenizerFast
    encoder = proven(make(tokenizer_object=backend))
    assert encoder.library == "fastokens"
    assert len(encoder.encode("a b c d e f g", False)) > 3
    assert len(encoder.encode("a", False)) == 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_threads_share_an_encoder(name: str) -> None:
    tokenizer, encoder = TOKENIZERS[name], encoder_of(name)
    source = random.Random(1)
    texts = ["".join(source.choices("abc the.,<|im_start|>é🙂", k=99)) for _ in range(200)]
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def work(at: int) -> bool:
        return bool(encoder.encode(texts[at], False) == expected[at])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, source.choices(range(200), k=2000)))


def test_a_codec_changes_its_library_in_the_background(llama: Any) -> None:
    codec = TokenizerCodec(llama)
    before = codec.encode("The quick brown fox")
    assert codec.quick_chars == 256
    codec.start_proof()
    poll("the proof", lambda: codec.quick_chars > 256)
    assert codec.encode("The quick brown fox") == before


def test_the_texts_are_the_same_each_time_and_have_all_added_tokens() -> None:
    added = [f"<tool_{number}>" for number in range(40)]
    texts = list(make_probe_texts(added))
    assert texts == list(make_probe_texts(added))
    whole = "".join(texts)
    assert all(token in whole for token in added)
    assert max(map(len, texts)) > 16_384, "long texts may be cut for several threads"
    named = {unicodedata.name(one, "").partition(" ")[0] for one in whole}
    assert named >= {
        "GREEK",
        "CYRILLIC",
        "HEBREW",
        "ARABIC",
        "DEVANAGARI",
        "TAMIL",
        "THAI",
        "TIBETAN",
    }
    assert named >= {"GEORGIAN", "HANGUL", "ETHIOPIC", "KHMER", "HIRAGANA", "CJK", "FULLWIDTH"}
    assert {*"\ufeff\0\u200d"} < {*whole}
    assert len(texts) < 1000 and len(whole) < 200_000, "a start must not take long"


class Different(PreTrainedTokenizerFast):
    """A tokenizer whose class joins pairs in another way than its backend."""

    def __call__(self, text: Any, second: Any = None, **options: Any) -> Any:
        return super().__call__(second or text, None if second is None else text, **options)


@pytest.mark.parametrize("types", [True, False])
def test_pairs_are_those_of_the_library(types: bool) -> None:
    tokenizer = word_pieces()
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    tokenizer.model_input_names = names
    slow = TextEncoder(tokenizer)
    fast = proven(tokenizer)
    assert fast.encode_pair != slow.encode_pair
    for pair in (("the", "a b"), ("", "hh"), ("hh", ""), ("the", None), ("x" * 3000, "e")):
        assert fast.encode_pair(*pair) == slow.encode_pair(*pair)
    assert bool(fast.encode_pair("the", "a").types) is types


def test_a_class_that_joins_pairs_in_its_own_way_is_left_to_it() -> None:
    made: Any = Different
    tokenizer = made(tokenizer_object=word_pieces().backend_tokenizer, unk_token="[UNK]")
    assert proven(tokenizer).encode_pair("the", "a") == TextEncoder(tokenizer).encode_pair(
        "the", "a"
    )
