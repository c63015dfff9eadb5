"""The header of a GGUF file, read without torch: is it whole, how large will it be?

After the format's specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servekit.errors import LoadError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Longer arrays are vocabularies; numbers of layers are shorter.
_MOST_KEPT = 1024
_SPECIAL = (
    *(("bos_token", "bos"), ("eos_token", "eos")),
    *(("unk_token", "unknown"), ("pad_token", "padding")),
)
#: What reading a hostile or mangled file can raise.
_MALFORMED = (
    *(struct.error, ValueError, TypeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a GGUF file before it is converted."""

    architecture: str
    tensors: int
    parameters: int  # elements of all tensors
    special_ids: dict[str, int]  # token ids by transformers' name, e.g. "eos_token"
    metadata: dict[str, Any] = field(default_factory=dict)  # None for a long array
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each tensor


def read_header(path: Path, *, part: bool = False) -> Header:
    """Read and check `path`; `part`: it may be one of several.

    Raises LoadError if it is no GGUF file, cut short, or one of several nevertheless.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header(part)
    except _MALFORMED as error:
        raise LoadError(f"{path} is not a whole GGUF file: {error}. Fetch it again.") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self, part: bool) -> Header:
        magic, version, tensors, fields = self._unpack("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not start with GGUF")
        if version not in (2, 3):
            raise ValueError(
                f"its version is {version:#x}; versions 2 and 3, little endian, are known"
            )
        metadata = dict(self._field() for _ in range(fields))
        if not part and int(metadata.get("split.count") or 1) > 1:
            raise LoadError(
                f"{self._path} is one of {metadata['split.count']} parts: join them with "
                "`llama-gguf-split --merge FIRST_PART OUT.gguf`."
            )
        table = self._tensors(tensors, int(metadata.get("general.alignment", 32)))
        architecture = str(metadata.get("general.architecture", ""))
        special = {
            ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _SPECIAL
        }
        ids = {name: int(value) for name, value in special.items() if value is not None}
        parameters = sum(elements for _, elements, _, _ in table)
        sizes = {name: size for name, _, _, size in table}
        return Header(architecture, tensors, parameters, ids, metadata, sizes)

    def _tensors(self, count: int, alignment: int) -> list[tuple[str, int, int, int]]:
        """The table of tensors, after checking that the file holds them all."""
        table = [self._tensor() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        end = start + max((offset + size for _, _, offset, size in table), default=0)
        if len(self._data) < end:
            raise ValueError(f"it has {len(self._data)} bytes where {end} belong")
        return table

    def _tensor(self) -> tuple[str, int, int, int]:
        """Name, elements, offset and size in bytes of the next tensor in the table."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        (dimensions,) = self._unpack("I")
        elements = math.prod(self._unpack(f"{dimensions}Q"))
        kind, offset = self._unpack("IQ")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return name, elements, offset, elements // block * block_bytes

    def _field(self) -> tuple[str, Any]:
        name = self._string()
        (kind,) = self._unpack("I")
        return name, self._value(kind)

    def _value(self, kind: int) -> Any:
        """A metadata value; long arrays are skipped over: vocabularies, of no use here."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._unpack(_scalar(kind))[0]

    def _array(self) -> list[Any] | None:
        kind, count = self._unpack("IQ")
        if kind in _SCALARS and count <= _MOST_KEPT:
            return list(self._unpack(f"{count}{_SCALARS[kind]}"))
        if kind in _SCALARS:
            self._at += struct.calcsize("<" + _SCALARS[kind]) * count
        else:
            for _ in range(count):
                self._value(kind)
        return None

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return bytes(self._unpack(f"{length}s")[0]).decode(errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a metadata value of unknown type {kind}")
    return _SCALARS[kind]
