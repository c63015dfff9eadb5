"""Rendering of a GGUF file's chat template, as in `transformers` but without importing it.

See `model_metadata.chat_template` for what a template may do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from servekit.model_metadata.chat_template import compile_template

if TYPE_CHECKING:
    from jinja2 import Template

#: Placeholder, during rendering, for the point where the model continues.
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class Renderer:
    """The part of a `transformers` tokenizer that `text.chat_template.ChatTemplate` uses."""

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
        messages = [_message(message) for message in conversation]
        if continue_final_message:
            messages[-1]["content"] = str(messages[-1]["content"]) + _HERE
        text = self._template().render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **arguments},
        )
        return _up_to_here(text) if continue_final_message else text

    def _template(self) -> Template:
        if self._compiled is None:
            self._compiled = compile_template(self.chat_template)
        return self._compiled


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
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
