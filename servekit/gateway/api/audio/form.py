"""The form of a request: its file, and its other fields as a body of the same types as JSON."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.multipart import find_boundary, read_parts

#: Fields that are lists; clients write [] behind their names.
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
#: Fields that are no texts: numbers and booleans.
_VALUES = ("temperature", "seed", "stream", "timeout_s", "queue_position")
_FILE = "file"


class Form(NamedTuple):
    """A form without its file as JSON, in which the name stands for the file."""

    fields: bytes
    file: bytes
    digest: bytes  # SHA-256 of the file


def read_form(content_type: bytes, body: bytes) -> Form:
    """Read a form with a file. Raises RequestError. Takes milliseconds for large files."""
    boundary = find_boundary(content_type)
    if boundary is None:
        raise Unsupported(
            "send a form (multipart/form-data) with the recording as its field `file`",
            param="content-type",
        )
    fields: dict[str, Any] = {}
    file = b""
    for part in read_parts(boundary, body):
        data = body[part.start : part.end]
        name = part.name.decode("latin-1").removesuffix("[]")
        if name in fields and name not in _LISTS:
            raise RequestError(f"{name[:64]}: the form has it more than once", param=name[:64])
        if name == _FILE:
            fields[name], file = "", data
        elif not data:
            continue  # a field of a web page that was left empty
        elif name in _LISTS:
            fields.setdefault(name, []).append(_read_text(name, data))
        else:
            fields[name] = _read_value(name, _read_text(name, data))
    if _FILE not in fields:
        raise RequestError("file: the form has no recording", param=_FILE)
    return Form(msgspec.json.encode(fields), file, hashlib.sha256(file).digest())


def _read_text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{name[:64]}: it is not valid UTF-8", param=name[:64]) from None


def _read_value(name: str, text: str) -> Any:
    """Return a number or boolean as such; a text that is none is left for the check of its type."""
    if name not in _VALUES:
        return text
    try:
        return msgspec.json.decode(text.lower(), type=bool | int | float)
    except msgspec.MsgspecError:
        return text
