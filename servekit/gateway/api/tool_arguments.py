"""A call's arguments as an object, for dialects that have no place for its text."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_of(text: str) -> dict[str, Any]:
    """What the model wrote; where that is no JSON object, its text, as Anthropic advises.

    Source: its documentation of fine-grained tool streaming, "handling invalid JSON".
    """
    try:
        decoded = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {"INVALID_JSON": text}
