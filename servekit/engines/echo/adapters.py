"""The echo engine's adapters: letter transforms, configured in a folder's adapter_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterSpec

Transform = Callable[[str], str]
TRANSFORMS: dict[str, Transform] = {
    "upper": str.upper,
    "lower": str.lower,
    "swapcase": str.swapcase,
}


def transform_of(adapter: AdapterSpec) -> str:
    """Return the adapter's key of TRANSFORMS.

    Raises RequestError if it is not one of this engine.
    """
    file = Path(adapter.path) / "adapter_config.json"
    try:
        said = json.loads(file.read_bytes())
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}", param="lora_path") from None
    except (ValueError, RecursionError):
        raise RequestError(f"{file} is not valid JSON", param="lora_path") from None
    if not isinstance(said, dict):
        raise RequestError(f"{file} has to be a JSON object", param="lora_path")
    kind = str(said.get("transform", "upper"))
    if kind not in TRANSFORMS:
        known = ", ".join(TRANSFORMS)
        raise RequestError(f"{file}: transform has to be one of {known}", param="lora_path")
    return kind


def transformed(token: int, transform: Transform) -> int:
    """Return the transformed token, or the same token if the result is not a single character."""
    text = transform(chr(token))
    return ord(text) if len(text) == 1 else token
