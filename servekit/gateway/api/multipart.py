"""The parts of a form (multipart/form-data), by their places in the body."""

from __future__ import annotations

from typing import Any, NamedTuple

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from servekit.errors import RequestError


class Part(NamedTuple):
    """A field of a form, and where its data is."""

    name: bytes
    start: int
    end: int


def find_boundary(content_type: bytes) -> bytes | None:
    """Return what separates the parts, None if the body is no form."""
    kind, options = parse_options_header(content_type)
    return options.get(b"boundary", b"") if kind == b"multipart/form-data" else None


def read_parts(boundary: bytes, body: bytes) -> list[Part]:
    """Return the parts of a form. Raises RequestError if it cannot be read, or is incomplete."""
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(body)
        parser.finalize()
    except (MultipartParseError, ValueError) as error:
        raise RequestError(f"the form cannot be read: {error}") from None
    if not form.ended:
        raise RequestError("the form is incomplete: its last boundary is missing")
    return form.found


class _Form:
    """What the parser tells; it gets the whole body at once."""

    def __init__(self) -> None:
        self.found: list[Part] = []
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
        self.found.append(Part(self._name, *self._data))

    def _finish(self) -> None:
        self.ended = True
