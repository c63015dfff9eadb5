"""Transcription by Whisper models: the library's own generation, window by window.

A step is one window of 30 s of one recording; recordings take turns, so that an hour of speech does
not delay a sentence for long. The library runs a recording from its beginning to its end in one
call. That call runs in a thread of its own, and pauses where the library tells the progress of a
window (`SteppedCall`); between two windows it holds nothing on the device but its features.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.models.whisper import tokenization_whisper

from servekit.engines.api.base import SpeechJob, SpeechOutput, StepOutput
from servekit.engines.api.job_state import TurnRunner
from servekit.engines.transformers.speech.speech_reader import (
    NAMES,
    Recording,
    SpeechReader,
    load_extractor,
)
from servekit.engines.transformers.speech.stepped_call import SteppedCall, Stopped
from servekit.errors import RequestError, describe_error
from servekit.protocol.messages import (
    ModelInfo,
    SpokenSegment,
    SpokenWord,
    Transcript,
    WorkerSpec,
)

#: Recordings at once. They take turns, and each keeps its features: 2 to 3 MiB for a minute.
SLOTS = 8
#: Errors of the library for what it cannot transcribe. Others mean that a step failed.
_MISFITS = (ValueError, TypeError, LookupError)
_library: Any = tokenization_whisper


class SpeechRow(LogitsProcessor):
    """A recording that is transcribed, and what was heard in its last window.

    It hears of each window, and of each token as a processor of logits that changes nothing.
    """

    def __init__(self, job: SpeechJob, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called for each layer of the encoder and for each token."""
        self.job = job
        self.cancelled = False
        self.ended: StepOutput | None = None  # never: a transcription begins at the beginning
        self.language = self.recording.language
        self.segments: list[SpokenSegment] = []
        self.tokens: list[int] = []
        self.call: SteppedCall | None = None
        self.on_progress = on_progress
        self._scored = bool(job.speech.timestamps)
        self._scores: Tensor | None = None  # of the next token, [vocabulary]
        self._logprobs: list[float] = []  # of the window's tokens
        self.seek = -1  # the frame at which the window begins, of 10 ms

    @property
    def recording(self) -> Recording:
        assert isinstance(self.job.recording, Recording)
        return self.job.recording

    @property
    def logprob(self) -> float | None:
        """Return the mean of the window's tokens so far; None if they have no scores."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else None

    def begin_window(self, progress: Tensor) -> None:
        """Let other recordings have their turns before the next window; the library calls this.

        `progress` is [1, 2]: the frame of the recording, and how many there are. Raises
        RequestError if the model has read nothing of the last window, as it would go on for ever.
        """
        assert self.call is not None
        seek = int(progress[0, 0])
        if seek <= self.seek:
            raise RequestError(
                f"file: the model does not come further than {seek / 100:.2f} s of this recording;"
                " another language, prompt or temperature may help",
                param="file",
            )
        if self.seek >= 0:
            self.call.pause()
        self.seek, self._scores, self._logprobs = seek, None, []
        if self.job.params.temperature:
            torch.manual_seed((self._seed + seek) % 2**63)

    @property
    def _seed(self) -> int:
        """Return the seed, by default one of the file: a second attempt repeats the first."""
        asked = self.job.params.seed
        return int.from_bytes(self.job.speech.digest[:7]) if asked is None else asked

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note a token. Raises Stopped if nobody waits for the transcript any more."""
        if self.cancelled:
            raise Stopped
        self.on_progress()
        if self._scored and len(scores) == 1:  # not of several beams
            if self._scores is not None:
                self._logprobs.append(float(self._scores[input_ids[0, -1]]))
            self._scores = scores[0].float().log_softmax(-1)
        return scores

    def make_output(self) -> SpeechOutput:
        """Return what was heard since the last output."""
        assert self.call is not None
        language = NAMES.get(self.language, self.language)
        heard = Transcript(tuple(self.segments), language, self.recording.duration_s)
        prompt = self.recording.prompt
        output = SpeechOutput(
            self.job.id, self.tokens, "stop" if self.call.done else None, speech=heard,
            prompt_tokens=0 if prompt is None else len(prompt),
        )  # fmt: skip
        self.segments, self.tokens = [], []
        return output


class TranscriptionRunner(TurnRunner[SpeechRow]):
    """Runner of recordings, a window a step."""

    def __init__(self, model: PreTrainedModel, reader: SpeechReader, tokenizer: Any) -> None:
        super().__init__()
        self._model: Any = model
        self.reader = reader
        self._tokenizer = tokenizer
        self._attention: str = self._model.config._attn_implementation
        self.capacity: int = self._model.config.max_target_positions

    def cancel(self, row: SpeechRow) -> None:
        super().cancel(row)
        if row.call is not None:
            row.call.stop()

    def step(self) -> list[tuple[SpeechRow, StepOutput]]:
        """Transcribe the next window of the recording whose turn it is."""
        row = self._rows[0]
        if row.call is None:
            row.call = SteppedCall(partial(self._generate, row))
        try:
            with self._noting(row), self._attending(row.job.speech.timestamps == "word"):
                row.call.resume()
        except (RequestError, MemoryError, torch.OutOfMemoryError, *_MISFITS) as error:
            self._rows.popleft()
            return [(row, _describe_failure(row, error))]
        if row.call.done:
            self._rows.popleft()
        self._rows.rotate(-1)
        if row.cancelled or not (row.segments or row.call.done):  # silence
            return []
        return [(row, row.make_output())]

    def make_pages(self) -> None:
        """Do nothing: a window creates its own cache."""

    def drop_pages(self) -> None:
        """Do nothing: no cache outlives its window."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors on the device that are not the model's own."""
        return ()

    def close(self) -> None:
        while self._rows:
            self.cancel(self._rows[0])

    # ---- one recording

    @torch.no_grad()
    def _generate(self, row: SpeechRow) -> None:
        """Transcribe a recording by the library; `row.begin_window` pauses between windows."""
        model, recording, speech = self._model, row.recording, row.job.speech
        features = recording.features.to(model.device, model.dtype)
        asked: dict[str, Any] = {}
        if self.reader.is_multilingual:
            row.language = row.language or self._detect_language(features)
            asked |= {
                "language": row.language,
                "task": "translate" if speech.translate else "transcribe",
            }
        if recording.prompt is not None:
            asked["prompt_ids"] = recording.prompt.to(model.device)
        if row.job.params.max_tokens is not None:
            asked["max_new_tokens"] = row.job.params.max_tokens
        if speech.timestamps == "word":
            mask = torch.zeros(1, features.shape[-1], dtype=torch.int64, device=model.device)
            mask[:, : recording.frames] = 1
            asked |= {"return_token_timestamps": True, "attention_mask": mask}
        model.generate(
            features,
            return_timestamps=bool(speech.timestamps) or recording.is_long,
            temperature=row.job.params.temperature or 0.0,
            monitor_progress=row.begin_window,
            logits_processor=LogitsProcessorList([row]),
            **asked,
        )

    def _detect_language(self, features: Tensor) -> str:
        window = self.reader.window_frames
        [found] = self._model.detect_language(features, num_segment_frames=window).tolist()
        codes = {id: token for token, id in self._model.generation_config.lang_to_id.items()}
        return str(codes[found]).strip("<|>")

    @contextmanager
    def _noting(self, row: SpeechRow) -> Iterator[None]:
        """Note the segments of the window that is transcribed meanwhile.

        The library makes them by this method of the model, and returns them after the last window.
        """
        make = type(self._model)._retrieve_segment

        def note(**window: Any) -> Any:
            found = make(**window)
            self._note_window(row, window["seek_sequence"].tolist(), found[0])
            return found

        self._model._retrieve_segment = note
        # On a slow CPU a large encoder takes longer for a window than a stalled engine is given.
        layers = self._model.get_encoder().layers
        hooks = [layer.register_forward_hook(lambda *_: row.on_progress()) for layer in layers]
        try:
            yield
        finally:
            del self._model._retrieve_segment
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _attending(self, words: bool) -> Iterator[None]:
        """Undo what the library does to find the times of words: it changes the attention."""
        if words:
            self._model.config._attn_implementation = "eager"
        try:
            yield
        finally:
            if words:
                self._model.config._attn_implementation = self._attention

    def _note_window(self, row: SpeechRow, tokens: list[int], found: list[dict[str, Any]]) -> None:
        row.tokens += tokens
        logprob, compression = row.logprob, _compress(self._decode(tokens))
        for one in found:
            ids: list[int] = one["tokens"].tolist()
            times = one.get("token_timestamps")
            words = () if times is None else self._split_words(row.language, ids, times.tolist())
            text, start_s, end_s = self._decode(ids), float(one["start"]), float(one["end"])
            row.segments.append(
                SpokenSegment(
                    text, start_s, end_s, tuple(ids), logprob, compression, words, row.seek
                )
            )

    def _split_words(
        self, language: str, ids: list[int], times: list[float]
    ) -> tuple[SpokenWord, ...]:
        """Return the words of a segment; `times` are those of the ends of its tokens, s."""
        begin = self._model.generation_config.no_timestamps_token_id + 1
        special = set(self._tokenizer.all_special_ids)
        kept = [at for at, id in enumerate(ids) if id < begin and id not in special]
        words, _, places = _library._combine_tokens_into_words(
            self._tokenizer, [ids[at] for at in kept], NAMES.get(language)
        )
        return tuple(
            SpokenWord(word, times[max(0, kept[spans[0]] - 1)], times[kept[spans[-1]]])
            for word, spans in zip(words, places, strict=True)
        )

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def make_transcription_runner(
    folder: Path, model: PreTrainedModel, tokenizer: Any, spec: WorkerSpec
) -> tuple[TranscriptionRunner, ModelInfo]:
    """Return the runner for a Whisper model, and its properties. Raises LoadError."""
    reader = SpeechReader(model, tokenizer, load_extractor(folder, spec), spec)
    runner = TranscriptionRunner(model, reader, tokenizer)
    hears = "speech of several languages" if reader.is_multilingual else "English speech"
    info = ModelInfo(
        max_context=runner.capacity,
        slots=spec.options.get("slots") or SLOTS,
        chat=False,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        detail=f"{hears}, {model.config._attn_implementation}, recordings take turns",
        serves=("transcribe", "tokenize", "detokenize"),
        sleeps=True,
    )
    return runner, info


def _describe_failure(row: SpeechRow, error: BaseException) -> StepOutput:
    if isinstance(error, RequestError):
        return StepOutput(row.job.id, [], error=error.message, param=error.param or "file")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return StepOutput(row.job.id, [], error="There is no memory left for this recording.")
    why = f"file: the model cannot transcribe this recording: {describe_error(error)}"
    return StepOutput(row.job.id, [], error=why, param="file")


def _compress(text: str) -> float:
    """Return how many times shorter a text is compressed, as OpenAI's Whisper computes it."""
    plain = text.encode()
    return len(plain) / len(zlib.compress(plain)) if plain else 1.0
