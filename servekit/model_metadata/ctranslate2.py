"""Models of CTranslate2: a folder with `model.bin`, whose variables each have a header.

Source: `ModelSpec._serialize` of ctranslate2/specs/model_spec.py, versions 4 to 6 of the format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from servekit.errors import LoadError

#: The file with the weights, and the name of a Whisper model in it.
FILE, WHISPER = "model.bin", "WhisperSpec"
#: Says what loads such a model.
ENGINE = "`engine: faster_whisper` loads it, if it is a Whisper"
_VERSIONS = range(4, 32)
#: In the order of the library's enumeration: names of types, and bytes of a number.
_TYPES = (
    *(("float32", 4), ("int8", 1), ("int16", 2), ("int32", 4)),
    *(("float16", 2), ("bfloat16", 2)),
)
_FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Longest name of a variable, and most dimensions, that a file is believed to have.
_LONGEST_NAME, _MOST_DIMENSIONS = 1024, 8


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a model; `size` in bytes."""

    shape: tuple[int, ...]
    type: str
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """The facts about a model that its file says; without `variables`, those are not here."""

    name: str  # of its kind, such as WhisperSpec
    variables: Mapping[str, Variable]


def is_model(folder: Path) -> bool:
    """Return whether a folder is a model of CTranslate2, of whatever kind. Never raises."""
    try:
        return bool(_read_name(folder / FILE))
    except OSError:
        return False


def _read_name(path: Path) -> str:
    with path.open("rb") as file:
        return _read_start(file)


def _read_start(file: BinaryIO) -> str:
    """Return the name of a model's kind; "" if this is no model."""
    start = file.read(6)
    if len(start) < 6:
        return ""
    version, length = struct.unpack("<IH", start)
    name = file.read(length)
    if version not in _VERSIONS or not name.endswith(b"Spec\0") or not name[:-1].isalnum():
        return ""
    return name[:-1].decode()


def cut_start(data: bytes) -> bytes:
    """Return the part of a file's first bytes that says the kind of model."""
    length = 6 + int.from_bytes(data[4:6], "little")
    return data[:length]


def read_header(path: Path) -> Header:
    """Read the headers of a model's variables. Raises ValueError for a damaged file."""
    with path.open("rb") as file:
        if not (name := _read_start(file)):
            raise ValueError(f"{path} is damaged: it does not start as a model of CTranslate2")
        try:
            found = _read_variables(file, path.stat().st_size)
        except (struct.error, ValueError, LookupError) as error:
            raise ValueError(f"{path} is damaged: {error}. Fetch or convert it again") from error
    return Header(name, found)


def _read_variables(file: BinaryIO, size: int) -> dict[str, Variable]:
    revision, count = struct.unpack("<II", file.read(8))
    if not (revision or count):  # only the beginning of a file of the hub
        return {}
    found = {}
    for number in range(count):
        (length,) = struct.unpack("<H", _read(file, 2))
        if not 1 <= length <= _LONGEST_NAME:
            raise ValueError(f"variable {number} has no name")
        name = _read(file, length)[:-1].decode()
        rank = _read(file, 1)[0]
        if rank > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {rank} dimensions")
        *shape, kind, of_data = struct.unpack(f"<{rank}IBI", _read(file, 4 * rank + 5))
        type_, each = _TYPES[kind]
        if math.prod(shape) * each != of_data:
            raise ValueError(f"{name} has {of_data} bytes")
        if file.tell() + of_data > size:
            raise ValueError(f"it has {size} bytes, and ends within {name}")
        file.seek(of_data, 1)
        found[name] = Variable(tuple(shape), type_, of_data)
    return found


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends too early")
    return data


def check_whisper(folder: Path) -> Header:
    """Return the header of the Whisper model in a folder. Raises LoadError with advice."""
    if not is_model(folder):
        raise LoadError(_explain_other(folder))
    try:
        header = read_header(folder / FILE)
    except ValueError as error:
        raise LoadError(f"{error}.") from error
    if header.name != WHISPER:
        raise LoadError(
            f"{folder} is a CTranslate2 model of the kind {header.name}; engine faster_whisper"
            f" loads {WHISPER} only."
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise LoadError(
                f"{folder} has no {name}; convert the model with"
                " --copy_files tokenizer.json preprocessor_config.json, or copy it from the model"
                " that was converted."
            )
    return header


def _explain_other(folder: Path) -> str:
    """Return why a folder, or a file, is no CTranslate2 model, and what to do."""
    if _is_transformers_whisper(folder):
        return (
            f"{folder} is a Whisper model for transformers. Convert it once: pip install"
            " ctranslate2 transformers torch; ct2-transformers-converter --model"
            f" {folder} --output_dir {folder}-ct2 --copy_files tokenizer.json"
            " preprocessor_config.json --quantization float16; or use engine transformers."
        )
    return f"{folder} is no Whisper model of CTranslate2: it has no {FILE} of one."


def _is_transformers_whisper(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "whisper"


def count_bytes(path: Path, compute_type: str, *, on_gpu: bool) -> int:
    """Return the memory of a model's weights, computed as `compute_type` says.

    "default" is as the file has them; a CPU has no 16-bit floats. Raises ValueError.
    """
    header = read_header(path)
    if not header.variables:
        return path.stat().st_size
    floats = _FLOATS.get(compute_type.rpartition("_")[2])
    if not on_gpu and floats != 4:
        floats = 4
    elif compute_type == "default":
        floats = None
    quantised = compute_type.startswith("int8")
    return sum(_count(one, floats, quantised) for one in header.variables.values())


def _count(variable: Variable, floats: int | None, quantised: bool) -> int:
    if quantised and len(variable.shape) == 2:  # the linear layers, and the embeddings
        return math.prod(variable.shape)
    if variable.type not in _FLOATS or floats is None:
        return variable.size
    return math.prod(variable.shape) * floats
