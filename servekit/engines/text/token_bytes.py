"""The bytes of single tokens, for log probabilities.

A token may be a part of a character, so its text is bytes. Special tokens are spelled by name
(`<|im_end|>`), whereas a decoder leaves them out.
"""

from __future__ import annotations

import re
from typing import Any

from servekit.engines.text.tokenizer import from_alphabet, is_byte_level

#: SentencePiece's spelling of a single byte and of a space.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Pieces:
    """A lazy map of token ids to bytes. Thread-safe: writing an entry twice is harmless."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._known = {int(token): str(piece).encode() for token, piece in added.items()}
        self._byte_level = is_byte_level(getattr(tokenizer, "backend_tokenizer", None))

    def find_bytes(self, token: int) -> bytes:
        """Return the token's bytes; empty for an id that only pads the vocabulary."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._look_up(token)
        return piece

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if self._byte_level:
            return from_alphabet(text)
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
