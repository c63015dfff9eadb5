"""The size of the weights in a folder of safetensors files, from the files' headers.

Source: the format's description (github.com/huggingface/safetensors): eight bytes of length, then
JSON with each tensor's type, shape and offsets.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
#: Bits of one number.
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
#: Types that `dtype` converts; quantised weights keep theirs.
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
#: Tensors of vision and audio towers, and of what projects their output, in the models of
#: transformers: `vision_tower`, `visual`, `audio_tower`, `multi_modal_projector`, `connector`.
_MEDIA = re.compile(r"(^|\.)\w*(vision|visual|audio|projector|connector)\w*\.")


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Return each tensor's shape by its name. Raises ValueError, OSError."""
    found = {
        name: [int(size) for size in tensor["shape"]]
        for path in _list_files(folder)
        for name, tensor in _read_header(path).items()
    }
    if not found:
        raise ValueError(f"{folder} has no weights as safetensors")
    return found


def elements(folder: Path) -> dict[str, int]:
    """Return the count of numbers by type. Raises ValueError, OSError.

    With an index only the files in it count: some folders hold the weights twice.
    """
    found = _count_elements(folder, lambda name: True)
    if not found:
        raise ValueError(f"{folder} has no weights as safetensors")
    return found


def media_elements(folder: Path) -> dict[str, int]:
    """Return `elements` of the parts that read images and recordings, told by their names."""
    return _count_elements(folder, lambda name: _MEDIA.search(name) is not None)


def count_bytes(elements: Mapping[str, int], float_bytes: float | None = None) -> int:
    """Return the size of the numbers in memory; `float_bytes`: that of each converted float."""
    bits = 0.0
    for kind, count in elements.items():
        own = _BITS.get(kind, 16)
        bits += count * (8 * float_bytes if float_bytes and kind in FLOATS else own)
    return int(bits / 8)


def _list_files(folder: Path) -> list[Path]:
    for index in sorted(folder.glob("*.safetensors.index.json")):
        return _indexed_files(index)
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def _indexed_files(index: Path) -> list[Path]:
    """Return the files in an index: {"weight_map": {tensor: file}}."""
    try:
        files = [index.parent / name for name in set(_weight_map(index).values())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is damaged: it has to be JSON, with a weight_map that names a file for each"
            " tensor"
        ) from error
    for path in files:
        if not path.is_file():
            raise ValueError(f"{index} names {path.name}, which is not there")
    return sorted(files)


def _weight_map(index: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    return found


def _count_elements(folder: Path, counts: Callable[[str], bool]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _list_files(folder):
        for name, tensor in _read_header(path).items():
            if counts(name):
                kind = str(tensor["dtype"])
                found[kind] = found.get(kind, 0) + math.prod(tensor["shape"])
    return found


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the header says of each tensor by its name. Raises ValueError, OSError."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("it would be too long")
            tensors = json.loads(file.read(length))
        found = {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}
        for tensor in found.values():
            str(tensor["dtype"])
            if not all(type(size) is int and 0 <= size < 2**63 for size in tensor["shape"]):
                raise ValueError("its shape is none")
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: its header cannot be read") from error
    return found
