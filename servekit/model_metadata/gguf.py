"""The metadata and the size of the weights of a GGUF file, or one in parts.

Source: the format's specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.
`gguf_header` checks that a file is whole; this reads only the inputs of an estimate.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, ARRAY = 8, 9
#: Longer arrays are vocabularies; arrays of per-layer numbers are shorter.
_MOST_KEPT = 1024
_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
_MALFORMED = (struct.error, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)
#: general.file_type (llama.cpp's llama_ftype) to the usual name of the quantisation.
_FILE_TYPES: dict[int, str] = {
    int(number): name
    for number, name in re.findall(
        r"(\d+):(\w+)",
        "0:F32 1:F16 2:Q4_0 3:Q4_1 7:Q8_0 8:Q5_0 9:Q5_1 10:Q2_K 11:Q3_K_S 12:Q3_K_M 13:Q3_K_L"
        " 14:Q4_K_S 15:Q4_K_M 16:Q5_K_S 17:Q5_K_M 18:Q6_K 19:IQ2_XXS 20:IQ2_XS 21:Q2_K_S"
        " 22:IQ3_XS 23:IQ3_XXS 24:IQ1_S 25:IQ4_NL 26:IQ3_S 27:IQ3_M 28:IQ2_S 29:IQ2_M 30:IQ4_XS"
        " 31:IQ1_M 32:BF16 36:TQ1_0 37:TQ2_0 38:MXFP4 39:NVFP4 40:Q1_0",
    )
}
#: Words in a description for the last letter of a name.
_MIXES = {"Small": "_S", "Medium": "_M", "Large": "_L"}


def quantization(metadata: Mapping[str, Any], description: str = "") -> str:
    """Return the quantisation of a file, such as "Q4_K_M"; "" if unknown.

    `description` is llama.cpp's own ("llama 8B Q4_K - Medium"), for files that state no type.
    """
    stated = metadata.get("general.file_type")
    if isinstance(stated, int) and stated in _FILE_TYPES:
        return _FILE_TYPES[stated]
    found = re.search(r"\b((?:[A-Z]*Q\d|B?F\d|MXFP4)\w*)(?: - (\w+))?", description)
    if found is None:
        return ""
    return f"{found[1]}{_MIXES.get(found[2] or '', '')}"


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file's content; `metadata` has scalars, texts, and short lists of numbers, else None."""

    metadata: dict[str, Any]
    elements: int
    weights_bytes: int

    def of_architecture(self, key: str) -> Any:
        """Return a value under the architecture's name, or None."""
        return self.metadata.get(f"{self.metadata.get('general.architecture', '')}.{key}")


def read(path: Path) -> Gguf:
    """Read a model's file or files. Raises ValueError, OSError."""
    first, *others = (_read(part) for part in parts(path))
    return Gguf(
        first.metadata,
        first.elements + sum(other.elements for other in others),
        first.weights_bytes + sum(other.weights_bytes for other in others),
    )


def parts(path: Path) -> list[Path]:
    """Return all files of a model, given the first."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[2])
    return [path.with_name(f"{found[1]}-{n:05d}-of-{found[2]}.gguf") for n in range(1, count + 1)]


def _read(path: Path) -> Gguf:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except _MALFORMED as error:
        raise ValueError(f"{path} is no GGUF file that can be read: {error}") from error


class Cursor:
    """A reader of a header, value by value. Raises ValueError, and the errors of `struct`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def _field(self) -> tuple[str, Any]:
        name = self._string()
        (kind,) = self._unpack("I")
        return name, self._value(kind)

    def _value(self, kind: int) -> Any:
        """Read a metadata value; long arrays are skipped, since they are vocabularies."""
        if kind == _STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        return self._unpack(scalar(kind))[0]

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


class _Reader(Cursor):
    def read(self) -> Gguf:
        magic, version, tensors, fields = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not start as one")
        metadata = dict(self._field() for _ in range(fields))
        elements = sum(self._tensor() for _ in range(tensors))
        alignment = int(metadata.get("general.alignment") or 32)
        start = -(-self._at // alignment) * alignment
        return Gguf(metadata, elements, max(0, len(self._data) - start))

    def _tensor(self) -> int:
        self._string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")
        self._unpack("IQ")
        return math.prod(shape)


def scalar(kind: int) -> str:
    """Return the `struct` layout of a scalar of GGUF's type `kind`. Raises ValueError."""
    if kind not in _SCALARS:
        raise ValueError(f"it has a metadata value of unknown type {kind}")
    return _SCALARS[kind]
