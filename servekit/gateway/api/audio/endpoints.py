"""The endpoints of transcriptions and translations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from servekit.errors import ClientClosed, RequestError
from servekit.gateway.api.audio.form import Form, read_form
from servekit.gateway.api.audio.request_types import TranscriptionRequest, TranslationRequest
from servekit.gateway.api.audio.response_types import (
    DurationUsage,
    Segment,
    TextDelta,
    TextDone,
    TextSegment,
    TokenUsage,
    Transcription,
    Word,
)
from servekit.gateway.api.audio.subtitles import write_srt, write_vtt
from servekit.gateway.api.openai.response_types import OpenAIError
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import FORM, Operation
from servekit.gateway.api.scoring.calls import find_model
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    ErrorResponses,
    Receive,
    Scope,
    Send,
    api_key,
    envelope,
    read_body,
    send_json,
    session_of,
)
from servekit.gateway.http.response import DisconnectWatcher, Endpoint
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.transcription_request import TranscriptionCall
from servekit.protocol.messages import SamplingParams, SpeechParams, SpokenSegment
from servekit.protocol.types import Task

_encode = msgspec.json.Encoder().encode
#: Longer bodies are read in a thread, because that takes milliseconds.
_LARGE_BYTES = 2**20
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
#: The task of the endpoints.
TASKS: dict[str, tuple[Task, ...]] = {
    TRANSCRIPTIONS: ("transcribe",),
    TRANSLATIONS: ("transcribe",),
}


class Audio:
    """The endpoints, as ASGI routes by path."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes
        self.routes: dict[str, Endpoint] = {
            TRANSCRIPTIONS: partial(self._answer, TranscriptionRequest),
            TRANSLATIONS: partial(self._answer, TranslationRequest),
        }

    async def _answer(
        self, kind: type[TranslationRequest], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with ErrorResponses(send):
            form = await self._read_form(scope, receive)
            request = _decode(kind, form)
            call = self._open(request, form, dict(scope["headers"]))
            del form  # its file is the call's
            watch = DisconnectWatcher(call, receive)
            try:
                if request.stream:
                    if request.queue_position:
                        self._router.follow_position(call)
                    times = request.response_format == "verbose_json"
                    await _EventSender(call, send, times=times).send_stream()
                else:
                    await call.until_done()
                    await _send_whole(call, request, send)
            finally:
                watch.stop_watching()
                call.cancel()

    async def _read_form(self, scope: Scope, receive: Receive) -> Form:
        body = await read_body(scope, receive, self._max_body_bytes)
        kind = dict(scope["headers"]).get(b"content-type", b"")
        if len(body) > _LARGE_BYTES:
            return await asyncio.to_thread(read_form, kind, body)
        return read_form(kind, body)

    def _open(
        self, request: TranslationRequest, form: Form, headers: dict[bytes, bytes]
    ) -> TranscriptionCall:
        speech = SpeechParams(
            len(form.file),
            form.digest,
            request.language or "",
            request.prompt or "",
            not isinstance(request, TranscriptionRequest),
            _choose_times(request),
        )
        params = SamplingParams(temperature=request.temperature, seed=request.seed)
        model = find_model(self._router, request.model, ("transcribe",)).status.name
        call = TranscriptionCall(
            *(model, params, speech, form.file), stream=bool(request.stream), key=api_key(headers)
        )
        if self._router.chooses:
            call.session = session_of(headers)
        self._router.queue_call(call, request.timeout_s)
        return call


def _decode(kind: type[TranslationRequest], form: Form) -> TranslationRequest:
    request = decode(kind, form.fields)
    if request.stream and request.response_format in ("srt", "vtt"):
        raise RequestError(
            f"stream: {request.response_format} is not streamed; verbose_json streams times",
            param="stream",
        )
    if request.stream and "word" in _granularities(request):
        raise RequestError(
            "timestamp_granularities: the times of words are not streamed; leave out stream",
            param="timestamp_granularities",
        )
    if _granularities(request) and request.response_format != "verbose_json":
        raise RequestError(
            "timestamp_granularities: times are in verbose_json only; set response_format",
            param="timestamp_granularities",
        )
    return request


def _granularities(request: TranslationRequest) -> Sequence[str]:
    """Return what times were asked for."""
    asked = request.timestamp_granularities if isinstance(request, TranscriptionRequest) else None
    return asked or ()


def _choose_times(request: TranslationRequest) -> Any:
    """Return `SpeechParams.timestamps`."""
    if "word" in _granularities(request):
        return "word"
    return "" if request.response_format in ("json", "text") else "segment"


async def _send_whole(call: TranscriptionCall, request: TranslationRequest, send: Send) -> None:
    text = _join(call.segments)
    match request.response_format:
        case "json":
            await send_json(send, _encode(Transcription(text, _measure(call))))
        case "verbose_json":
            await send_json(send, _encode(_describe(call, request, text)))
        case "text":
            await _send_text(send, f"{text}\n")
        case "srt":
            await _send_text(send, write_srt(call.segments))
        case "vtt":
            await _send_text(send, write_vtt(call.segments))


async def _send_text(send: Send, text: str) -> None:
    body = text.encode()
    headers = [_TEXT, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _EventSender:
    """Sends the segments of a transcript as they come, as events."""

    def __init__(self, call: TranscriptionCall, send: Send, *, times: bool) -> None:
        self._call = call
        self._send = send
        self._times = times
        self._begun = self._has_text = False
        self._count = 0

    async def send_stream(self) -> None:
        """Send all of it; a failure before the first part is raised."""
        call = self._call
        try:
            await self._send_places()
            while segments := await call.next_segments():
                for segment in segments:
                    await self._send_segment(segment)
        except ClientClosed:
            raise
        except RequestError as error:
            if not self._begun:
                raise
            body = b"data: " + envelope(error) + b"\n\n"
            await self._send({"type": "http.response.body", "body": body})
            return
        done = TextDone(_join(call.segments), _count(call))
        if self._times:
            done.language, done.duration = call.language, call.duration_s
        await self._send_event(done)
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send_places(self) -> None:
        """Send the position in the queue, and each new one, if the call follows it."""
        place = self._call.place
        while place is not None:
            await self._write(b": queue position %d\n\n" % place)
            place = await self._call.next_place(place)

    async def _send_segment(self, segment: SpokenSegment) -> None:
        text = segment.text if self._has_text else segment.text.lstrip()
        self._has_text = self._has_text or bool(text)
        if text:
            await self._send_event(TextDelta(text))
        if self._times:
            start, end = round(segment.start_s, 2), round(segment.end_s, 2)
            await self._send_event(TextSegment(str(self._count), start, end, segment.text))
        self._count += 1

    async def _send_event(self, event: TextDelta | TextSegment | TextDone) -> None:
        await self._write(b"data: " + _encode(event) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            head = {"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM]}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


def _join(segments: Sequence[SpokenSegment]) -> str:
    return "".join(one.text for one in segments).strip()


def _measure(call: TranscriptionCall) -> DurationUsage:
    return DurationUsage("duration", math.ceil(call.duration_s))


def _count(call: TranscriptionCall) -> TokenUsage:
    read, written = call.prompt_tokens, call.answer_tokens
    return TokenUsage("tokens", read, written, read + written)


def _describe(call: TranscriptionCall, request: TranslationRequest, text: str) -> Transcription:
    asked = _granularities(request) or ("segment",)
    transcribes = isinstance(request, TranscriptionRequest)
    temperature = request.temperature or 0.0
    segments = [
        Segment(
            at,
            one.seek,
            round(one.start_s, 2),
            round(one.end_s, 2),
            one.text,
            list(one.tokens),
            temperature,
            one.logprob,
            one.compression,
            one.no_speech,
        )
        for at, one in enumerate(call.segments)
    ]
    words = [
        Word(word.text.strip(), round(word.start_s, 2), round(word.end_s, 2))
        for one in call.segments
        for word in one.words
    ]
    return Transcription(
        text,
        _measure(call),
        "transcribe" if transcribes else "translate",
        call.language,
        call.duration_s,
        segments if "segment" in asked else UNSET,
        words if "word" in asked else UNSET,
    )


_PIECES = (TextDelta, TextSegment, TextDone, OpenAIError)
_operation = partial(Operation, tag="audio", body=FORM, pieces=_PIECES, texts=True)
OPERATIONS = (
    _operation(TRANSCRIPTIONS, "The text of a recording", TranscriptionRequest, Transcription),
    _operation(
        TRANSLATIONS, "The text of a recording, in English", TranslationRequest, Transcription
    ),
)
