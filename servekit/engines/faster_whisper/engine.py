"""The faster-whisper engine: transcription by CTranslate2, without torch."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from servekit.engines.api.base import Job, Load, Report, SpeechJob
from servekit.engines.api.threaded_engine import LoopedEngine
from servekit.engines.faster_whisper.loading import load_whisper
from servekit.engines.faster_whisper.recordings import RecordingReader
from servekit.engines.faster_whisper.transcription import SpeechRow, TranscriptionRunner
from servekit.errors import LoadError, RequestError, Unsupported
from servekit.protocol.messages import ChatMessage, ModelInfo, SpeechParams, WorkerSpec

#: Recordings that are written together, and those with features in memory.
CPU_SLOTS, CUDA_SLOTS = 8, 16
#: Share of a core that a CPU's work takes at least: while CTranslate2 writes it reports nothing.
_BUSY = 0.25
NO_TEXT = "This model does not generate text."


class FasterWhisperEngine(LoopedEngine):
    """The engine; its options are `config.engines.options.FasterWhisperOptions`."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._whisper: Any = None
        self._reader: RecordingReader
        self._seen = (0.0, 0.0)  # the clock and the CPU time at the last look

    def load(self, report: Report) -> ModelInfo:
        spec = self.spec
        self._whisper, header = load_whisper(spec, report)
        model = self._whisper.model
        self._reader = reader = RecordingReader(self._whisper, spec)
        on_gpu = spec.device == "cuda"
        slots = int(spec.options.get("slots") or (CUDA_SLOTS if on_gpu else CPU_SLOTS))
        self._runner: TranscriptionRunner = TranscriptionRunner(
            self._whisper, reader, slots, spec.options
        )
        self.codec = WhisperCodec(self._whisper.hf_tokenizer)
        self.vocab_size = self._whisper.hf_tokenizer.get_vocab_size()
        hears = "speech of several languages" if reader.is_multilingual else "English speech"
        return ModelInfo(
            max_context=self._whisper.max_length,
            slots=slots,
            chat=False,
            architecture=header.name,
            dtype=model.compute_type,
            device="cuda:0" if on_gpu else "cpu",
            parameters=sum(math.prod(one.shape) for one in header.variables.values()),
            weights_bytes=sum(one.size for one in header.variables.values()),
            detail=f"{hears}, {slots} recordings at once",
            serves=("transcribe", "tokenize", "detokenize"),
            sleeps=on_gpu,
        )

    def read_recording(self, file: bytes, speech: SpeechParams) -> object:
        return self._reader.read_speech(file, speech)

    def transcribe(self, job: SpeechJob) -> None:
        if job.params.seed is not None and job.params.temperature:
            raise Unsupported(
                "seed: CTranslate2's samples are not the same each time; leave it out, or set"
                " temperature to 0",
                param="seed",
            )
        self._take(SpeechRow(job, self._note_progress))

    def submit(self, job: Job) -> None:
        raise Unsupported(NO_TEXT, param="model")

    def load_now(self) -> Load:
        """Return the current load. On a CPU, work is progress: a window may take a minute there."""
        now, used = time.monotonic(), time.process_time()
        (then, before), self._seen = self._seen, (now, used)
        if self.spec.device == "cpu" and used - before > _BUSY * (now - then):
            self._note_progress()
        return super().load_now()

    def sleep(self) -> None:
        self._whisper.model.unload_model(to_cpu=True)

    def wake(self) -> None:
        try:
            self._whisper.model.load_model()
        except RuntimeError as error:
            raise LoadError(f"The model cannot be woken: {error}", permanent=False) from error


class WhisperCodec:
    """The tokenizer of a Whisper model, for what is not speech; see `base.Codec`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        raise RequestError("This model has no chat template.", param="messages")

    def decoder(self, markers: Collection[str] = ()) -> WhisperDecoder:
        return WhisperDecoder(self._tokenizer)


class WhisperDecoder:
    """A decoder that returns its text at the end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        return ""

    def flush(self) -> str:
        text: str = self._tokenizer.decode(self._ids)
        return text
