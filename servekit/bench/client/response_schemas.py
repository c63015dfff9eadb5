"""The parts of an answer that are read: text, counts, the end, errors.

Sources: OpenAI's API reference; vLLM, DeepSeek and others name thoughts `reasoning_content` or
`reasoning`.
"""

from __future__ import annotations

import msgspec

from servekit.sanitize import one_line

#: Maximum characters of a server's message.
_MESSAGE = 300
#: Raw accepts any value, including null.
_NULL = msgspec.Raw(b"null")


class TokenUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = _NULL


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None


class AnswerSchema(msgspec.Struct):
    """An event of a stream, a whole answer, or an error in place of either."""

    choices: list[_Choice] | None = None
    usage: TokenUsage | None = None
    error: msgspec.Raw = _NULL
    data: list[msgspec.Raw] | None = None  # of embeddings

    @property
    def failed(self) -> bool:
        return bytes(self.error) != b"null"

    @property
    def is_answer(self) -> bool:
        """Return whether it has the fields of an OpenAI answer."""
        return self.choices is not None or self.data is not None or self.usage is not None


decode_answer = msgspec.json.Decoder(AnswerSchema).decode


def text_of(choice: _Choice) -> tuple[str, bool]:
    """Return its text, and whether it has generated output (including thoughts and tool calls)."""
    said = choice.delta or choice.message
    if said is None:
        return choice.text or "", bool(choice.text)
    if said.content:
        return said.content, True
    calls = bytes(said.tool_calls)
    return "", bool(said.reasoning_content or said.reasoning or calls not in (b"null", b"[]"))


def message_of(body: bytes) -> str:
    """Return the message in an error's body, in any envelope; else the body's beginning."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return one_line(body.decode(errors="replace"), _MESSAGE)
    while isinstance(found, dict):
        inner = next((found[key] for key in ("error", "message", "detail") if key in found), None)
        if inner is None:
            break
        found = inner
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return one_line(text, _MESSAGE)
