"""Files of CTranslate2's format, written without the library."""

from __future__ import annotations

import struct
from pathlib import Path

from servekit.model_metadata import ctranslate2


def write_model(folder: Path, name: str = "WhisperSpec", **numbers: int) -> Path:
    """Write a model with variables of so many numbers, in float16, as the library's format is."""
    folder.mkdir(exist_ok=True)
    parts = [struct.pack("<I", 6), _text(name), struct.pack("<II", 3, len(numbers))]
    for variable, count in numbers.items():
        parts += [
            _text(variable),
            struct.pack("<B2I", 2, 1, count),
            struct.pack("<BI", 4, 2 * count),
        ]
        parts.append(bytes(2 * count))
    (folder / ctranslate2.FILE).write_bytes(b"".join(parts) + struct.pack("<I", 0))
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    return folder


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"
