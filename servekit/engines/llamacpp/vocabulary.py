"""A model's vocabulary in llama.cpp: text to token ids, and token ids to bytes."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_int32, c_void_p
from functools import cached_property
from typing import TYPE_CHECKING, Any

from servekit.engines.llamacpp.library.capi import Library

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: llama_token_attr
_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED = 1, 2, 8, 16
_SENTENCEPIECE, _BYTE_LEVEL = 1, 2  # llama_vocab_type
_PIECE_BYTES = 256
#: Bytes that occur in UTF-8.
_IN_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}


class Vocabulary:
    """The vocabulary of a loaded model; thread-safe, because llama.cpp only reads it."""

    def __init__(self, library: Library, model: int) -> None:
        self._library = library
        self._model = model
        self._vocab = library.call("llama_model_get_vocab", model)
        self.size: int = library.call("llama_vocab_n_tokens", self._vocab)
        self._pieces: dict[int, bytes] = {}

    # ---------------------------------------------------------------- text to tokens

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return token ids; with `special` the tokens of a text's beginning and end are added.

        Special tokens spelled in the text are recognised, as by the tokenizers of `transformers`.
        """
        data = text.encode(errors="replace")
        room = len(data) + 16
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._library.call(
                *("llama_tokenize", self._vocab, data, len(data), ids, room, special, True)
            )
            if count >= 0:
                return list(ids[:count])
            room = -count

    # ---------------------------------------------------------------- tokens to bytes

    def piece(self, token: int) -> bytes:
        """Return a token's bytes, or a special token's name; empty for vocabulary padding."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._look_up(token)
        return piece

    def _look_up(self, token: int) -> bytes:
        room = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._library.call(
                *("llama_token_to_piece", self._vocab, token, buffer, room, 0, True)
            )
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    @property
    def drops_first_space(self) -> bool:
        """True if the tokenizer adds a space before the text, as SentencePiece does."""
        stated = self.read_metadata("tokenizer.ggml.add_space_prefix")
        kind = self._library.call("llama_vocab_type", self._vocab)
        return bool(kind == _SENTENCEPIECE and stated != "false")

    @property
    def token_bytes(self) -> int:
        """The most bytes of text, without white space, that one token can stand for; 0: unknown.

        It is known if llama.cpp changes only spaces and has a token for each byte. A space of a
        piece may be ▁ in the text, which has three bytes.
        """
        kind = self._library.call("llama_vocab_type", self._vocab)
        pieces = [self.piece(token) for token in range(self.size)]
        single = {piece[0] for piece in pieces if len(piece) == 1}
        if kind not in (_SENTENCEPIECE, _BYTE_LEVEL) or not single.issuperset(_IN_UTF8):
            return 0
        return max(len(piece) + 2 * piece.count(b" ") for piece in pieces)

    # ---------------------------------------------------------------- special tokens

    @cached_property
    def special(self) -> dict[int, str]:
        """Names of the tokens that are not text, by id."""
        return self._names_by_id(_CONTROL | _UNKNOWN)

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens that were added to the vocabulary, special or not."""
        return self._names_by_id(_CONTROL | _UNKNOWN | _USER_DEFINED)

    def _names_by_id(self, attributes: int) -> dict[int, str]:
        return {
            token: self.piece(token).decode(errors="replace")
            for token, attribute in enumerate(self._attributes)
            if attribute & attributes
        }

    @cached_property
    def _attributes(self) -> list[int]:
        of = self._library.call
        return [of("llama_vocab_get_attr", self._vocab, token) for token in range(self.size)]

    @cached_property
    def eos(self) -> frozenset[int]:
        """The tokens that end a completion."""
        of = self._library.call
        return frozenset(t for t in range(self.size) if of("llama_vocab_is_eog", self._vocab, t))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Texts of special tokens, by their names in chat templates."""
        named = {name: self._special_text(name) for name in ("bos", "eos", "pad")}
        return {f"{name}_token": text for name, text in named.items() if text}

    @cached_property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens before, between and after the texts of a pair, as in llama.cpp's server.

        Raises LoadError if the library does not know them.
        """
        adds = {}
        for name in ("bos", "eos", "sep"):
            self._library.declare(f"llama_vocab_get_add_{name}", c_bool, (c_void_p,))
            adds[name] = self._library.call(f"llama_vocab_get_add_{name}", self._vocab)
        self._library.declare("llama_vocab_sep", c_int32, (c_void_p,))
        separator = self._library.call("llama_vocab_sep", self._vocab)
        end = self._library.call("llama_vocab_eos", self._vocab)
        ends = [end if end >= 0 else separator] if adds["eos"] else []
        begins = [self._library.call("llama_vocab_bos", self._vocab)] if adds["bos"] else []
        return begins, [*ends, *([separator] if adds["sep"] else [])], ends

    def check_pairs(self) -> None:
        """Raise LoadError if the library does not tell how the texts of a pair are separated."""
        _ = self.pair_tokens

    def _special_text(self, name: str) -> str:
        token: int = self._library.call(f"llama_vocab_{name}", self._vocab)
        return self.piece(token).decode(errors="replace") if 0 <= token < self.size else ""

    def read_metadata(self, key: str) -> str:
        """Return a value of the file's metadata as text; "" if it is missing."""
        return self._library.call_for_text("llama_model_meta_val_str", self._model, key.encode())

    # ---------------------------------------------------------------- for llguidance

    def for_grammars(self) -> LLTokenizer:
        """Create llguidance's form of the vocabulary; takes some tenths of a second."""
        from llguidance import LLTokenizer

        make: Any = LLTokenizer  # the type stubs lack `from_llamacpp`
        made: LLTokenizer = make.from_llamacpp(
            tokens=[self._mark_special(token) for token in range(self.size)],
            vocab_ptr=self._vocab,
            tokenize_fptr=self._library.address("llama_tokenize"),
            eos_token=sorted(self.eos),
        )
        return made

    def _mark_special(self, token: int) -> bytes:
        """Return the token's bytes; special tokens are marked with 0xff, which no text contains."""
        piece, attribute = self.piece(token), self._attributes[token]
        tagged = attribute & _USER_DEFINED and piece.startswith(b"<") and piece.endswith(b">")
        if attribute & _CONTROL or tagged:
            return b"\xff" + piece
        return b"" if attribute & _UNUSED else piece
