"""A request in flight to transcribe a recording."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.gateway.routing.failures import retry_policy
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import (
    Delta,
    Generate,
    SamplingParams,
    SpeechParams,
    SpokenSegment,
    Transcript,
)


class TranscriptionCall(InflightRequest):
    """A request whose answer is segments of speech.

    A worker that takes it over transcribes the whole recording again, and repeats the segments of
    the first one, as the arithmetic does; those that have come are dropped. Once a client has seen
    some, only a worker of the same generation takes over; and none, if an engine's samples are not
    the same each time.
    """

    __slots__ = ("_arrived", "_unread", "body", "duration_s", "language", "segments")

    def __init__(
        self,
        model: str,
        params: SamplingParams,
        speech: SpeechParams,
        file: bytes,
        *,
        stream: bool,
        key: str,
    ) -> None:
        more = {"task": "transcribe", "speech": speech}
        super().__init__(model, params, stream=stream, key=key, more=more)
        self.body = file
        self.segments: list[SpokenSegment] = []
        self.language = ""  # its name in English
        self.duration_s = 0.0
        self._arrived = 0  # segments of this attempt
        self._unread = 0  # the last of `segments`

    # ---- for the consumer

    async def next_segments(self) -> list[SpokenSegment]:
        """Return the new segments, none at the end. Raises RequestError if the request failed."""
        while not self._unread:
            self._raise()
            if self.done:
                return []
            await self._wait()
        self._handed_over = True
        unread, self._unread = self._unread, 0
        return self.segments[-unread:]

    async def next_place(self, last: int) -> int | None:
        """Return the first position in the queue that is not `last`; None once it waits no more.

        The router has to have been told to `follow_position`.
        """
        while self.place == last and not self.done:
            await self._wait()
        return None if self.done else self.place

    async def until_done(self) -> None:
        """Wait for all segments. Raises RequestError if the request failed."""
        while not self.done:
            await self._wait()
        self._raise()

    # ---- for the router

    @property
    def answer_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.segments)

    @property
    def _new(self) -> int:
        """Return enough tokens for a proof once a window has been transcribed."""
        return retry_policy.PROOF_TOKENS if self._arrived else 0

    def request(self, wire_id: int) -> Generate:
        """Build the message for the next worker, with the first piece of the file."""
        if self.continuation is None:
            self._forget()
        self._arrived = 0
        return replace(super().request(wire_id), body=self.body[:PIECE_BYTES])

    def feed(self, delta: Delta) -> None:
        if self.stream and delta.continuation is not None:
            self.continuation = delta.continuation
        if delta.speech is not None:
            self._add_segments(delta.speech)
        self.prompt_tokens = delta.prompt_tokens
        if delta.finish is not None:
            self.body = b""
            # the worker's count has what it heard twice, where windows meet
            self._end(delta.finish, replace(delta, completion_tokens=self.answer_tokens))
        if self.stream or self.done:
            self.wake()

    def _add_segments(self, heard: Transcript) -> None:
        if not self.first_s:
            self._note_first_token()
        self.language, self.duration_s = heard.language, heard.duration_s
        self.repeats = heard.repeats
        for segment in heard.segments:
            self._arrived += 1
            if self._arrived > len(self.segments):
                self.segments.append(segment)
                self._unread += 1

    def _forget(self) -> None:
        super()._forget()
        self.segments, self._unread, self._arrived, self.repeats = [], 0, 0, True
