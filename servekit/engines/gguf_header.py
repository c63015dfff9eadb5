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
from servekit.headers.gguf import Cursor

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


class _Reader(Cursor):
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        super().__init__(data)
        self._path = path

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
