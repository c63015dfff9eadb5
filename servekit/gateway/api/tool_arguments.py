"""A tool call's arguments as an object, for APIs that have no place for their text."""

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
