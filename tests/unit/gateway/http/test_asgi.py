"""Bodies, errors and headers, as all endpoints read and write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.errors import (
    BodyTooLarge,
    ClientClosed,
    InvalidKey,
    RateLimited,
    RequestError,
    ServekitError,
)
from servekit.gateway.http.asgi import (
    ClientGone,
    ErrorResponses,
    MethodNotAllowed,
    api_key,
    encode_error,
    error_headers,
    error_type,
    read_body,
    send_error,
    send_json,
    session_of,
)


class Client:
    """Sends its body in these parts, and keeps what it gets; `read` counts the parts read."""

    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self.parts, self.leaves, self.read = list(parts), leaves, 0
        self.got: list[Any] = []

    async def receive(self) -> Any:
        self.read += 1
        if self.read > len(self.parts):
            assert self.leaves, "nobody reads on after the last part"
            return {"type": "http.disconnect"}
        more = self.read < len(self.parts) or self.leaves
        return {"type": "http.request", "body": self.parts[self.read - 1], "more_body": more}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    async def body(self, limit: int, length: bytes | None = None) -> bytes:
        headers = [(b"content-length", length)] if length is not None else []
        return await read_body({"headers": headers}, self.receive, limit)


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize("parts", [(b"abcd",), (b"ab", b"", b"cd"), (b"", b"abcd")])
async def test_a_body_is_read_whole_up_to_the_limit(parts: tuple[bytes, ...]) -> None:
    body = await Client(*parts).body(4)
    assert body == b"abcd" and type(body) is bytes
    with pytest.raises(BodyTooLarge, match=r"over the limit of 3 bytes; .* server.max_body_bytes"):
        await Client(*parts).body(3)


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    client = Client(b"abcd")
    with pytest.raises(BodyTooLarge):
        await client.body(3, b"4")
    assert client.read == 0
    assert await client.body(4, b"4") == b"abcd"


async def test_a_length_that_is_no_number_is_passed_over() -> None:
    assert await Client(b"abcd").body(4, b"many") == b"abcd"


async def test_the_rest_of_a_body_that_is_too_large_is_not_read() -> None:
    client = Client(b"ab", b"cd", b"ef", b"gh")
    with pytest.raises(BodyTooLarge):
        await client.body(3)
    assert client.read == 2


@pytest.mark.parametrize("parts", [(), (b"ab",), (b"ab", b"cd")])
async def test_a_client_that_leaves_within_its_body_is_gone(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(ClientGone):
        await Client(*parts, leaves=True).body(9)


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer a", b"x-api-key": b"b", b"api-key": b"c"}, "Bearer a"),
        ({b"x-api-key": b"b", b"api-key": b"c"}, "b"),
        ({b"authorization": b"", b"api-key": b"\xe4"}, "ä"),
        ({}, ""),
    ],
)
def test_a_key_is_in_any_of_three_headers(headers: dict[bytes, bytes], key: str) -> None:
    assert api_key(headers) == key


def test_a_session_is_in_a_header_of_its_own() -> None:
    assert session_of({b"x-session-id": b"talk"}) == "talk"
    assert session_of({}) == ""


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (405, "invalid_request_error")),
        *((401, "authentication_error"), (403, "permission_error"), (404, "not_found_error")),
        *((429, "rate_limit_error"), (499, "invalid_request_error")),
        *((500, "server_error"), (503, "server_error")),
    ],
)
def test_each_status_has_openais_type_of_error(status: int, kind: str) -> None:
    assert error_type(status) == kind


def test_an_error_in_openais_envelope() -> None:
    status, body = encode_error(RequestError("n: too many", param="n"))
    assert (status, json.loads(body)) == (
        400,
        {
            "error": {
                "message": "n: too many",
                "type": "invalid_request_error",
                "param": "n",
                "code": RequestError.code,
            }
        },
    )
    status, body = encode_error(ServekitError("broken"))
    assert (status, json.loads(body)["error"]["param"]) == (500, None)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (ServekitError("x"), []),
        (MethodNotAllowed("/v1/models", "GET, HEAD"), [(b"allow", b"GET, HEAD")]),
        (InvalidKey("x"), [(b"www-authenticate", b'Bearer realm="servekit"')]),
        # seconds are whole, and none would be an invitation to try at once
        (RateLimited("x", retry_after_s=0.2), [(b"retry-after", b"1")]),
        (RateLimited("x", retry_after_s=2.4), [(b"retry-after", b"2")]),
        (RateLimited("x", retry_after_s=89.7), [(b"retry-after", b"90")]),
    ],
)
def test_an_errors_headers(error: ServekitError, headers: list[tuple[bytes, bytes]]) -> None:
    assert error_headers(error) == headers


def test_a_wrong_method_is_told_the_right_ones() -> None:
    error = MethodNotAllowed("/v1/models", "GET, HEAD")
    assert (error.status, error.code) == (405, "method_not_allowed")
    assert error.message == "/v1/models takes GET, HEAD"


async def test_json_is_sent_with_its_length() -> None:
    client = Client()
    await send_json(client.send, b'{"a":1}', 201, [(b"x-own", b"1")])
    start, body = client.got
    assert (start["type"], start["status"]) == ("http.response.start", 201)
    assert start["headers"] == [
        (b"content-type", b"application/json"),
        (b"content-length", b"7"),
        (b"x-own", b"1"),
    ]
    assert body == {"type": "http.response.body", "body": b'{"a":1}'}


async def test_an_error_is_sent_with_its_headers_in_the_format_of_its_api() -> None:
    client = Client()
    await send_error(client.send, InvalidKey("x"), lambda error: (418, b"{}"))
    assert client.got[0]["status"] == 418
    assert client.got[0]["headers"][2][0] == b"www-authenticate"
    assert client.got[1]["body"] == b"{}"


async def test_an_error_within_an_endpoint_is_its_response() -> None:
    client = Client()
    async with ErrorResponses(client.send):
        raise RequestError("n: too many", param="n")
    assert client.got[0]["status"] == 400


@pytest.mark.parametrize("error", [ClientGone(), ClientClosed("gone")])
async def test_a_client_that_is_gone_is_sent_nothing(error: Exception) -> None:
    client = Client()
    async with ErrorResponses(client.send):
        raise error
    assert client.got == []


async def test_a_fault_of_our_own_is_left_to_others() -> None:
    client = Client()
    with pytest.raises(ZeroDivisionError):
        async with ErrorResponses(client.send):
            raise ZeroDivisionError
    assert client.got == []
