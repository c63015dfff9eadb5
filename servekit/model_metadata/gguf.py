"""GGUF files: their metadata, sizes and special tokens, read without torch.

Source: the format's specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.
`read_header` checks that a file is whole; `read_gguf` reads only the inputs of an estimate, of a
file or one in parts.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from servekit.errors import LoadError

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
#: Longer arrays are vocabularies; arrays of per-layer numbers are shorter.
_MOST_KEPT = 1024
_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
#: Errors from reading a hostile or damaged file, besides ValueError.
_MALFORMED = (struct.error, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)
_SPECIAL = (
    *(("bos_token", "bos"), ("eos_token", "eos")),
    *(("unk_token", "unknown"), ("pad_token", "padding")),
)
#: Texts of tokens that end a generation, of whatever type, and whatever the file's end of sequence
#: is. Source, also of the next two: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`.
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>"),
    }
)
#: Ends of a generation by key, `tokenizer.ggml.eos_token_id` and so on, with the texts of tokens
#: that are taken where the file has no such key. Of several of them llama.cpp takes only one, by
#: the order of a hash table.
END_KEYS: dict[str, tuple[str, ...]] = {
    "eos": (),
    "eot": (),
    "eom": (),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
}
#: How a GGUF file is sampled where neither the file nor a request says: at temperature 1 over the
#: whole vocabulary, a small quantised model wanders. Source: llama.cpp, common/common.h,
#: `common_params_sampling`.
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
#: Metadata keys of a file's own sampling, `general.sampling.temp` and so on, by our name.
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
#: Texts that end no generation in a vocabulary that has a set of others: in the dialects of harmony
#: and Solar Open `<|end|>` ends a message, not the turn; Gemma 4's turns end otherwise.
NO_ENDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("<|end|>", frozenset({"<|return|>", "<|call|>"})),
    ("<|end|>", frozenset({"<|return|>", "<|calls|>"})),
    ("<|end|>", frozenset({"<|flush|>", "<|call|>"})),
    ("<|end|>", frozenset({"<|flush|>", "<|calls|>"})),
    ("</s>", frozenset({"<|tool_response>"})),
)
_KNOWN_ENDS = END_TOKENS.union(*END_KEYS.values())
_TOKENS = "tokenizer.ggml.tokens"
#: llama.cpp takes 512.
MOST_LAYERS = 4096
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


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file's content; `metadata` has scalars, texts, and short lists of numbers, else None."""

    metadata: dict[str, Any]
    elements: int
    weights_bytes: int

    def of_architecture(self, key: str) -> Any:
        """Return a value under the architecture's name, or None."""
        return self.metadata.get(f"{self.metadata.get('general.architecture', '')}.{key}")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file."""

    architecture: str
    tensors: int
    parameters: int  # elements of all tensors
    special_ids: dict[str, int]  # token ids by transformers' name, e.g. "eos_token"
    metadata: dict[str, Any] = field(default_factory=dict)  # None for a long array
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each tensor
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # innermost dimension first
    types: dict[str, int] = field(default_factory=dict)  # of metadata, as the format numbers them
    end_ids: tuple[int, ...] = ()  # tokens that end a generation, as in llama.cpp


def read_gguf(path: Path) -> Gguf:
    """Read a model's file or files. Raises ValueError, OSError."""
    metadata: dict[str, Any] = {}
    elements = size = 0
    for at, part in enumerate(parts(path)):
        try:
            content = _read_content(part)
        except _MALFORMED as error:
            reason = _explain(error)
            raise ValueError(f"{part} is not a readable GGUF file: {reason}") from error
        metadata = content.metadata if not at else metadata
        elements += sum(tensor.elements for tensor in content.tensors)
        size += max(0, content.size - content.start)
    return Gguf(metadata, elements, size)


def _explain(error: Exception) -> str:
    """Return a reader's error in words; those of `struct` speak of buffers."""
    return "it ends early" if isinstance(error, struct.error) else str(error)


def read_sampling_defaults(read: Callable[[str], Any]) -> dict[str, float]:
    """Return how a file is sampled by default: as it says, else as llama.cpp does.

    `read` returns the value of a metadata key, perhaps as text; what is no number is as none.
    """
    found: dict[str, float] = dict(SAMPLING)
    for name, key in SAMPLING_KEYS.items():
        with suppress(ValueError, TypeError, OverflowError):
            value = float(read(f"general.sampling.{key}"))
            found[name] = int(value) if name == "top_k" else value
    return found


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file is GGUF, as Ollama's blobs are, which have no suffix."""
    if not path.is_file():  # a FIFO would never answer
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def parts(path: Path) -> list[Path]:
    """Return all files of a model, given the first."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[2])
    return [path.with_name(f"{found[1]}-{n:05d}-of-{found[2]}.gguf") for n in range(1, count + 1)]


def read_header(path: Path, *, part: bool = False) -> Header:
    """Read and check `path`; `part`: it may be one of several parts.

    Raises LoadError if it is no GGUF file, is truncated, or is an unexpected part.
    """
    try:
        return _check_content(path, _read_content(path), part)
    except (*_MALFORMED, ValueError) as error:
        reason = _explain(error)
        raise LoadError(f"{path} is not a whole GGUF file: {reason}. Fetch it again.") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from error


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


# ---------------------------------------------------------------- the format


class _Tensor(NamedTuple):
    """An entry of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml_type
    offset: int  # from the start of the data

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class _Content(NamedTuple):
    """A file up to the data of its tensors, which begin at `start`; `size` is the whole file's."""

    metadata: dict[str, Any]
    tensors: list[_Tensor]
    start: int
    size: int
    end_ids: tuple[int, ...]
    types: dict[str, int]


def _read_content(path: Path) -> _Content:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).read_content()


def _check_content(path: Path, content: _Content, part: bool) -> Header:
    """Raise LoadError or ValueError unless the file is whole."""
    metadata = content.metadata
    if not part and int(metadata.get("split.count") or 1) > 1:
        raise LoadError(
            f"{path} is one of {metadata['split.count']} parts: join them with "
            "`llama-gguf-split --merge FIRST_PART OUT.gguf`."
        )
    sizes = {tensor.name: _size_bytes(tensor) for tensor in content.tensors}
    ends = (tensor.offset + sizes[tensor.name] for tensor in content.tensors)
    end = content.start + max(ends, default=0)
    if content.size < end:
        raise ValueError(f"it has {content.size} bytes where {end} belong")
    special = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _SPECIAL}
    return Header(
        architecture=str(metadata.get("general.architecture", "")),
        tensors=len(content.tensors),
        parameters=sum(tensor.elements for tensor in content.tensors),
        special_ids={name: int(value) for name, value in special.items() if value is not None},
        metadata=metadata,
        sizes=sizes,
        shapes={tensor.name: tensor.shape for tensor in content.tensors},
        end_ids=content.end_ids,
        types=content.types,
    )


def _check_layers(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of layers that nothing has, and that lists are made of."""
    for name, value in metadata.items():
        number = name.endswith(".block_count") and isinstance(value, int | float)
        if number and not 0 <= value <= MOST_LAYERS:
            raise ValueError(f"its {name} is {value}")


def _size_bytes(tensor: _Tensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return tensor.elements // block * block_bytes


class _Reader:
    """A reader of a header, value by value. Raises ValueError, and the errors of `struct`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._types: dict[str, int] = {}
        self._tokens = 0  # of the vocabulary
        self._ends: dict[str, int] = {}  # tokens of the vocabulary that may be ends, by their text

    def read_content(self) -> _Content:
        magic, version, tensors, fields = self._unpack("4sIQQ")
        if magic != _MAGIC:
            raise ValueError("it does not start with GGUF")
        if version not in (2, 3):
            raise ValueError(
                f"its version is {version:#x}; versions 2 and 3, little endian, are known"
            )
        metadata = dict(self._read_field() for _ in range(fields))
        _check_layers(metadata)
        table = [self._read_tensor() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment") or 32)
        start = -(-self._at // alignment) * alignment
        ends = self._end_ids(metadata)
        return _Content(metadata, table, start, len(self._data), ends, self._types)

    def _read_field(self) -> tuple[str, Any]:
        name = self._read_string()
        (kind,) = self._unpack("I")
        self._types[name] = kind
        if name == _TOKENS and kind == _ARRAY:
            self._read_vocabulary()
            return name, None
        return name, self._read_value(kind)

    def _read_vocabulary(self) -> None:
        """Read the texts of all tokens, which determine the end tokens."""
        kind, self._tokens = self._unpack("IQ")
        for token in range(self._tokens):
            text = self._read_value(kind)
            if text in _KNOWN_ENDS:
                self._ends[text] = token

    def _end_ids(self, metadata: dict[str, Any]) -> tuple[int, ...]:
        """Return all ids that end a generation: those with a key, and those known by their text."""
        found = {id for text, id in self._ends.items() if text in END_TOKENS}
        for key, texts in END_KEYS.items():
            stated = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if stated is None or not 0 <= int(stated) < self._tokens:
                found |= {self._ends[text] for text in texts if text in self._ends}
            else:
                found.add(int(stated))
        for text, others in NO_ENDS:
            if others <= self._ends.keys():
                found.discard(self._ends.get(text, -1))
        return tuple(sorted(found))

    def _read_tensor(self) -> _Tensor:
        name = self._read_string()
        (dimensions,) = self._unpack("I")
        shape = self._unpack(f"{dimensions}Q")
        return _Tensor(name, shape, *self._unpack("IQ"))

    def _read_value(self, kind: int) -> Any:
        """Read a metadata value; long arrays are skipped, since they are vocabularies."""
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array()
        return self._unpack(_scalar(kind))[0]

    def _read_array(self) -> list[Any] | None:
        kind, count = self._unpack("IQ")
        if kind in _SCALARS and count <= _MOST_KEPT:
            return list(self._unpack(f"{count}{_SCALARS[kind]}"))
        if kind in _SCALARS:
            self._at += struct.calcsize("<" + _SCALARS[kind]) * count
        else:
            for _ in range(count):
                self._read_value(kind)
        return None

    def _read_string(self) -> str:
        (length,) = self._unpack("Q")
        return bytes(self._unpack(f"{length}s")[0]).decode(errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values


def _scalar(kind: int) -> str:
    """Return the `struct` layout of a scalar of GGUF's type `kind`. Raises ValueError."""
    if kind not in _SCALARS:
        raise ValueError(f"it has a metadata value of unknown type {kind}")
    return _SCALARS[kind]
