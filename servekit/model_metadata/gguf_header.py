"""The header of a GGUF file, read without torch: completeness, sizes and special tokens.

Follows the format's specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servekit.errors import LoadError
from servekit.model_metadata.gguf import ARRAY, Cursor, scalar

_SPECIAL = (
    *(("bos_token", "bos"), ("eos_token", "eos")),
    *(("unk_token", "unknown"), ("pad_token", "padding")),
)
#: Texts of tokens that end a generation if the vocabulary has them as special tokens, whatever the
#: file's end of sequence is. Source: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`.
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        "<|tool_response>",
    }
)
#: Ends of a generation by key: `tokenizer.ggml.eos_token_id`, and so on. Same source.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_TOKENS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_CONTROL, _USER_DEFINED = 3, 4  # token types that ordinary text does not produce
#: Errors from reading a hostile or damaged file.
_MALFORMED = (
    *(struct.error, ValueError, TypeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file."""

    architecture: str
    tensors: int
    parameters: int  # elements of all tensors
    special_ids: dict[str, int]  # token ids by transformers' name, e.g. "eos_token"
    metadata: dict[str, Any] = field(default_factory=dict)  # None for a long array
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each tensor
    end_ids: tuple[int, ...] = ()  # tokens that end a generation, as in llama.cpp


def read_header(path: Path, *, part: bool = False) -> Header:
    """Read and check `path`; `part`: it may be one of several parts.

    Raises LoadError if it is no GGUF file, is truncated, or is an unexpected part.
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
        self._ends: dict[str, int] = {}  # the END_TOKENS in the vocabulary
        self._kinds: tuple[int, ...] = ()  # of all tokens

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
        ends = self._end_ids(metadata)
        return Header(architecture, tensors, parameters, ids, metadata, sizes, ends)

    def _field(self) -> tuple[str, Any]:
        start = self._at
        name = self._string()
        if name in (_TOKENS, _KINDS) and self._unpack("I")[0] == ARRAY:
            self._vocabulary(name)
            return name, None
        self._at = start
        return super()._field()

    def _vocabulary(self, name: str) -> None:
        """Read one of the two long arrays that determine the end tokens."""
        kind, count = self._unpack("IQ")
        if name == _KINDS:
            self._kinds = self._unpack(f"{count}{scalar(kind)}")
            return
        for token in range(count):
            text = self._value(kind)
            if text in END_TOKENS:
                self._ends[text] = token

    def _end_ids(self, metadata: dict[str, Any]) -> tuple[int, ...]:
        """Return all ids that end a generation: those with a key, and those known by their text."""
        stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
        kinds = dict(enumerate(self._kinds))
        own = (_CONTROL, _USER_DEFINED)
        named = {text: id for text, id in self._ends.items() if kinds.get(id, _CONTROL) in own}
        if "<|return|>" in named and "<|call|>" in named:
            named.pop("<|end|>", None)  # in the harmony dialect it ends a message, not the turn
        return tuple(sorted({int(id) for id in stated if id is not None} | set(named.values())))

    def _tensors(self, count: int, alignment: int) -> list[tuple[str, int, int, int]]:
        """Return the table of tensors, after a check that the file holds them all."""
        table = [self._tensor() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        end = start + max((offset + size for _, _, offset, size in table), default=0)
        if len(self._data) < end:
            raise ValueError(f"it has {len(self._data)} bytes where {end} belong")
        return table

    def _tensor(self) -> tuple[str, int, int, int]:
        """Return name, elements, offset and size in bytes of the next tensor in the table."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        (dimensions,) = self._unpack("I")
        elements = math.prod(self._unpack(f"{dimensions}Q"))
        kind, offset = self._unpack("IQ")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return name, elements, offset, elements // block * block_bytes
