"""An engine that hears the words of a text file."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from servekit.engines.api.base import Report, SpeechJob, SpeechOutput, StepOutput
from servekit.engines.echo.engine import EchoEngine
from servekit.errors import RequestError
from servekit.protocol.messages import (
    ModelInfo,
    SpeechParams,
    SpokenSegment,
    SpokenWord,
    Transcript,
)


class HearingEngine(EchoEngine):
    """An echo engine that also hears: a word in each window, with `waits` once it is told."""

    def load(self, report: Report) -> ModelInfo:
        self.jobs: list[SpeechJob] = []
        info = super().load(report)
        return replace(info, serves=(*info.serves, "transcribe"))

    def read_recording(self, file: bytes, speech: SpeechParams) -> object:
        assert len(file) == speech.size_bytes
        if b"noise" in file:
            raise RequestError("file: it is noise", param="file")
        return file.decode()

    def transcribe(self, job: SpeechJob) -> None:
        self.jobs.append(job)
        if not self._options.get("waits"):
            self.hear(job)

    def hear(self, job: SpeechJob, *, first: int = 0, last: int | None = None) -> None:
        """Emit some words of a job: all, or these windows."""
        words = str(job.recording).split(" ")
        outputs: list[StepOutput] = []
        for at, word in list(enumerate(words))[first:last]:
            spoken = (SpokenWord(word, at, at + 0.5),) if job.speech.timestamps == "word" else ()
            segment = SpokenSegment(f" {word}", at, at + 0.75, (at,), -0.5, 1.0, spoken, 100 * at)
            heard = Transcript(
                *((segment,), job.speech.language or "english", len(words) + 0.1),
                repeats=not job.params.temperature,
            )
            finish: Literal["stop"] | None = "stop" if at == len(words) - 1 else None
            outputs.append(SpeechOutput(job.id, [at], finish, speech=heard, prompt_tokens=3))
        self._emit(outputs)
