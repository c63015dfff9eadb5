"""A GGUF file's chat template, rendered as `transformers` renders one, without importing it.

Templates are programs that came with a model: they run in jinja's sandbox, and see plain JSON
values only. Names, filters and rules are those of transformers 5, for which they are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Stands where the model is to go on, while a conversation is rendered.
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what the model says: only training needs to know."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Takes no attribute that begins with an underscore: those lead out of the sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template cannot set the attribute {name!r}")
        super().__setitem__(name, value)


class Renderer:
    """What `chat.ChatTemplate` asks of a tokenizer; the names are those of `transformers`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what the template may call bos_token, eos_token and so on."""
        self.chat_template = source
        self.special_tokens_map = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

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
        """The text of a conversation. Raises whatever the template raises.

        `chat_template` and `tokenize` are there so that no request takes them for its own.
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

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            self._compiled = _environment().from_string(self.chat_template)
        return self._compiled


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, and with thoughts under both names that templates read."""
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


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return made


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own escapes what HTML would take for its own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
