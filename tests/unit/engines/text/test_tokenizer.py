"""Text and token ids: nothing lost, no character split, nothing taken back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from servekit.engines.api.base import TooManyTokens
from servekit.engines.text.tokenizer import (
    REPLACEMENT,
    ByteDecoder,
    TokenizerCodec,
    WindowDecoder,
)
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import CORPUS, Harness, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
TEXTS = [
    *CORPUS,
    " leading and  double  spaces \n\n\ttabs ",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 é é ﷽ \U0001f9d1\U0001f3fd",
    "a",
    " ",
    "",
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's kind: a ▁ for each space, bytes for what it does not know, first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁t", "▁th", "▁the", "ab", "▁a"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "b"), ("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    make: Any = PreTrainedTokenizerFast  # untyped in the library
    return make(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


SENTENCEPIECE = sentencepiece_like()


def in_pieces(tokenizer: Any, ids: list[int], sizes: random.Random) -> list[str]:
    """Decode in random pieces; the texts in order, flush last."""
    decoder = TokenizerCodec(tokenizer).decoder()
    texts, at = [], 0
    while at < len(ids):
        size = sizes.randint(1, 3)
        texts.append(decoder.push(ids[at : at + size]))
        at += size
    return [*texts, decoder.flush()]


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.lane("long")
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_text_comes_back_whole_and_never_ends_in_half_a_character(
    tokenizer: Any, text: str
) -> None:
    ids = tokenizer(text)["input_ids"]
    pieces = in_pieces(tokenizer, ids, random.Random(1))
    assert "".join(pieces) == whole(tokenizer, ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@given(text=st.text(max_size=60), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=200)
def test_any_text_comes_back_byte_level(text: str, seed: int) -> None:
    ids = BYTE_LEVEL(text)["input_ids"]
    pieces = in_pieces(BYTE_LEVEL, ids, random.Random(seed))
    assert "".join(pieces) == whole(BYTE_LEVEL, ids)


@given(text=st.text(max_size=60), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=200)
def test_any_text_comes_back_sentencepiece(text: str, seed: int) -> None:
    ids = SENTENCEPIECE(text)["input_ids"]
    said = "".join(in_pieces(SENTENCEPIECE, ids, random.Random(seed)))
    assert said.rstrip(REPLACEMENT) == whole(SENTENCEPIECE, ids).rstrip(REPLACEMENT)


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=300)
def test_any_token_ids_decode_as_the_tokenizer_does(ids: list[int], seed: int) -> None:
    """Invalid UTF-8 and special tokens included; all but half a character at the very end."""
    said, expected = (
        "".join(in_pieces(BYTE_LEVEL, ids, random.Random(seed))),
        whole(BYTE_LEVEL, ids),
    )
    assert said.rstrip(REPLACEMENT) == expected.rstrip(REPLACEMENT)


@given(
    ids=st.lists(st.integers(259, len(SENTENCEPIECE) - 1) | st.integers(0, 2), max_size=60),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=300)
def test_any_pieces_decode_as_the_tokenizer_does(ids: list[int], seed: int) -> None:
    said = "".join(in_pieces(SENTENCEPIECE, ids, random.Random(seed)))
    assert said.rstrip(REPLACEMENT) == whole(SENTENCEPIECE, ids).rstrip(REPLACEMENT)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_a_character_is_held_back_until_it_is_whole(tokenizer: Any) -> None:
    ids = single_bytes(tokenizer, "🎉")
    decoder = TokenizerCodec(tokenizer).decoder()
    assert [decoder.push([token]) for token in ids] == ["", "", "", "🎉"]
    assert decoder.flush() == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_an_incomplete_character_never_leaves(tokenizer: Any) -> None:
    ids = single_bytes(tokenizer, "🎉")[:2]
    decoder = TokenizerCodec(tokenizer).decoder()
    assert decoder.push(ids) == ""
    assert decoder.flush() == ""


def single_bytes(tokenizer: Any, text: str) -> list[int]:
    """One token per byte of the text."""
    if tokenizer is SENTENCEPIECE:
        return [3 + byte for byte in text.encode()]
    decoder = TokenizerCodec(tokenizer).decoder()
    assert isinstance(decoder, ByteDecoder)
    by_bytes = {decoder._pieces.find_bytes(token): token for token in range(len(tokenizer))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def test_a_byte_that_never_completes_does_not_hold_the_stream_up() -> None:
    """A model may babble stray bytes; what follows must still come out."""
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        stray = single_bytes(tokenizer, "🎉")[1]
        letter = tokenizer.encode("a", add_special_tokens=False)[-1]
        decoder = TokenizerCodec(tokenizer).decoder()
        text = "".join(decoder.push([token]) for token in [stray] * 30 + [letter] * 3)
        assert text.replace(" ", "").endswith("aaa")


def test_the_window_stays_short() -> None:
    decoder = TokenizerCodec(SENTENCEPIECE).decoder()
    assert isinstance(decoder, WindowDecoder)
    for token in [*SENTENCEPIECE("the ab the " * 300)["input_ids"], *[2] * 500]:
        decoder.push([token])
        assert len(decoder._window) < 50


def test_special_tokens_are_skipped_and_unknown_ids_are_nothing() -> None:
    codec = TokenizerCodec(BYTE_LEVEL)
    decoder = codec.decoder()
    assert isinstance(decoder, ByteDecoder)
    assert decoder.push([0, 1, 2, 10_000_000, *codec.encode("ok")]) == "ok"


# ---------------------------------------------------------------- chat templates


def test_render_chat_is_the_models_template() -> None:
    codec = TokenizerCodec(BYTE_LEVEL)
    ids = codec.render_chat([ChatMessage("system", "be brief"), ChatMessage("user", "hi 🎉")])
    assert BYTE_LEVEL.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi 🎉<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_chat_begins_as_the_library_s_processors_have_it() -> None:
    tokenizer: Any = byte_level_tokenizer()
    begin = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.bos_token = begin[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", special_tokens=[begin]
    )
    turns = [ChatMessage("user", "hi")]
    plain = TokenizerCodec(tokenizer).render_chat(turns)
    codec = TokenizerCodec(tokenizer, completes_chats=True)
    assert codec.render_chat(turns) == [begin[1], *plain]
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert codec.render_chat(turns) == [begin[1], *plain]


def test_a_refusal_of_the_template_is_the_users_to_read() -> None:
    with pytest.raises(RequestError, match="only system, user and assistant may speak"):
        TokenizerCodec(BYTE_LEVEL).render_chat([ChatMessage("wizard", "hi")])


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        TokenizerCodec(BYTE_LEVEL).render_chat([])


def test_a_model_without_a_template_points_to_completions() -> None:
    codec = TokenizerCodec(SENTENCEPIECE)
    assert not codec.chat
    with pytest.raises(RequestError, match="/v1/completions"):
        codec.render_chat([ChatMessage("user", "hi")])


def test_a_broken_template_is_an_error_of_the_request() -> None:
    broken = sentencepiece_like()
    broken.chat_template = "{{ messages[0].content.nothing.at.all }}"
    with pytest.raises(RequestError, match="chat template"):
        TokenizerCodec(broken).render_chat([ChatMessage("user", "hi")])


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_decodes_random_ids_as_its_tokenizer(smol: Harness) -> None:
    codec = smol.engine.codec
    assert isinstance(codec, TokenizerCodec)
    source = random.Random(4)
    for _ in range(200):
        ids = [source.randrange(smol.engine.vocab_size) for _ in range(source.randrange(40))]
        pieces = in_pieces(codec._tokenizer, ids, source)
        said, expected = "".join(pieces), whole(codec._tokenizer, ids)
        assert said.rstrip(REPLACEMENT) == expected.rstrip(REPLACEMENT)


def test_whatever_a_template_raises_is_about_the_messages() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ 1 // 0 }}"
    with pytest.raises(RequestError, match="chat template refuses"):
        TokenizerCodec(tokenizer).render_chat([ChatMessage("user", "x")])


# ---------------------------------------------------------------- markers


def with_markers(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<other>"]})
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_like])
def test_markers_stay_in_the_text_and_no_other_special_token(make: Any) -> None:
    tokenizer = with_markers(make())
    codec = TokenizerCodec(tokenizer)
    own = codec.tokens_of(["[TOOL_CALLS]", "<plain>", "the"])
    assert own == dict(zip(own, tokenizer.convert_tokens_to_ids(list(own)), strict=True))
    assert set(own) == {"[TOOL_CALLS]", "<plain>"}
    ids = tokenizer(
        f"the{tokenizer.eos_token}[TOOL_CALLS]the<other><plain>ab 🎉", add_special_tokens=False
    )["input_ids"]
    for size in (1, len(ids)):
        kept, plain = codec.decoder(["[TOOL_CALLS]"]), codec.decoder()
        texts = ["", ""]
        for at in range(0, len(ids), size):
            texts[0] += kept.push(ids[at : at + size])
            texts[1] += plain.push(ids[at : at + size])
        texts = [text + end.flush() for text, end in zip(texts, (kept, plain), strict=True)]
        assert texts[1] == whole(tokenizer, ids)
        assert texts[0].replace(" ", "") == "the[TOOL_CALLS]the<plain>ab🎉"


# ---------------------------------------------------------------- texts that do not fit


def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: any word over 100 characters is one token; and a mask that takes all spaces."""
    pieces = ["[UNK]", *"abcdef", *(f"##{letter}" for letter in "abcdef")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, unk_token="[UNK]")  # type: ignore[no-any-return]


def space_eater() -> PreTrainedTokenizerFast:
    """RoBERTa's kind: a token for each space, but none before a mask."""
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1, "<unk>": 2}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-any-return]


class Counted:
    """A tokenizer, and how many characters it has been given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.chars += len(text)
        return self._tokenizer(text, **options)


@pytest.mark.parametrize("text", ["\U0001f600", "the cat. ", "ab", "x y"])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_a_text_far_too_long_is_refused_by_its_beginning(tokenizer: Any, text: str) -> None:
    counted = Counted(tokenizer)
    limit, whole = 100, text * 20_000
    with pytest.raises(TooManyTokens) as caught:
        TokenizerCodec(counted).encode(whole, limit)
    assert 2 * limit < caught.value.count <= len(tokenizer(whole)["input_ids"])
    assert counted.chars < len(whole) / 3


def test_a_conversation_is_judged_as_its_template_renders_it() -> None:
    counted = Counted(BYTE_LEVEL)
    codec, limit = TokenizerCodec(counted), 100
    asked = [ChatMessage("user", "x"), ChatMessage("user", "\U0001f600" * 50_000)]
    with pytest.raises(TooManyTokens):
        codec.render_chat(asked, limit=limit)
    assert counted.chars <= 16 * limit
    tools = [{"type": "function", "function": {"name": "f", "description": "ab " * 50_000}}]
    short = codec.render_chat(asked[:1])
    assert codec.render_chat(asked[:1], limit=1) == short
    with pytest.raises(TooManyTokens):
        codec.render_chat(asked[:1], tools, limit=limit)  # told in words: the template has no place


@pytest.mark.parametrize(
    ("tokenizer", "text", "count"),
    [
        (word_pieces(), "a" * 50_000, 1),
        (word_pieces(), " " * 50_000 + "ab", 2),
        (word_pieces(), ("a" * 101 + " ") * 100, 100),
        (word_pieces(), "b" * 200 + " " * 1395 + "abc" * 300, 2),
        (space_eater(), " " * 50_000 + "<mask>", 1),
        (space_eater(), "a" + " " * 50_000 + "<mask>", 2),
    ],
)
def test_a_text_that_fits_is_never_refused_however_long_it_is(
    tokenizer: Any, text: str, count: int
) -> None:
    ids = TokenizerCodec(tokenizer).encode(text, count)
    assert ids == tokenizer(text)["input_ids"]
    assert len(ids) == count


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["the ", "ab", " ", "\n", "Größe", "🙂", "x1", "def "]), min_size=1),
    st.integers(1, 400),
)
def test_a_limit_that_holds_changes_nothing(parts: list[str], times: int) -> None:
    text = "".join(parts) * times
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer(text)["input_ids"]
        assert TokenizerCodec(tokenizer).encode(text, len(ids)) == ids


def gemma_like() -> PreTrainedTokenizerFast:
    """Pieces cut at spaces, after characters were composed."""
    tokenizer = sentencepiece_like()
    backend: Any = tokenizer.backend_tokenizer
    steps = [normalizers.NFC(), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_tokens([AddedToken("<turn>", lstrip=True, rstrip=True)])
    return tokenizer


#: What is long in few tokens, if anything is.
DENSE = st.lists(
    st.sampled_from(["▁", " ", "the", "ab", "<turn>", "é", "\u0344", "é", "가", "\x00", "\x1c"])
).map("".join)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, gemma_like()])
@given(text=st.text(max_size=200) | DENSE)
def test_no_token_stands_for_more_bytes_than_is_said(tokenizer: Any, text: str) -> None:
    """So that what has more bytes than all tokens of a context is refused unread."""
    codec = TokenizerCodec(tokenizer)
    size_bytes = sum(len(part.encode()) for part in text.split())
    assert codec.token_bytes() > 0
    assert len(codec.encode(text)) * codec.token_bytes() >= size_bytes


def test_where_text_may_vanish_nothing_is_said_of_it() -> None:
    assert TokenizerCodec(word_pieces()).token_bytes() == 0
    assert TokenizerCodec(space_eater()).token_bytes() == 0
    for normalizer in (normalizers.NFKC(), normalizers.Replace("a", ""), normalizers.Lowercase()):
        tokenizer = sentencepiece_like()
        backend: Any = tokenizer.backend_tokenizer
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizer])
        assert TokenizerCodec(tokenizer).token_bytes() == 0
    tokenizer = sentencepiece_like()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Split("a", "removed")
    assert TokenizerCodec(tokenizer).token_bytes() == 0
