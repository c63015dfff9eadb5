"""The form of a recording as a body of the same types as JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.audio.form import Form, read_form

TYPE = b"multipart/form-data; boundary=x"
FILE = ("file", b"RIFF")


def read(*parts: tuple[str, bytes], content_type: bytes = TYPE) -> Form:
    written = [
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), data)
        for name, data in parts
    ]
    return read_form(content_type, b"".join(written) + b"--x--\r\n")


def fields(*parts: tuple[str, bytes]) -> Any:
    return json.loads(read(FILE, *parts).fields)


def test_the_file_stands_apart_from_the_other_fields() -> None:
    form = read(("model", b"m"), FILE)
    assert json.loads(form.fields) == {"model": "m", "file": ""}
    assert (form.file, form.digest) == (b"RIFF", hashlib.sha256(b"RIFF").digest())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", b"0.5", 0.5),
        ("seed", b"7", 7),
        ("stream", b"true", True),
        ("stream", b"False", False),
        ("queue_position", b"TRUE", True),
        ("timeout_s", b"1e3", 1000.0),
        # what is none is for the check of types to refuse
        ("temperature", b"warm", "warm"),
        ("seed", b"null", "null"),
        ("stream", b'"true"', '"true"'),
        # and a text may look like one
        ("prompt", b"7", "7"),
        ("language", b"true", "true"),
    ],
)
def test_numbers_and_booleans_are_such_where_they_are_meant(
    name: str, text: bytes, value: Any
) -> None:
    found = fields((name, text))[name]
    assert (found, type(found)) == (value, type(value))


def test_lists_are_written_with_brackets_or_without_and_more_than_once() -> None:
    name = "timestamp_granularities"
    assert fields((f"{name}[]", b"word"), (name, b"segment")) == {
        "file": "",
        name: ["word", "segment"],
    }
    assert fields(("include", b"logprobs"))["include"] == ["logprobs"]


def test_a_field_that_was_left_empty_is_not_there() -> None:
    assert fields(("prompt", b""), ("include[]", b"")) == {"file": ""}
    assert read(("file", b"")).file == b"", "an empty file is one"


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([], "file", "file: the form has no recording"),
        ([FILE, FILE], "file", "file: the form has it more than once"),
        (
            [FILE, ("model", b"a"), ("model", b"b")],
            "model",
            "model: the form has it more than once",
        ),
        ([FILE, ("prompt", b"\xff")], "prompt", "prompt: it is not valid UTF-8"),
        ([FILE, ("n" * 99, b"\xff")], "n" * 64, f"{'n' * 64}: it is not valid UTF-8"),
    ],
)
def test_a_wrong_form_is_refused_by_the_name_of_its_field(
    parts: list[tuple[str, bytes]], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(*parts)
    assert (refused.value.param, refused.value.message) == (param, said)


def test_what_is_no_form_is_told_what_to_send() -> None:
    with pytest.raises(Unsupported, match=r"send a form \(multipart/form-data\)") as refused:
        read(FILE, content_type=b"application/json")
    assert refused.value.param == "content-type"
