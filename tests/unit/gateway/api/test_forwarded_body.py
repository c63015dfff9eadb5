"""The model's name in bodies; Python's own mail and JSON parsers say what a server would read."""

from __future__ import annotations

import json
from email.message import Message
from email.parser import BytesParser
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import RequestError
from servekit.gateway.api.forwarded_body import find_model


def with_name(kind: bytes, body: bytes, name: str) -> tuple[str, bytes]:
    """The name that is found, and the body with another one in its place, as a worker makes it."""
    found = find_model(kind, body)
    if found.at is None:
        return found.model, found.body
    text = json.dumps(name) if found.is_json else name
    return found.model, found.body[: found.at] + text.encode() + found.body[found.at :]


def make_form(*parts: tuple[str, Any]) -> tuple[bytes, bytes]:
    request = httpx.Request("POST", "http://a", files=list(parts))
    return request.headers["content-type"].encode(), request.read()


def read_form(kind: bytes, body: bytes) -> list[tuple[str, bytes]]:
    message = BytesParser().parsebytes(b"Content-Type: " + kind + b"\r\n\r\n" + body)
    parts = message.get_payload()
    assert isinstance(parts, list)
    read = []
    for part in parts:
        assert isinstance(part, Message)
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)
        read.append((str(part.get_param("name", header="content-disposition")), data))
    return read


@given(
    before=st.binary(max_size=200), model=st.text("abcdé/-.:\r\n", min_size=1, max_size=40),
    after=st.binary(max_size=200), name=st.text("xyz-ü", min_size=1, max_size=50),
)  # fmt: skip
def test_forms(before: bytes, model: str, after: bytes, name: str) -> None:
    one, other = ("file", ("a.wav", before)), ("image", ("b", after, "image/png"))
    kind, body = make_form(one, ("model", (None, model.encode())), other)
    found, sent = with_name(kind, body, name)
    assert found == model
    _, expected = make_form(one, ("model", (None, name.encode())), other)
    # httpx chooses another boundary for each form
    old, new = (text.partition(b"\r\n")[0] for text in (expected, sent))
    assert sent == expected.replace(old, new)


def test_a_form_as_another_parser_reads_it() -> None:
    kind, body = make_form(("file", ("a", b"--\r\n\r\nRIFF")), ("model", (None, b"mine")))
    found, sent = with_name(kind, body, "theirs")
    assert (found, read_form(kind, sent)) == (
        "mine",
        [("file", b"--\r\n\r\nRIFF"), ("model", b"theirs")],
    )
    kind, body = make_form(("model", (None, b"")), ("a", (None, b"b")))
    assert with_name(kind, body, "theirs") == ("", body)


def test_forms_without_a_model_stay_as_they_are() -> None:
    kind, body = make_form(("file", ("model", b'name="model"')), ("a", (None, b"b")))
    assert with_name(kind, body, "theirs") == ("", body)


@given(
    fields=st.dictionaries(st.text(max_size=6), st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ), max_size=5).filter(lambda fields: all(key.casefold() != "model" for key in fields)),
    model=st.text(max_size=20), name=st.text(max_size=20), first=st.booleans(),
)  # fmt: skip
def test_objects(fields: dict[str, Any], model: str, name: str, first: bool) -> None:
    named = {"model": model}
    body = json.dumps(named | fields if first else fields | named).encode()
    found, sent = with_name(b"application/json", body, name)
    assert (found, json.loads(sent)) == (model, fields | {"model": name})


def test_numbers_and_duplicates_of_objects() -> None:
    body = b' {"a": 1.10e400, "b": 123456789012345678901234567890, "model": "x", "model": "y"}'
    found, sent = with_name(b"", body, "z")
    assert (found, sent) == (
        "y",
        b'{"model":"z","a":1.10e400,"b":123456789012345678901234567890}',
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b"RIFF\x00", b'"model"', b'{"a": {"model": "b"}}'])
def test_bodies_without_a_model(body: bytes) -> None:
    found = find_model(b"application/octet-stream", body)
    assert (found.body, found.model, found.at) == (body, "", None)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"", b'{"model": {}}'),
        (b"", b"{" + b'"a":[' * 5000),
        (b"", b'{"mo\xffdel": "a"}'),
        (b"", b'{"model": "a", "MODEL": "b"}'),
        (b"multipart/form-data; boundary=" + b"x" * 5000, b"--x"),
        (
            b"multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n\xff\r\n--x--',
        ),
        (b"multipart/form-data; boundary=x", b"--x\r\n" + b"a: b\r\n" * 5000),
    ],
)
def test_bodies_that_cannot_be_read(kind: bytes, body: bytes) -> None:
    with pytest.raises(RequestError):
        find_model(kind, body)
