"""The HTTP client of a remote endpoint: requests, retries and timeouts.

    retried, after a pause            429, 408, 5xx, no connection, one that breaks, no first byte
    never retried                     after the first byte of an answer: it may have been paid for

As httpx does by default, TLS is verified and proxies come from the environment. Redirects are not
followed, because the key would be sent along. Nothing is decompressed, so that limits in bytes
hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from servekit import __version__
from servekit.engines.remote.errors import (
    Refused,
    response_refusal,
    unreachable_error,
    wrong_answer,
)
from servekit.engines.remote.rate_limiter import RateLimiter, Sent
from servekit.engines.remote.request_builder import EndpointCall
from servekit.errors import EndpointFailed

#: Bytes of an error body that are read.
_MOST_ERROR_BYTES = 64 * 2**10
#: Limit of an answer that is not a stream, such as embeddings.
MAX_WHOLE_BYTES = 64 * 2**20
#: The first pause; each pause doubles up to the longest, less a random part.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
#: If the endpoint asks for a longer pause, the request fails instead.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the endpoint, with its key, timeouts and retries."""

    url: str
    key: str
    headers: dict[str, str]
    slots: int
    connect_timeout_s: float
    first_byte_timeout_s: float | None  # None: no limit
    silence_timeout_s: float | None
    retries: int

    @property
    def origin(self) -> str:
        """Return the URL without its path."""
        return str(httpx.URL(self.url).copy_with(path="/")).rstrip("/")


class Reply:
    """An answer that has begun, read as it arrives."""

    def __init__(self, response: httpx.Response, sent: Sent, silence_s: float | None) -> None:
        self.sent = sent
        self.status = response.status_code
        self.headers = response.headers.raw
        self.kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self._response = response
        self._silence_s = silence_s
        self._raw = response.aiter_raw()
        self._first = b""

    async def await_first_byte(self, *, forwarded: bool = False) -> None:
        """Wait for the first byte. Raises Refused if there is none.

        A forwarded response may be empty, and encoded.
        """
        if forwarded:
            self._first = await anext(self._raw, b"")
            return
        coding = self._response.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            raise Refused(
                wrong_answer(
                    f"it is encoded as {coding[:40]!r}, although no encoding was requested"
                )
            )
        self._first = await anext(self._raw, b"")
        if not self._first:
            reason = "it closed the connection without an answer"
            raise unreachable_error(str(self._response.url.copy_with(query=None)), reason)

    async def read_next(self) -> bytes:
        """Return the next bytes; empty at the end.

        Raises EndpointFailed if the answer breaks off, or on a timeout.
        """
        if piece := self._first:
            self._first = b""
            return piece
        try:
            async with asyncio.timeout(self._silence_s):
                return await anext(self._raw, b"")
        except TimeoutError:
            silence = f"the endpoint has sent nothing for {self._silence_s or 0:g} s"
            raise EndpointFailed(f"{silence}, in the middle of its answer") from None
        except httpx.HTTPError as error:
            broke = f"the endpoint's answer broke off: {reason_of(error)}"
            raise EndpointFailed(broke) from None

    async def read_all(self) -> bytes:
        """Return the whole body. Raises EndpointFailed, also if it is too long."""
        body = bytearray()
        while piece := await self.read_next():
            body += piece
            if len(body) > MAX_WHOLE_BYTES:
                raise wrong_answer(f"it has more than {MAX_WHOLE_BYTES} bytes")
        return bytes(body)


class Endpoint:
    """An endpoint with a pool of connections, for a single event loop."""

    def __init__(
        self,
        address: Address,
        pace: RateLimiter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.pace = pace
        self._address = address
        self._client = httpx.AsyncClient(
            headers=_make_headers(address),
            timeout=httpx.Timeout(None, connect=address.connect_timeout_s),
            limits=httpx.Limits(max_connections=address.slots + 2),
            follow_redirects=False,
            transport=transport,
        )

    async def close(self) -> None:
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def send_call(self, call: EndpointCall, *, patient: bool = True) -> AsyncIterator[Reply]:
        """Send a call and yield the reply once it has begun; closes the connection on exit.

        Raises Refused after the last attempt; without `patient` there is only one attempt.
        """
        reply, response = await self._ask_with_retries(
            call, self._address.retries if patient else 0
        )
        try:
            yield reply
        finally:
            await response.aclose()

    async def get(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Send one GET request; return the status and the beginning of the body. Raises Refused."""
        request = self._client.build_request("GET", self._address.url + path)
        try:
            async with asyncio.timeout(self._address.connect_timeout_s):
                response = await self._send_request(request)
                try:
                    return response.status_code, await _read_beginning(response, most_bytes)
                finally:
                    await response.aclose()
        except TimeoutError:
            waited = f"nothing within {self._address.connect_timeout_s:g} s"
            raise unreachable_error(self._address.url, waited) from None

    async def _ask_with_retries(
        self, call: EndpointCall, retries: int
    ) -> tuple[Reply, httpx.Response]:
        for attempt in range(retries + 1):
            sent = await self.pace.await_turn(call.prompt_tokens)
            try:
                return await self._ask_once(call, sent)
            except Refused as refused:
                pause_s = self._pause_s(refused, attempt)
                if not refused.again or attempt == retries or pause_s > _LONGEST_WAIT_S:
                    raise
            await self.pace.pause(pause_s)
        raise AssertionError("the last attempt returns, or raises")

    def _pause_s(self, refused: Refused, attempt: int) -> float:
        """Return the pause before the next attempt. A time named with 429 holds up all requests."""
        if refused.after_s is not None:
            if refused.status == 429 and refused.after_s <= _LONGEST_WAIT_S:
                self.pace.pause_for(refused.after_s)
            return refused.after_s
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**attempt)
        return pause_s * random.uniform(0.5, 1.0)

    async def _ask_once(self, call: EndpointCall, sent: Sent) -> tuple[Reply, httpx.Response]:
        """Make one attempt, up to the first byte of an answer. Raises Refused."""
        address = self._address
        origin = address.origin if call.at_root else address.url
        request = self._client.build_request(
            "POST", origin + call.path, content=call.body, headers=call.headers
        )
        response: httpx.Response | None = None
        try:
            async with asyncio.timeout(address.first_byte_timeout_s):
                response = await self._send_request(request)
                if not call.accepts(response.status_code):
                    raise await self._refusal_of(response)
                reply = Reply(response, sent, address.silence_timeout_s)
                await reply.await_first_byte(forwarded=call.request.task == "forward")
                return reply, response
        except TimeoutError:
            reason = f"not a byte within {address.first_byte_timeout_s or 0:g} s"
            error: BaseException = unreachable_error(address.url, reason)
        except httpx.HTTPError as broken:
            error = unreachable_error(address.url, reason_of(broken))
        except BaseException as other:
            error = other
        if response is not None:
            await response.aclose()
        raise error

    async def _send_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise unreachable_error(self._address.url, reason_of(error)) from None

    async def _refusal_of(self, response: httpx.Response) -> Refused:
        """Return the refusal that a response is, with the endpoint's own message."""
        body = self._hide_key(await _read_beginning(response, _MOST_ERROR_BYTES))
        return response_refusal(response.status_code, response.headers, body)

    def _hide_key(self, body: bytes) -> bytes:
        """Remove the key from an error's body, as some endpoints quote a wrong key."""
        key = self._address.key.encode()
        return body.replace(key, b"(the key)") if key else body


async def _read_beginning(response: httpx.Response, most_bytes: int) -> bytes:
    """Return the first bytes of a body, as far as they arrive."""
    body = bytearray()
    with contextlib.suppress(httpx.HTTPError):
        async for piece in response.aiter_raw():
            body += piece[: most_bytes - len(body)]
            if len(body) >= most_bytes:
                break
    return bytes(body)


def _make_headers(address: Address) -> dict[str, str]:
    headers = {**address.headers, "accept-encoding": "identity"}
    headers["user-agent"] = f"servekit/{__version__}"
    if address.key:
        headers["authorization"] = f"Bearer {address.key}"
    return headers


def reason_of(error: Exception) -> str:
    """Return an error's message; some errors of httpx have none."""
    said = str(error) or _NAMED.get(type(error), type(error).__name__)
    return " ".join(said.split())[:300]


_NAMED: dict[type[Any], str] = {
    httpx.ConnectTimeout: "no connection within its time",
    httpx.ReadError: "the connection broke",
    httpx.WriteError: "the connection broke while the request was sent",
    httpx.RemoteProtocolError: "it does not speak HTTP",
}
