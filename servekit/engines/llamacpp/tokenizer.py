"""Conversion between text and token ids by llama.cpp's tokenizer and the file's chat template."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from servekit.engines.api.base import TokenizedText
from servekit.engines.llamacpp.vocabulary import Vocabulary
from servekit.engines.text.chat_template import ChatTemplate
from servekit.engines.text.tokenizer import Prompts
from servekit.model_metadata.chat_template import compile_template

if TYPE_CHECKING:
    from jinja2 import Template

#: Placeholder, during rendering, for the point where the model continues.
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class LlamaCodec(Prompts):
    """A codec for a llama.cpp vocabulary; see `base.Codec`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str,
        pair_template: str = "",
        *,
        completes_chats: bool = False,
    ) -> None:
        """Store the source of the chat template, and the text of pairs; "" for none.

        `completes_chats`: chats without the token of a text's beginning get it, if the file wants
        it, as llama.cpp has chats with images.
        """
        super().__init__(ChatTemplate(Renderer(template, vocabulary.special_tokens_map)))
        self._vocabulary = vocabulary
        self._pair_template = pair_template
        self._drops_space = vocabulary.drops_first_space
        self._completes_chats = completes_chats

    def completes(self, chat: str) -> bool:
        """Return whether a rendered conversation lacks the token of a text's beginning."""
        begin = self._vocabulary.special_tokens_map.get("bos_token")
        return self._completes_chats and not (begin and chat.startswith(begin))

    def _completes(self, chat: str) -> bool:
        return self.completes(chat)

    def _tokenize_text(self, text: str, special: bool) -> list[int]:
        return self._vocabulary.tokenize(text, special=special)

    def encode_parts(
        self, text: str, second: str | None = None, instruction: str = ""
    ) -> TokenizedText:
        """See `base.Codec`. A pair is as llama.cpp's own server has it, and has no token types."""
        if second is not None and self._pair_template:
            filled = self._pair_template.replace("{query}", text).replace("{document}", second)
            return TokenizedText(self._vocabulary.tokenize(filled, special=False), [], [])
        if second is None:
            plain = self._vocabulary.tokenize(text, special=False)
            ids = self._vocabulary.tokenize(text, special=True)
            before = next((at for at in (0, 1) if ids[at : at + len(plain)] == plain), None)
            if before is None:
                return TokenizedText(ids, [], [])
            after = len(ids) - len(plain) - before
            return TokenizedText(ids, [], [0] * before + [1] * len(plain) + [0] * after)
        begin, between, end = self._vocabulary.pair_tokens
        first, last = self.encode_plain(text), self.encode_plain(second)
        pieces = ((0, begin), (1, first), (0, between), (2, last), (0, end))
        parts = [part for part, ids in pieces for _ in ids]
        return TokenizedText([*begin, *first, *between, *last, *end], [], parts)

    def token_bytes(self) -> int:
        """Return the most bytes of text per token; see `TokenizerCodec.token_bytes`."""
        return self._vocabulary.token_bytes

    def tokens_of(self, texts: Collection[str]) -> dict[str, int]:
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


# ---------------------------------------------------------------- the chat template


class Renderer:
    """The part of a `transformers` tokenizer that `text.chat_template.ChatTemplate` uses.

    It renders as `transformers` does, without importing it; see `model_metadata.chat_template` for
    what a template may do.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Store the template; `special_tokens` are its variables bos_token, eos_token and so on."""
        self.chat_template = source
        self.special_tokens_map = dict(special_tokens)
        self._compiled: Template | None = None

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **arguments: Any,
    ) -> str:
        """Render a conversation. Raises any error of the template.

        `chat_template` and `tokenize` are parameters so that no request can set them as arguments.
        """
        messages = [_plain_message(message) for message in conversation]
        if continue_final_message:
            messages[-1]["content"] = str(messages[-1]["content"]) + _HERE
        text = self._compiled_template().render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **arguments},
        )
        return _up_to_here(text) if continue_final_message else text

    def _compiled_template(self) -> Template:
        if self._compiled is None:
            self._compiled = compile_template(self.chat_template)
        return self._compiled


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message without None values, with thoughts under both names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    if "reasoning_content" in plain:
        plain = {"thinking": plain["reasoning_content"], **plain}
    return plain


def _up_to_here(text: str) -> str:
    at = text.rfind(_HERE.strip())
    if at < 0:
        raise ValueError("the template leaves out the final message that is to be gone on with")
    whole = text.startswith(_HERE, at)  # else the template trims messages
    return text[:at] if whole else text[:at].rstrip()
