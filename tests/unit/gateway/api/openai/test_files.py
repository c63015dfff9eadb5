"""The form of an uploaded file: its parts, and what is refused."""

from __future__ import annotations

import io

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.openai.files import FileForm

PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--b--\r\n'
)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_a_form_is_read_in_pieces_of_any_size(piece_bytes: int) -> None:
    out = io.BytesIO()
    form, body = FileForm(b"b", out, 100), PURPOSE + FILE
    for at in range(0, len(body), piece_bytes):
        form.take_piece(body[at : at + piece_bytes])
    form.finish(b"")
    assert (out.getvalue(), form.size_bytes, form.name) == (b"{}", 2, "a.jsonl")


def test_a_quote_in_a_name_is_one_as_clients_write_it() -> None:
    form = FileForm(b"b", io.BytesIO(), 100)
    form.finish(PURPOSE + FILE.replace(b"a.jsonl", "ü%22 b;c.jsonl".encode()))
    assert form.name == 'ü" b;c.jsonl'


def field(name: str, value: str) -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return head.encode()


@pytest.mark.parametrize(
    ("anchor", "seconds", "expected"),
    [
        ("created_at", "3600", 3600),
        ("created_at", "3599", "expires_after"),
        ("created_at", "9" * 400, "expires_after"),
        ("created_at", "soon", "expires_after"),
        ("created_at", None, "expires_after"),
        ("last_active_at", "3600", "expires_after"),
        (None, "3600", "expires_after"),
    ],
)
def test_a_form_says_when_the_file_expires(
    anchor: str | None, seconds: str | None, expected: int | str
) -> None:
    form, body = FileForm(b"b", io.BytesIO(), 100), PURPOSE
    for name, value in (("anchor", anchor), ("seconds", seconds)):
        body += b"" if value is None else field(f"expires_after[{name}]", value)
    if isinstance(expected, int):
        form.finish(body + FILE)
        assert form.expires_after_s == expected
    else:
        with pytest.raises(RequestError, match=r"expires_after\[anchor\]"):
            form.finish(body + FILE)


def test_a_form_with_two_files_is_refused() -> None:
    form = FileForm(b"b", io.BytesIO(), 100)
    with pytest.raises(RequestError, match="several"):
        form.finish(PURPOSE + FILE.removesuffix(b"--b--\r\n") + FILE)


@pytest.mark.parametrize(
    "endless",
    [b"X-A: " + b"a" * 10_000, b"a" * 10_000, b"X-A: " + b"a" * 5000 + b"\r\n\r\n"],
)
def test_a_header_without_end_is_refused(endless: bytes) -> None:
    form = FileForm(b"b", io.BytesIO(), 100)
    with pytest.raises(RequestError, match="header"):
        for byte in b"--b\r\n" + endless:
            form.take_piece(bytes([byte]))
