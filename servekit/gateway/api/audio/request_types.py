"""The forms of transcriptions and translations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from servekit.gateway.api.fields import ModelName, Stream, doc, unserved
from servekit.gateway.api.openai.schema import Seed, Timeout

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["word", "segment"]
#: OpenAI bounds the temperature of speech so.
SpeechTemperature = Annotated[
    float, doc("0 is greedy and the default; higher values sample, with `seed`", ge=0, le=1)
]


class TranslationRequest(msgspec.Struct, kw_only=True):
    """Form of POST /v1/audio/translations."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"}, examples=["speech.wav"])]
    """The recording: WAV; or FLAC, Ogg or MP3, if soundfile is installed. It may be as long as the
    model's option `max_audio_s` says, and as large as `server.max_body_bytes`."""
    model: Annotated[ModelName, Meta(examples=["whisper"])] = ""
    language: Annotated[str, doc("The recording's language, as `de` or `german`")] | None = None
    """The language that is spoken, as `de` or `german`; by default it is found out."""
    prompt: str | None = None
    """Text before the recording: its spelling and style are kept. The last tokens that fit count,
    223 with Whisper."""
    response_format: ResponseFormat = "json"
    """srt and vtt are subtitles; verbose_json has the times of segments."""
    temperature: SpeechTemperature | None = None
    seed: Annotated[Seed, doc("servekit's own; by default the recording determines it")] | None = (
        None
    )
    stream: Stream | None = None
    """Send each segment once it is heard, as events, with json, text or verbose_json, which adds
    an event with the times of each. A segment comes with its window of 30 s."""
    queue_position: bool | None = None
    """servekit's own: send a comment for each new position in the queue before the events of a
    stream."""
    timeout_s: Timeout | None = None


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """Form of POST /v1/audio/transcriptions."""

    timestamp_granularities: list[Granularity] | None = None
    """With verbose_json: the times of segments, as by default, of words, or both. Sent as
    `timestamp_granularities[]`, once for each."""
    include: Annotated[Any, unserved([])] = None
    chunking_strategy: Annotated[Any, unserved("auto")] = None
    known_speaker_names: Annotated[Any, unserved([])] = None
    known_speaker_references: Annotated[Any, unserved([])] = None
