"""A model's vocabulary as llama.cpp has it: text to token ids, and tokens to bytes."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING, Any

from servekit.engines.llamacpp.capi import Library

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: llama_token_attr
_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED = 1, 2, 8, 16
_SENTENCEPIECE, _BYTE_LEVEL = 1, 2  # llama_vocab_type
_PIECE_BYTES = 256
#: Bytes that text can have.
_IN_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}


class Vocabulary:
    """Over a model that is loaded; for any thread, for llama.cpp only reads it."""

    def __init__(self, library: Library, model: int) -> None:
        self._library = library
        self._model = model
        self._vocab = library.call("llama_model_get_vocab", model)
        self.size: int = library.call("llama_vocab_n_tokens", self._vocab)
        self._pieces: dict[int, bytes] = {}

    # ---------------------------------------------------------------- text to tokens

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids; with `special` those that belong at the ends are added.

        Special tokens that are written out in the text are taken as such, as the tokenizers of
        `transformers` take them.
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
        """A token's bytes; a special one's name. Empty for what is only padding."""
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
        """SentencePiece begins a text with a space that is not the text's own."""
        stated = self.stated("tokenizer.ggml.add_space_prefix")
        kind = self._library.call("llama_vocab_type", self._vocab)
        return bool(kind == _SENTENCEPIECE and stated != "false")

    @property
    def token_bytes(self) -> int:
        """Bytes of text, white space left out, that one token stands for at most; 0: not known.

        It is known where llama.cpp changes nothing but spaces, and has a token for each byte. What
        a piece has as a space may be ▁ in the text, of three bytes.
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
        """Tokens that are no text, by id: their names."""
        return self._named(_CONTROL | _UNKNOWN)

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens that were added to the vocabulary, special or not."""
        return self._named(_CONTROL | _UNKNOWN | _USER_DEFINED)

    def _named(self, attributes: int) -> dict[int, str]:
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
        """All that end a completion."""
        of = self._library.call
        return frozenset(t for t in range(self.size) if of("llama_vocab_is_eog", self._vocab, t))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """What chat templates call them."""
        named = {name: self._one(name) for name in ("bos", "eos", "pad")}
        return {f"{name}_token": text for name, text in named.items() if text}

    def _one(self, name: str) -> str:
        token: int = self._library.call(f"llama_vocab_{name}", self._vocab)
        return self.piece(token).decode(errors="replace") if 0 <= token < self.size else ""

    def stated(self, key: str) -> str:
        """A value of the file's metadata, as text; "" if it is not there."""
        return self._library.text("llama_model_meta_val_str", self._model, key.encode())

    # ---------------------------------------------------------------- for llguidance

    def for_grammars(self) -> LLTokenizer:
        """The vocabulary as llguidance takes it; takes some tenths of a second."""
        from llguidance import LLTokenizer

        make: Any = LLTokenizer  # the stubs leave out how it is made of llama.cpp's vocabulary
        made: LLTokenizer = make.from_llamacpp(
            tokens=[self._marked(token) for token in range(self.size)],
            vocab_ptr=self._vocab,
            tokenize_fptr=self._library.address("llama_tokenize"),
            eos_token=sorted(self.eos),
        )
        return made

    def _marked(self, token: int) -> bytes:
        """Its bytes; those of a special one marked as what no text can spell."""
        piece, attribute = self.piece(token), self._attributes[token]
        tagged = attribute & _USER_DEFINED and piece.startswith(b"<") and piece.endswith(b">")
        if attribute & _CONTROL or tagged:
            return b"\xff" + piece
        return b"" if attribute & _UNUSED else piece
