"""The answers of transcriptions and translations."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import doc

Heard = Annotated[str, doc("The text", "Good morning, everybody.")]
Time = Annotated[float, doc("Time in the recording, s", 1.5)]


class DurationUsage(Struct):
    """The length of a recording."""

    type: Literal["duration"]
    seconds: Annotated[int, doc("Seconds, rounded up", 3)]


class TokenUsage(Struct):
    """Tokens of a transcript."""

    type: Literal["tokens"]
    input_tokens: Annotated[int, doc("Tokens of the prompt, 0 without one")]
    output_tokens: Annotated[int, doc("Tokens of the transcript, with those of times", 12)]
    total_tokens: Annotated[int, doc("Their sum", 12)]


class Segment(Struct):
    """A part of a transcript, mostly a sentence."""

    id: Annotated[int, doc("Position in the list")]
    seek: Annotated[int, doc("Where its window begins, in hundredths of a second")]
    start: Time
    end: Time
    text: Heard
    tokens: Annotated[list[int], doc("Its token ids, with those of times", [50364, 2205, 2446])]
    temperature: Annotated[float, doc("The temperature of the request")]
    avg_logprob: float | None
    """Mean log probability of the tokens in its window; null if it is not known."""
    compression_ratio: float
    """How many times shorter the text of its window is compressed: much means repetition."""
    no_speech_prob: float | None
    """Probability that its window has no speech; null if it is not known."""


class Word(Struct):
    """A word of a transcript."""

    word: Annotated[str, doc("The word", "morning")]
    start: Time
    end: Time


class Transcription(Struct):
    """The answer of /v1/audio/transcriptions, as json. With verbose_json it has all fields."""

    text: Heard
    usage: Annotated[DurationUsage, doc("The length of the recording")]
    task: Annotated[Literal["transcribe", "translate"], doc("What was done")] | UnsetType = UNSET
    language: Annotated[str, doc("The language that is spoken", "english")] | UnsetType = UNSET
    duration: Annotated[float, doc("Length of the recording, s", 2.4)] | UnsetType = UNSET
    segments: Annotated[list[Segment], doc("The segments, unless only words were asked for")] | (
        UnsetType
    ) = UNSET
    words: Annotated[list[Word], doc("The words, if they were asked for")] | UnsetType = UNSET


class TextDelta(Struct, tag="transcript.text.delta", tag_field="type"):
    """An event of a streamed transcript: more text."""

    delta: Annotated[str, doc("The text of a segment", "Good morning,")]


class TextSegment(Struct, tag="transcript.text.segment", tag_field="type"):
    """An event of a streamed transcript with times: a segment, after its text."""

    id: Annotated[str, doc("Its number, from 0 on", "0")]
    start: Time
    end: Time
    text: Heard


class TextDone(Struct, tag="transcript.text.done", tag_field="type"):
    """The last event of a streamed transcript."""

    text: Heard
    usage: Annotated[TokenUsage, doc("Token counts")]
    language: Annotated[str, doc("The language that is spoken, with times", "english")] | (
        UnsetType
    ) = UNSET
    duration: Annotated[float, doc("Length of the recording, s, with times", 2.4)] | UnsetType = (
        UNSET
    )
