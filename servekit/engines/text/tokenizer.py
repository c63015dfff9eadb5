"""Conversion between text and token ids by the model's own tokenizer and chat template.

Decoding is incremental: text is returned as soon as it is final, and never a part of a character.
Byte-level tokenizers are decoded byte by byte; all others by decoding a short window of tokens with
and without the new ones, which gets leading spaces right whatever the tokenizer's rules are. The
cost per token does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from servekit.engines.api.base import PairCodec, TokenizedText, TooManyTokens
from servekit.engines.text.chat_template import ChatTemplate
from servekit.engines.text.pair_template import FilledPrompt, PairTemplate
from servekit.engines.text.text_encoder import TextEncoder
from servekit.engines.text.tool_format_detection import find_dialect
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Dialect, WorkerSpec
from servekit.protocol.tool_formats import dialect_markers

REPLACEMENT = "�"
#: Tokens after which a window that still ends in U+FFFD is broken rather than incomplete.
_LONGEST_CHARACTER = 8
#: Characters per token of the limit; the beginning of a longer text is tokenised first. Few texts
#: that fit are longer, so hardly any text is tokenised twice.
_FIRST_CHARS = 16
#: Upper limit of such a beginning: half a gigabyte of tokens, at worst.
_MOST_FIRST_CHARS = 2**20
#: Tokens that may exist only because the text was cut: pieces of a word or special token, and
#: tokens that the tokenizer adds at the ends. WordPiece has one token for any word over 100
#: characters.
_CUT_TOKENS = 128
#: Length up to which a tokenizer takes about 0.2 ms, if nothing else is known.
_QUICK_CHARS = 512


class Prompts(PairCodec, ABC):
    """The encoding half of a codec, for any tokenizer."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    @abstractmethod
    def _tokenize_text(self, text: str, special: bool) -> list[int]:
        """Return token ids; with `special` the tokens of a text's beginning and end are added."""

    @abstractmethod
    def tokens_of(self, texts: Collection[str]) -> dict[str, int]:
        """Return those of `texts` that are added tokens, special or not, with their ids.

        A grammar must match them as tokens, never letter by letter.
        """

    @property
    def quick_chars(self) -> int:
        """Length in characters up to which a text may be tokenised on an event loop."""
        return _QUICK_CHARS

    @property
    def chat(self) -> bool:
        return bool(self.template.source)

    def find_dialect(self, spec: WorkerSpec, ends: Collection[int]) -> Dialect:
        """Return the dialect of chats with the tokens of its markers, without those in `ends`."""
        found = find_dialect(self.template, spec.tool_parser, spec.reasoning_parser)
        known = self.tokens_of(dialect_markers(found))
        tokens = tuple((text, token) for text, token in known.items() if token not in ends)
        return replace(found, tokens=tokens)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        return self._ids_within(limit, text, special=True)

    def encode_plain(self, text: str) -> list[int]:
        return self._tokenize_text(text, special=False)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        if not self.chat:
            raise RequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        text = self.template.render(messages, tools, template, continues)
        return self._ids_within(limit, text, special=self._completes(text))

    def _completes(self, chat: str) -> bool:
        """Return whether a rendered conversation gets the tokens of a text's beginning and end."""
        return False

    def _ids_within(self, limit: int | None, text: str, *, special: bool) -> list[int]:
        """Return token ids; raise TooManyTokens as soon as a beginning of the text has too many.

        This saves memory: each token id takes 200 bytes. Only more than twice the limit is too
        many: in one long word, the text after the cut changes how the beginning is split, but not
        into half as many tokens. White space at the cut does not count, because a special token
        after it may swallow any amount.
        """
        reach = len(text) if limit is None else min(_FIRST_CHARS * max(limit, 1), _MOST_FIRST_CHARS)
        while limit is not None and reach < len(text):
            certain = len(self._tokenize_text(text[:reach].rstrip(), special)) - _CUT_TOKENS
            if certain > 2 * limit:
                raise TooManyTokens(certain)
            reach *= 4
        return self._tokenize_text(text, special)


class TokenizerCodec(Prompts):
    """A codec for a `transformers` tokenizer; see `base.Codec`."""

    def __init__(
        self, tokenizer: Any, *, completes_chats: bool = False, pairs: PairTemplate | None = None
    ) -> None:
        """`completes_chats`: chats without the token of a text's beginning get it.

        The library's processors do so, and its tokenizers alone do not. `pairs` is the prompt of a
        reranker; by default the tokenizer joins the texts of a pair.
        """
        super().__init__(ChatTemplate(tokenizer))
        self._tokenizer = tokenizer
        self._completes_chats = completes_chats
        self._pairs = pairs
        self._encoder = TextEncoder(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = is_byte_level(self._backend)
        self._special = _special_tokens(tokenizer, self._backend)
        self._kept: dict[frozenset[int], _BytePieces] = {}

    def start_proof(self) -> None:
        """Change to a faster library for tokenizing, if it gives the same ids; see TextEncoder."""
        self._encoder.start_proof()

    @property
    def quick_chars(self) -> int:
        return self._encoder.quick_chars

    def _completes(self, chat: str) -> bool:
        return self._completes_chats and not begins_text(self._tokenizer, chat)

    def _tokenize_text(self, text: str, special: bool) -> list[int]:
        return self._encoder.encode(text, special)

    @property
    def takes_instruction(self) -> bool:
        """Return whether the prompt of a pair shows an instruction."""
        return self._pairs is not None and self._pairs.takes_instruction

    def encode_parts(
        self, text: str, second: str | None = None, instruction: str = ""
    ) -> TokenizedText:
        if second is not None and self._pairs is not None:
            return self._encode_prompt(self._pairs.render_pair(text, second, instruction))
        return self._encoder.encode_pair(text, second)

    def _encode_prompt(self, prompt: FilledPrompt) -> TokenizedText:
        """Return the tokens of a reranker's prompt; a text has those that hold any of it."""
        if prompt.places is None or self._backend is None:
            return TokenizedText(self._tokenize_text(prompt.text, special=False), [], [])
        # a batch, as only that lets other threads run
        (found,) = self._backend.encode_batch([prompt.text], add_special_tokens=False)
        (query, query_end), (document, document_end) = ((p.start, p.stop) for p in prompt.places)
        parts = [  # plain numbers, as a prompt has hundreds of tokens
            1
            if start < query_end and query < end
            else 2
            if start < document_end and document < end
            else 0
            for start, end in found.offsets
        ]
        return TokenizedText(found.ids, [], parts)

    def tokens_of(self, texts: Collection[str]) -> dict[str, int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(piece): int(token) for token, piece in added.items() if str(piece) in texts}

    def token_bytes(self) -> int:
        """Return the most bytes of text, without white space, that a token stands for; 0: unknown.

        It is known if each byte of the text becomes part of some token: for byte-level tokenizers
        and those with byte fallback, unless their normalizers drop text. Composing characters (NFC)
        may turn three code points into one.
        """
        backend: Any = self._backend
        if backend is None or not (self._byte_level or _falls_back_to_bytes(backend)):
            return 0
        steps = _component_steps(backend.normalizer, "normalizers")
        if not all(map(_keeps_text, steps)):
            return 0
        longest = max(len(piece.encode()) for piece in backend.get_vocab())
        return longest * (3 if any(step["type"] == "NFC" for step in steps) else 1)

    def decoder(self, markers: Collection[str] = ()) -> ByteDecoder | WindowDecoder:
        kept: frozenset[int] = frozenset()
        if markers:
            kept = frozenset(token for token, text in self._special.items() if text in markers)
        if not self._byte_level:
            return WindowDecoder(self._tokenizer, self._special.keys() - kept if kept else None)
        pieces = self._kept.get(kept)
        if pieces is None:
            pieces = self._kept[kept] = _BytePieces(self._backend, self._special.keys() - kept)
        return ByteDecoder(pieces)


def begins_text(tokenizer: Any, text: str) -> bool:
    """Return whether a rendered conversation has the token of a text's beginning already."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _special_tokens(tokenizer: Any, backend: Any) -> dict[int, str]:
    if backend is None:
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = backend.get_added_tokens_decoder()
    return {token: piece.content for token, piece in added.items() if piece.special}


# ---------------------------------------------------------------- byte-level tokenizers


def is_byte_level(backend: Any) -> bool:
    """Return whether the tokens are spelled in GPT-2's byte alphabet."""
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"


def _falls_back_to_bytes(backend: Any) -> bool:
    """Return whether each byte of text outside the vocabulary becomes a token, as in SentencePiece.

    Without byte fallback, any number of unknown characters may be one token. Unigram models are
    excluded, because their normalizers shorten text.
    """
    if not getattr(backend.model, "byte_fallback", False):
        return False
    known = backend.get_vocab()
    steps = _component_steps(backend.pre_tokenizer, "pretokenizers")
    whole = all(
        step["type"] == "Metaspace" or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    return whole and all(f"<0x{byte:02X}>" in known for byte in range(256))


def _component_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer; `name` is the key of a list of steps."""
    if component is None:
        return []
    stated = json.loads(component.__getstate__())
    return list(stated[name]) if stated["type"] == "Sequence" else [stated]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a normalizer changes at most white space or composes characters."""
    if step["type"] == "Replace":
        return not step["pattern"].get("String", "a").strip()
    return step["type"] in ("Prepend", "NFC")


class _BytePieces:
    """A lazy map of token ids to bytes, shared by all decoders."""

    def __init__(self, backend: Any, silent: Collection[int]) -> None:
        self._backend = backend
        self._silent = silent  # tokens without text
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}  # tokens looked up so far that are valid text

    def find_bytes(self, token: int) -> bytes:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._look_up(token)
            with contextlib.suppress(UnicodeDecodeError):
                self.texts[token] = piece.decode()
        return piece

    def _look_up(self, token: int) -> bytes:
        text = None if token in self._silent else self._backend.id_to_token(token)
        if text is None:
            return b""
        return from_alphabet(text)


def from_alphabet(text: str) -> bytes:
    """Return the bytes of a byte-level token, or of an added token, which is plain text."""
    try:
        return bytes(_byte_alphabet()[character] for character in text)
    except KeyError:
        return text.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 as itself, other bytes from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    alphabet = {chr(byte): byte for byte in itself}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


#: State of an incremental UTF-8 decoder between two characters.
_SETTLED = (b"", 0)
_make_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class ByteDecoder:
    """A decoder that joins the tokens' bytes and decodes complete UTF-8 characters."""

    def __init__(self, pieces: _BytePieces) -> None:
        self._pieces = pieces
        self._texts = pieces.texts
        self._utf8 = _make_utf8_decoder("replace")
        self._waits = False  # for the rest of a character

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._waits:  # as in most steps
            text = self._texts.get(token_ids[0])
            if text is not None:
                return text
        text = self._utf8.decode(b"".join(map(self._pieces.find_bytes, token_ids)))
        self._waits = self._utf8.getstate() != _SETTLED
        return text

    def flush(self) -> str:
        self._utf8.reset()  # drops an incomplete last character
        self._waits = False
        return ""


# ---------------------------------------------------------------- all others


class WindowDecoder:
    """A decoder that decodes a window of tokens and returns the text beyond its settled part.

    The window keeps tokens before the new ones, because a token's text may depend on its neighbours
    (a leading space that is dropped at the start, bytes that form a character).
    """

    def __init__(self, tokenizer: Any, silent: Collection[int] | None = None) -> None:
        """Store the special tokens to omit, `silent`; None omits all special tokens."""
        self._tokenizer = tokenizer
        self._silent = silent
        self._window: list[int] = []
        self._settled = 0  # tokens of the window whose text was returned
        self._settled_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        if self._silent is not None:
            token_ids = [token for token in token_ids if token not in self._silent]
        return "".join(self._push_one(token) for token in token_ids)

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode_tokens(self._window)
        waiting = len(self._window) - self._settled
        if text.endswith(REPLACEMENT) and waiting < _LONGEST_CHARACTER:
            return ""
        return self._settle_text(text)

    def flush(self) -> str:
        return self._settle_text(self._decode_tokens(self._window)).rstrip(REPLACEMENT)

    def _settle_text(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        if new or len(self._window) > 4 * _LONGEST_CHARACTER:  # tokens without text pile up
            self._window = self._window[self._settled :][-_LONGEST_CHARACTER:]
            self._settled_text = self._decode_tokens(self._window)
        self._settled = len(self._window)
        return new

    def _decode_tokens(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                token_ids,
                skip_special_tokens=self._silent is None,
                clean_up_tokenization_spaces=False,
            )
        )
