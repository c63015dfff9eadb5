"""Forms (multipart/form-data): read piece by piece, or as the places of the parts in a body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from servekit.errors import RequestError

#: The longest header of a part, which older parsers do not bound.
_MOST_HEADER_BYTES = 4096


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
    form = _Places(boundary)
    form.finish(body)
    return form.found


class FormReader(ABC):
    """Reads a form as it arrives; subclasses take its parts, and may raise RequestError."""

    def __init__(self, boundary: bytes) -> None:
        """Raises RequestError if the parser does not take the boundary."""
        self._options: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._ended = False
        callbacks: Any = {
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": self.add_data,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except (MultipartParseError, ValueError) as error:
            raise RequestError(f"the form cannot be read: {error}") from None

    def take_piece(self, data: bytes) -> None:
        """Read a piece of the form. Raises RequestError."""
        try:
            self._parser.write(data)
        except (MultipartParseError, ValueError) as error:
            raise RequestError(f"the form cannot be read: {error}") from None

    def finish(self, data: bytes) -> None:
        """Read the last piece. Raises RequestError, also if the form is incomplete."""
        self.take_piece(data)
        if not self._ended:
            raise RequestError("the form is incomplete: its last boundary is missing")

    @abstractmethod
    def begin_part(self, options: dict[bytes, bytes]) -> None:
        """Begin a part; `options` are those of its Content-Disposition."""

    @abstractmethod
    def add_data(self, data: bytes, start: int, end: int) -> None:
        """Take more of the part: `data[start:end]`, of the piece that is being read."""

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header = _join_header(self._header, data[start:end])

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value = _join_header(self._value, data[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, self._options = parse_options_header(self._value)
        self._header = self._value = b""

    def _begin_part(self) -> None:
        options, self._options = self._options, {}
        self.begin_part(options)

    def _end(self) -> None:
        self._ended = True


def _join_header(held: bytes, more: bytes) -> bytes:
    if len(held) + len(more) > _MOST_HEADER_BYTES:
        raise RequestError("the form cannot be read: a header of a part is too long")
    return held + more


class _Places(FormReader):
    """The places of the parts in a body that is read in one piece."""

    def __init__(self, boundary: bytes) -> None:
        super().__init__(boundary)
        self.found: list[Part] = []

    def begin_part(self, options: dict[bytes, bytes]) -> None:
        self.found.append(Part(options.get(b"name", b""), 0, 0))

    def add_data(self, data: bytes, start: int, end: int) -> None:
        name, begin, _ = self.found[-1]
        self.found[-1] = Part(name, begin or start, end)
