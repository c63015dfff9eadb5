"""What the scripts share: where the instance is, and how they report. Stdlib only: they run in the
environment of their client."""

from __future__ import annotations

import json
import os
import traceback
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

URL = os.environ["SERVED_URL"]
LEGACY_URL = os.environ["SERVED_LEGACY_URL"]
MODEL = os.environ["SERVED_MODEL"]
KEY = os.environ["SERVED_KEY"]
TOKENIZER = os.environ["SERVED_TOKENIZER"]
#: Models that see, hear and transcribe, "" where there is none, and what they are sent.
EYES = os.environ["SERVED_EYES"]
EARS = os.environ["SERVED_EARS"]
WHISPER = os.environ["SERVED_WHISPER"]
PICTURE = Path(os.environ["SERVED_PICTURE"])
SPEECH = Path(os.environ["SERVED_SPEECH"])
#: A picture has 16 tokens, a second of sound 25: a prompt with either is longer than that.
MEDIA_TOKENS = 16
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


def encode(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()


def fits(arguments: dict[str, object]) -> None:
    """Assert that a call's arguments are what LOOK asks for."""
    assert set(arguments) == {"city", "days"}, arguments
    assert isinstance(arguments["city"], str), arguments
    assert isinstance(arguments["days"], int) and 1 <= arguments["days"] <= 7, arguments
