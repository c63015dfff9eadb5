"""Recordings to transcribe, and what was heard in them.

gateway → worker    Generate with SpeechParams; the file is its body, in pieces if it is long
worker → gateway    Transcript, in a Delta
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Value


class SpeechParams(Value, frozen=True):
    """Parameters of a request to transcribe a recording, beside its `SamplingParams`."""

    size_bytes: int  # of the file
    digest: bytes = b""  # SHA-256 of the file
    language: str = ""  # its name or code; "": found out
    prompt: str = ""  # text before the recording, in whose style the model goes on
    translate: bool = False  # write English
    timestamps: Literal["", "segment", "word"] = ""


class SpokenWord(Value, frozen=True):
    """A word and its time in the recording, s."""

    text: str
    start_s: float
    end_s: float


class SpokenSegment(Value, frozen=True):
    """A part of a recording, mostly a sentence, and its time in the recording, s."""

    text: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()
    logprob: float | None = None  # mean of the tokens in its window; None: not computed
    compression: float = 1.0  # how much shorter its text is compressed: repetitions stand out
    words: tuple[SpokenWord, ...] = ()  # if they were asked for
    seek: int = 0  # where its window begins, in hundredths of a second
    no_speech: float | None = None  # probability that its window is silent; None: not computed


class Transcript(Value, frozen=True):
    """The segments of a recording's next window, of 30 s or less."""

    segments: tuple[SpokenSegment, ...]
    language: str = ""  # its name in English, as asked for or found out
    duration_s: float = 0.0  # of the whole recording
    repeats: bool = True  # another worker would write the same
