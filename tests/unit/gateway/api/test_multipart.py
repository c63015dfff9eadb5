"""Forms, whole or in pieces: where their parts are, and which cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.multipart import FormReader, Part, find_boundary, read_parts


def form(*parts: tuple[str, bytes], end: bytes = b"--x--\r\n") -> bytes:
    """Parts by their headers and data."""
    written = [b"--x\r\n%b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts]
    return b"".join(written) + end


def field(name: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}'


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=x", b"x"),
        (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data", b""),
        (b"application/json", None),
        (b"multipart/mixed; boundary=x", None),
        (b"", None),
    ],
)
def test_a_form_is_told_by_its_type(content_type: bytes, boundary: bytes | None) -> None:
    assert find_boundary(content_type) == boundary


def test_the_places_of_parts_are_those_of_their_data() -> None:
    body = form(
        (field("a"), b"one"), (field("b", '; filename="f"'), b"\r\n--y\r\n"), (field("c"), b"")
    )
    parts = read_parts(b"x", body)
    assert [(part.name, body[part.start : part.end]) for part in parts] == [
        (b"a", b"one"),
        (b"b", b"\r\n--y\r\n"),
        (b"c", b""),
    ]
    assert parts[2] == Part(b"c", 0, 0)


def test_a_part_may_have_other_headers_and_no_name() -> None:
    heads = "X-Name: name=z\r\ncontent-DISPOSITION: form-data; name=a\r\nContent-Type: text/plain"
    body = form((heads, b"1"), ("Content-Type: text/plain", b"2"))
    assert [part.name for part in read_parts(b"x", body)] == [b"a", b""]


@pytest.mark.parametrize(
    ("boundary", "body", "said"),
    [
        (b"x", b"", "incomplete: its last boundary is missing"),
        (b"x", form((field("a"), b"1"), end=b""), "incomplete: its last boundary is missing"),
        (b"x", b"no form at all", "the form cannot be read"),
        (b"y", form((field("a"), b"1")), "the form cannot be read"),
        (b"x" * 300, form((field("a"), b"1")), "the form cannot be read"),
        (b"x", form((field("a" * 4096), b"1")), "a header of a part is too long"),
        (b"x", form(("X" * 4097 + ": a", b"1")), "a header of a part is too long"),
    ],
)
def test_what_is_no_form_is_refused(boundary: bytes, body: bytes, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_parts(boundary, body)
    assert said in refused.value.message


def test_a_header_may_be_as_long_as_the_limit() -> None:
    name = "a" * (4096 - len(field("").removeprefix("Content-Disposition: ")))
    [part] = read_parts(b"x", form((field(name), b"1")))
    assert part.name == name.encode()
    with pytest.raises(RequestError, match="a header of a part is too long"):
        read_parts(b"x", form((field(name + "a"), b"1")))


class Reading(FormReader):
    """Joins the data of each part."""

    def __init__(self) -> None:
        super().__init__(b"x")
        self.parts: list[tuple[dict[bytes, bytes], bytes]] = []

    def begin_part(self, options: dict[bytes, bytes]) -> None:
        self.parts.append((options, b""))

    def add_data(self, data: bytes, start: int, end: int) -> None:
        options, known = self.parts[-1]
        self.parts[-1] = options, known + data[start:end]


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_a_form_may_come_in_pieces(size: int) -> None:
    body: Any = form((field("a", '; filename="f.wav"'), b"one\r\ntwo"), (field("b"), b"x" * 50))
    reading = Reading()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    for piece in pieces[:-1]:
        reading.take_piece(piece)
    reading.finish(pieces[-1])
    assert reading.parts == [
        ({b"name": b"a", b"filename": b"f.wav"}, b"one\r\ntwo"),
        ({b"name": b"b"}, b"x" * 50),
    ]
