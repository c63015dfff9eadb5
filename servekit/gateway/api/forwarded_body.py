"""The name of the model in the body of a forwarded request, JSON or a form.

The name is taken out, because the server has another one for the model. A body in which servers
could read another name than servekit is refused: keys are for certain models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from servekit.errors import RequestError

_PARAM = "model"
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A body without its model, and the position at which that stood."""

    body: bytes
    model: str = ""
    at: int | None = None
    is_json: bool = False


def find_model(content_type: bytes, body: bytes) -> FoundModel:
    """Return the body without its model. Raises RequestError if it cannot be read.

    Other bodies than JSON objects and forms name no model.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        return _find_in_form(options.get(b"boundary", b""), body)
    if body[:64].lstrip().startswith(b"{"):
        return _find_in_object(body)
    return FoundModel(body)


def _find_in_object(body: bytes) -> FoundModel:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        named = fields.pop(_PARAM, None)
        model = msgspec.json.decode(named, type=str) if named is not None else None
    except (msgspec.ValidationError, UnicodeDecodeError):
        raise RequestError("model: expected a string", param=_PARAM) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if any(name.casefold() == _PARAM for name in fields):
        raise RequestError("model: write its name in lower case", param=_PARAM)
    if model is None:
        return FoundModel(body)
    start, rest = b'{"model":', msgspec.json.encode(fields)
    return FoundModel(start + (b"," + rest[1:] if fields else rest[1:]), model, len(start), True)


def _find_in_form(boundary: bytes, body: bytes) -> FoundModel:
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(body)
        parser.finalize()
    except (MultipartParseError, ValueError) as error:
        raise RequestError(f"the form cannot be read: {error}") from None
    if not form.ended:
        raise RequestError("the form is incomplete: its last boundary is missing")
    if not form.found:
        return FoundModel(body)
    if len(form.found) > 1:
        raise RequestError("model: the form has it more than once", param=_PARAM)
    start, end = form.found[0]
    try:
        model = body[start:end][:_LONGEST_NAME].decode()
    except UnicodeDecodeError:
        raise RequestError("model: its name is not UTF-8", param=_PARAM) from None
    return FoundModel(body[:start] + body[end:], model, start)


class _Form:
    """The positions of the parts named `model`; the parser gets the whole body at once."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.ended = False
        self._name = self._header = b""
        self._value = b""
        self._data = (0, 0)
        self.callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._add_field,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name, self._data = b"", (0, 0)

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"")
        self._header = self._value = b""

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        begin, _ = self._data
        self._data = (begin or start, end)

    def _end(self) -> None:
        if self._name.lower() == _PARAM.encode() and self._data[1]:  # not empty
            self.found.append(self._data)

    def _finish(self) -> None:
        self.ended = True
