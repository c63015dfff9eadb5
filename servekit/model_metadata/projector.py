"""Projectors: GGUF files by which llama.cpp reads images or recordings for a model (`mmproj`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servekit.model_metadata.gguf import Header

#: The architecture that such files state.
ARCHITECTURE = "clip"
_NAME = re.compile(r"mmproj.*\.gguf", re.IGNORECASE)
#: Tokens that llama.cpp makes at most of an image, if its projector takes images of any size, and
#: patches of each. Source: tools/mtmd/clip.cpp, `set_limit_image_tokens`.
_MOST_TOKENS, _PATCHES = 4096, 4
#: Projectors whose images are cut to the stated size.
_FIXED = frozenset({"mlp", "ldp", "ldpv2", "gemma3", "idefics3", "internvl", "resampler"})
#: Positions of a recording's window, as Whisper has them.
_AUDIO_POSITIONS = 3000


def find_models(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder that are no projectors."""
    return [one for one in sorted(folder.glob("*.gguf")) if not _NAME.fullmatch(one.name)]


def find_projectors(model: Path) -> list[Path]:
    """Return the projectors beside a model's file, by their names."""
    try:
        return sorted(one for one in model.parent.iterdir() if _NAME.fullmatch(one.name))
    except OSError:
        return []


def estimate_bytes(header: Header, most_tokens: int | None = None) -> int:
    """Return the memory of a projector: its weights, and activations of its largest input.

    `most_tokens` limits an image, if its projector takes any size. As with flash attention; without
    it, attention alone may take a gigabyte for a large image.
    """

    def number(key: str) -> int:
        value = header.metadata.get(key)
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0

    patches = _PATCHES * (most_tokens or _MOST_TOKENS)
    kinds = ("vision", "audio")
    each = (_count_activations(kind, number, header.metadata, patches) for kind in kinds)
    return sum(header.sizes.values()) + max(each)


def _count_activations(
    kind: str, number: Callable[[str], int], metadata: dict[str, Any], patches: int
) -> int:
    """Return the bytes of activations in float32."""
    width, inner = (number(f"clip.{kind}.{key}_length") for key in ("embedding", "feed_forward"))
    positions = _AUDIO_POSITIONS
    if kind == "vision":
        side = number("clip.vision.image_size") // max(1, number("clip.vision.patch_size"))
        named = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
        positions = side**2 if named in _FIXED else max(side**2, patches)
    return 4 * positions * (8 * width + 2 * inner)
