"""Mapping of an endpoint's errors: the client's error, whether to retry, and the endpoint's health.

status                      the client gets                     retried       in trouble
400 413 415 422             400, with its message and param     no            no
401 402 403                 502                                 no            yes
404 405 410                 502                                 no            yes
408 409 425 429             429, with its Retry-After           yes           no
429, for lack of money      429                                 no            yes
500 and more                502; 503 for 503                    yes           yes
3xx                         502: it is not followed             no            yes
no connection, or it broke  503                                 yes           yes
an invalid answer           502                                 no            no
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from servekit.errors import (
    ContextLengthExceeded,
    EndpointFailed,
    ModelUnavailable,
    RateLimited,
    RequestError,
)

_ASKED_WRONG = (400, 413, 415, 422)
_TOO_EARLY = (408, 409, 425, 429)
#: Error codes for which retries are pointless.
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
#: Longest error message that is passed on.
_LONGEST_WORDS = 400


class Refused(Exception):
    """A request attempt without an answer.

    `error` is the client's error if there is no further attempt. With `again` another attempt may
    succeed, not before `after_s` if the endpoint names a time. With `trouble` other requests would
    fail too.
    """

    def __init__(
        self,
        error: RequestError,
        *,
        status: int = 0,
        again: bool = False,
        after_s: float | None = None,
        trouble: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status  # 0: there was no HTTP response
        self.again = again
        self.after_s = after_s
        self.trouble = trouble


def unreachable_error(url: str, reason: str) -> Refused:
    """Return the error of an endpoint that cannot be reached or does not answer."""
    error = ModelUnavailable(f"the endpoint {url} does not answer: {reason}")
    return Refused(error, again=True, trouble=True)


def wrong_answer(what: str) -> EndpointFailed:
    """Return the error of an invalid answer."""
    return EndpointFailed(f"the endpoint's answer is wrong: {what}")


def response_refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refused:
    """Map an HTTP error response to a Refused."""
    words, code, param = _parse_error(body)
    said = f"the endpoint answered {status}: {words or 'without a reason'}"
    if 300 <= status < 400:
        where = headers.get("location", "")[:200]
        error = EndpointFailed(f"{said}; it redirects to {where!r}, which is not followed")
        return Refused(error, status=status, trouble=True)
    if status in _ASKED_WRONG:
        kind = ContextLengthExceeded if code == ContextLengthExceeded.code else RequestError
        return Refused(kind(said, param=param), status=status)
    if status == 429 and code in _NO_MONEY:
        return Refused(RateLimited(said), status=status, trouble=True)
    if status in _TOO_EARLY:
        after_s = retry_after_s(headers)
        error_429 = RateLimited(said, retry_after_s=after_s)
        return Refused(error_429, status=status, again=True, after_s=after_s)
    if status >= 500:
        kind = ModelUnavailable if status == 503 else EndpointFailed
        after_s = retry_after_s(headers)
        failed = kind(said, retry_after_s=after_s)
        return Refused(failed, status=status, again=True, after_s=after_s, trouble=True)
    return Refused(EndpointFailed(said), status=status, trouble=True)


def told_in_answer(error: Any) -> EndpointFailed:
    """Return the error of an error object in an answer with status 200."""
    words = _shorten_message(error.get("message") if isinstance(error, dict) else error)
    return EndpointFailed(f"the endpoint broke its answer off: {words or 'without a reason'}")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of either form of Retry-After; None if it is missing or invalid."""
    given = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", given):
        return float(given)
    date = email.utils.parsedate_tz(given) if given else None
    if date is None:
        return None
    try:
        return max(0.0, email.utils.mktime_tz(date) - time.time())
    except (OverflowError, ValueError):
        return None


def _parse_error(body: bytes) -> tuple[str, str, str | None]:
    """Return the message, code and parameter of an error in any of the usual forms."""
    try:
        data: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _shorten_message(body.decode(errors="replace")), "", None
    data = data if isinstance(data, dict) else {"error": data}
    error = next((data[key] for key in ("error", "detail", "message") if data.get(key)), None)
    if not isinstance(error, dict):
        return _shorten_message(error), str(data.get("code", "")), None
    param = error.get("param")
    code = error.get("code") or error.get("type") or ""
    return (
        _shorten_message(error.get("message")),
        str(code),
        param if isinstance(param, str) else None,
    )


def _shorten_message(told: object) -> str:
    """Shorten an untrusted message to one line."""
    text = "" if told is None else told if isinstance(told, str) else str(told)
    text = " ".join("".join(c if c.isprintable() else " " for c in text[:4096]).split())
    return text if len(text) <= _LONGEST_WORDS else text[: _LONGEST_WORDS - 1] + "…"
