"""A request in flight that is forwarded to the server behind a model, as it is."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from servekit.gateway.routing.failures import retry_policy
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import Delta, Generate, HttpPart, HttpRequest, SamplingParams


class ForwardedRequest(InflightRequest):
    """A request whose response is bytes.

    It can be sent to another worker until the first part of the response has come. The body is kept
    no longer than that.
    """

    __slots__ = ("_begun", "_given_bytes", "_parts", "body")

    def __init__(self, model: str, http: HttpRequest, body: bytes, key: str) -> None:
        super().__init__(model, SamplingParams(), key=key, more={"task": "forward", "http": http})
        self.body = body
        self._begun = False
        self._given_bytes = 0  # of the part that the consumer has now
        self._parts: deque[HttpPart] = deque()

    # ---- for the consumer

    async def next_part(self) -> HttpPart | None:
        """Return the next part of the response, None at its end; the part before is done with.

        Raises RequestError if the request failed.
        """
        if self._given_bytes and self.replica is not None:
            self.replica.extend_window(self, self._given_bytes)
        while not self._parts:
            self._raise()
            if self.done:
                return None
            await self._wait()
        part = self._parts.popleft()
        self._given_bytes = len(part.data)
        return part

    # ---- for the router

    @property
    def _new(self) -> int:
        """Return enough tokens for a proof once the response has begun."""
        return retry_policy.PROOF_TOKENS if self._begun else 0

    def request(self, wire_id: int) -> Generate:
        """Build the message for the next worker, with the first piece of the body."""
        return replace(super().request(wire_id), body=self.body[:PIECE_BYTES])

    def feed(self, delta: Delta) -> None:
        if (part := delta.http) is not None:
            if not self._begun:
                self._begun, self.body = True, b""
                self._note_first_token()
            self._parts.append(part)
        if delta.finish is not None:
            self.prompt_tokens = delta.prompt_tokens
            self._end(delta.finish, delta)
        self.wake()

    def rewind(self) -> bool:
        return not self._begun
