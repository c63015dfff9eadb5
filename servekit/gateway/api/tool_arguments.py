"""A tool call's arguments as an object, for APIs and templates that take no other text."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments as an object; text that is no JSON object is wrapped in one.

    Source: Anthropic's documentation of fine-grained tool streaming, "handling invalid JSON".
    """
    try:
        decoded = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {"INVALID_JSON": text}


def object_text(text: str | None) -> str:
    """Return the text of the arguments of an earlier call: that of an object in any case.

    Agents send a call back as the model wrote it, cut off or wrong, with the error as its result.
    """
    arguments = arguments_of(text or "{}")
    if "INVALID_JSON" in arguments:
        return msgspec.json.encode(arguments).decode()
    return text or "{}"
