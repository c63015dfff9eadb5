"""What becomes of an endpoint's errors: the table in the module's docstring."""

from __future__ import annotations

import email.utils
import json
import time
from typing import Any

import pytest

from servekit.engines.remote.errors import (
    response_refusal,
    retry_after_s,
    told_in_answer,
    unreachable_error,
    wrong_answer,
)
from servekit.errors import LONGEST_MESSAGE


def body(message: Any = "so it is", **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, **more}}).encode()


@pytest.mark.parametrize(
    ("status", "code", "again", "trouble"),
    [
        (400, "invalid_request", False, False),
        (413, "invalid_request", False, False),
        (415, "invalid_request", False, False),
        (422, "invalid_request", False, False),
        (401, "endpoint_error", False, True),
        (402, "endpoint_error", False, True),
        (403, "endpoint_error", False, True),
        (404, "endpoint_error", False, True),
        (405, "endpoint_error", False, True),
        (410, "endpoint_error", False, True),
        (408, "rate_limit_exceeded", True, False),
        (409, "rate_limit_exceeded", True, False),
        (425, "rate_limit_exceeded", True, False),
        (429, "rate_limit_exceeded", True, False),
        (500, "endpoint_error", True, True),
        (502, "endpoint_error", True, True),
        (503, "model_unavailable", True, True),
        (529, "endpoint_error", True, True),
        (302, "endpoint_error", False, True),
    ],
)
def test_by_status(status: int, code: str, again: bool, trouble: bool) -> None:
    found = response_refusal(status, {}, body())
    assert (found.error.code, found.again, found.trouble) == (code, again, trouble)
    assert "so it is" in found.error.message
    assert str(status) in found.error.message


def test_the_request_s_own_fault_keeps_its_place() -> None:
    found = response_refusal(400, {}, body(param="top_k", code="unknown_parameter"))
    assert (found.error.code, found.error.param) == ("invalid_request", "top_k")
    found = response_refusal(400, {}, body(code="context_length_exceeded", param=7))
    assert (found.error.code, found.error.param) == ("context_length_exceeded", None)


def test_no_patience_helps_where_there_is_no_money() -> None:
    found = response_refusal(429, {"retry-after": "1"}, body(code="insufficient_quota"))
    assert (found.error.status, found.again, found.trouble) == (429, False, True)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (b'{"error": "plainly"}', "plainly"),
        (b'{"detail": "of FastAPI"}', "of FastAPI"),
        (b'{"message": "flat"}', "flat"),
        (b'{"detail": [{"loc": ["body"]}]}', "loc"),
        (b"<html>\n<h1>Bad\tGateway</h1>", "<html> <h1>Bad Gateway</h1>"),
        (b'"text"', "text"),
        (b"", "without a reason"),
        (b"{}", "without a reason"),
        (b"[[[[", "[[[["),
        (b"[" * 100_000, "[[["),
        (b'{"error": {"message": "ung\xfcltig"}}', "ung\N{REPLACEMENT CHARACTER}ltig"),
        (b"\xff\x00\x1b[31m", "\N{REPLACEMENT CHARACTER} [31m"),
    ],
)
def test_in_whatever_form_it_is_told(told: bytes, words: str) -> None:
    message = response_refusal(500, {}, told).error.message
    assert words in message
    assert message.isprintable()
    assert len(message) < LONGEST_MESSAGE


def test_a_redirect_says_where_to() -> None:
    message = response_refusal(301, {"location": "https://else.example/v1"}, b"").error.message
    assert "'https://else.example/v1', which is not followed" in message


@pytest.mark.parametrize(
    ("header", "expected_s"),
    [("3", 3.0), ("0.25", 0.25), ("", None), ("soon", None), ("-1", None), ("9" * 40, None),
     ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("99 Foo 99999999", None)],
)  # fmt: skip
def test_how_long_it_wants_to_be_left_alone(header: str, expected_s: float | None) -> None:
    assert retry_after_s({"retry-after": header} if header else {}) == expected_s
    found = response_refusal(429, {"retry-after": header}, b"")
    assert found.after_s == found.error.retry_after_s == expected_s


def test_a_date_in_the_future() -> None:
    header = email.utils.formatdate(time.time() + 30, usegmt=True)
    found = retry_after_s({"retry-after": header})
    assert found is not None
    assert 25 < found <= 30


def test_what_has_no_status() -> None:
    assert unreachable_error("http://x/v1", "refused").error.status == 503
    assert unreachable_error("http://x/v1", "refused").again
    assert wrong_answer("it is none").status == 502
    assert "too hot" in told_in_answer({"message": "too hot", "code": 500}).message
    assert "plain" in told_in_answer("plain").message
