"""Conversion between text and token ids by llama.cpp's tokenizer and the file's chat template."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from servekit.engines.llamacpp.chat_template import Renderer
from servekit.engines.llamacpp.vocabulary import Vocabulary
from servekit.engines.text.chat_template import ChatTemplate
from servekit.engines.text.tokenizer import Prompts


class LlamaCodec(Prompts):
    """A codec for a llama.cpp vocabulary; see `base.Codec`."""

    def __init__(self, vocabulary: Vocabulary, template: str) -> None:
        """Store the source of the chat template; "" for a model without one."""
        super().__init__(ChatTemplate(Renderer(template, vocabulary.special_tokens_map)))
        self._vocabulary = vocabulary
        self._drops_space = vocabulary.drops_first_space

    def _ids(self, text: str, special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, special=special)

    def token_bytes(self) -> int:
        """Return the most bytes of text per token; see `TokenizerCodec.token_bytes`."""
        return self._vocabulary.token_bytes

    def tokens_of(self, texts: Collection[str]) -> dict[str, int]:
        """Return those of `texts` that are added tokens, with their ids."""
        added = self._vocabulary.added
        return {text: token for token, text in added.items() if text in texts}

    def decoder(self, markers: Collection[str] = ()) -> PieceDecoder:
        special = self._vocabulary.special
        silent = {token for token, text in special.items() if text not in markers}
        return PieceDecoder(self._vocabulary, silent, self._drops_space)


class PieceDecoder:
    """A decoder that joins the tokens' bytes and decodes complete UTF-8 characters."""

    def __init__(self, vocabulary: Vocabulary, silent: Collection[int], drops_space: bool) -> None:
        self._piece = vocabulary.piece
        self._silent = silent
        self._drops_space = drops_space  # until there is text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        silent = self._silent
        text = self._utf8.decode(b"".join(self._piece(t) for t in token_ids if t not in silent))
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        self._utf8.reset()  # drops an incomplete last character
        return ""
