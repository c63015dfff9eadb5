"""Parts of texts are tokenised once, and where a text is cut never shows in its ids."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from servekit.engines.text.segment_cache import SegmentCache, safe_borders
from tests.unit.engines.harness import byte_level_tokenizer
from tests.unit.engines.text.test_tokenizer import sentencepiece_like

#: Added tokens before which a text must not be cut, each for a reason of its own.
UNSAFE = [
    AddedToken("<strip>", special=True, lstrip=True),
    AddedToken("<eats>", special=True, rstrip=True),
    AddedToken("<word>", special=True, single_word=True),
    AddedToken("<later>", special=False, normalized=True),
    AddedToken("|>tail", special=True, normalized=False),
    AddedToken("<a|>", special=True, normalized=False),  # its end begins "|>tail"
    AddedToken("in", special=True, normalized=False),
    AddedToken("x<in>", special=True, normalized=False),
    AddedToken("<in>", special=True, normalized=False),
]
SAFE = AddedToken("[INST]", special=True, normalized=False)


def backend(kind: str) -> Tokenizer:
    """A tokenizer that treats the beginning of a text or of a part in a way of its own."""
    if kind == "bytes":
        made = byte_level_tokenizer().backend_tokenizer
    else:
        made = sentencepiece_like().backend_tokenizer
        if kind != "prepend":
            made.normalizer = normalizers.NFKC() if kind == "always" else None
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    made.add_special_tokens([token for token in [*UNSAFE, SAFE] if token.special])
    made.add_tokens([token for token in UNSAFE if not token.special])
    return made


def wanted(backend: Tokenizer) -> list[str]:
    return safe_borders(backend.get_added_tokens_decoder().values(), lambda token: True)


def encode(backend: Tokenizer, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["bytes", "prepend", "first", "always", "never"])
def test_a_cut_text_has_the_ids_of_the_whole(kind: str) -> None:
    made, source = backend(kind), random.Random(kind)
    cache = SegmentCache(lambda text: encode(made, text), wanted(made), capacity_chars=300)
    pieces = [token.content for token in [*UNSAFE, SAFE]] * 2
    pieces += [*" \naé🙂ﬁ<x", "  ", "the", "e\u0301", "|>", "[INST", "<s>"]
    for _ in range(3000):
        text = "".join(source.choices(pieces, k=source.randint(0, 12)))
        assert cache.encode_segments(text) == encode(made, text), text


@pytest.mark.parametrize("kind", ["bytes", "first"])
def test_only_safe_tokens_are_borders(kind: str) -> None:
    found = wanted(backend(kind))
    assert SAFE.content in found
    assert {token.content for token in UNSAFE} & {*found} == {"<a|>"}


def test_a_token_that_repeats_its_beginning_is_no_border() -> None:
    assert safe_borders([AddedToken("aba", normalized=False)], lambda token: True) == []


def test_only_new_parts_are_tokenised() -> None:
    asked: list[str] = []

    def count(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    cache = SegmentCache(count, ["<m>"], capacity_chars=20)
    assert cache.encode_segments("hello<m>one") == [5, 6]
    assert cache.encode_segments("hello<m>one<m>two") == [5, 6, 6]
    assert asked == ["hello", "<m>one", "<m>two"]
    cache.encode_segments("<m>three")
    assert cache.encode_segments("<m>one") == [6]
    assert asked[3:] == ["<m>three", "<m>one"], "a first part is a part of another kind"
    cache.encode_segments("x" * 21)
    cache.encode_segments("x" * 21)
    assert asked[-2:] == ["x" * 21] * 2, "what is larger than the cache is not kept"


def test_what_was_not_used_for_longest_goes_first() -> None:
    asked: list[str] = []

    def count(text: str) -> list[int]:
        asked.append(text)
        return [0]

    cache = SegmentCache(count, ["<m>"], capacity_chars=10)
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        cache.encode_segments(text)
    assert asked == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_threads_share_it() -> None:
    made = backend("bytes")
    cache = SegmentCache(lambda text: encode(made, text), wanted(made), capacity_chars=200)
    texts = [f"the[INST]{number}[INST]the fox {number % 7}" for number in range(300)]
    expected = [encode(made, text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(cache.encode_segments, texts * 4)) == expected * 4
