"""What the scripts share: where the instance is, and how they report. Stdlib only: they run in the
environment of their client."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ["SERVED_URL"]
LEGACY_URL = os.environ["SERVED_LEGACY_URL"]
MODEL = os.environ["SERVED_MODEL"]
KEY = os.environ["SERVED_KEY"]
TOKENIZER = os.environ["SERVED_TOKENIZER"]
QUESTION = "What is the capital of France? Answer in one word."

LOOK = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    },
}


def check(what: str, run: Callable[[], object]) -> None:
    """Run one thing and report it; a failure is told by its exception."""
    try:
        run()
    except BaseException as error:
        traceback.print_exc()
        line = " ".join(str(error).split()) or "no message"
        tell(what, f"{type(error).__name__}: {line[:300]}")
    else:
        tell(what, "")


def tell(what: str, why: str) -> None:
    print("RESULT " + json.dumps([what, why]), flush=True)


def fits(arguments: dict[str, object]) -> None:
    """Assert that a call's arguments are what LOOK asks for."""
    assert set(arguments) == {"city", "days"}, arguments
    assert isinstance(arguments["city"], str), arguments
    assert isinstance(arguments["days"], int) and 1 <= arguments["days"] <= 7, arguments
