"""Transcription by Whisper models: the library cuts recordings into windows, a batch writes them.

The library runs a recording from its beginning to its end in one call: it finds where a window
begins and ends, and makes segments of what is written. The call runs in a thread of its own
(`SteppedCall`), and pauses where a window of 30 s is to be written: this is done in a
`WindowBatch`, for all recordings together. Between two windows a recording holds nothing on the
device but its features.

The library itself writes the windows of a recording with the times of words, which need the
attention's weights, and of a model whose generation config says more than `token_rules` knows.
Such recordings take turns, a window after a window of the batch.
"""

from __future__ import annotations

import zlib
from collections import deque
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
from servekit.engines.media.spoken_languages import NAMES
from servekit.engines.media.stepped_call import SteppedCall, Stopped
from servekit.engines.transformers.batching import kv_cache
from servekit.engines.transformers.sleep import device_memory
from servekit.engines.transformers.speech.speech_reader import (
    Recording,
    SpeechReader,
    load_extractor,
)
from servekit.engines.transformers.speech.token_rules import find_other_settings
from servekit.engines.transformers.speech.window_batch import (
    Window,
    WindowBatch,
    count_encoder_bytes,
    count_seat_bytes,
)
from servekit.errors import RequestError, describe_error
from servekit.protocol.messages import (
    ModelInfo,
    SpokenSegment,
    SpokenWord,
    Transcript,
    WorkerSpec,
)

#: Recordings at once. Each keeps its features: 2 to 3 MiB for a minute.
CPU_SLOTS, CUDA_SLOTS = 8, 16
#: Errors of the library for what it cannot transcribe. Others mean that a step failed.
_MISFITS = (ValueError, TypeError, LookupError)
_library: Any = tokenization_whisper


class SpeechRow(LogitsProcessor):
    """A recording that is transcribed, and what was heard in its last window.

    It hears of each window. If the library writes, it also hears of each token, as a processor of
    logits that changes nothing.
    """

    def __init__(self, job: SpeechJob, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called for each layer of the encoder and for each of these tokens."""
        self.job = job
        self.cancelled = False
        self.ended: StepOutput | None = None  # never: a transcription begins at the beginning
        self.language = self.recording.language
        self.language_id: int | None = None  # if it was found by the batch
        self.alone = False  # the library writes
        self.window: Window | None = None  # to be written by the batch
        self.segments: list[SpokenSegment] = []
        self.tokens: list[int] = []
        self.call: SteppedCall | None = None
        self.on_progress = on_progress
        self.scored = bool(job.speech.timestamps)
        self._scores: Tensor | None = None  # of the next token, [vocabulary]
        self.logprobs: list[float] = []  # of the window's tokens
        self.seek = -1  # the frame at which the window begins, of 10 ms

    @property
    def recording(self) -> Recording:
        assert isinstance(self.job.recording, Recording)
        return self.job.recording

    @property
    def logprob(self) -> float | None:
        """Return the mean of the window's tokens so far; None if they have no scores."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    def begin_window(self, progress: Tensor) -> None:
        """Note where the next window begins; the library calls this.

        Without a batch, other recordings have their turns first.

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
        if self.alone and self.seek >= 0:
            self.call.pause()
        self.seek, self._scores, self.logprobs = seek, None, []
        if self.alone and self.job.params.temperature:
            torch.manual_seed(self.seed)

    @property
    def seed(self) -> int:
        """Return the window's seed; by default the file has one: a second attempt is the same."""
        asked = self.job.params.seed
        own = int.from_bytes(self.job.speech.digest[:7]) if asked is None else asked
        return (own + self.seek) % 2**63

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note a token. Raises Stopped if nobody waits for the transcript any more."""
        if self.cancelled:
            raise Stopped
        self.on_progress()
        if self.scored and len(scores) == 1:  # not of several beams
            if self._scores is not None:
                self.logprobs.append(float(self._scores[input_ids[0, -1]]))
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
    """Runner of recordings: a step is a pass over the windows of a batch, for a token of each.

    A recording is in one of three places: `_ready` to go on by the library, `_posted` with a
    window for the batch, or among the batch's windows. Those `_alone` take turns.
    """

    def __init__(
        self, model: PreTrainedModel, reader: SpeechReader, tokenizer: Any, spec: WorkerSpec
    ) -> None:
        super().__init__()
        self._model: Any = model
        self.reader = reader
        self._tokenizer = tokenizer
        self._attention: str = self._model.config._attn_implementation
        self.capacity: int = self._model.config.max_target_positions
        #: Settings of the generation config for which the library itself writes.
        self.other_settings = find_other_settings(model.generation_config)
        self._ready: deque[SpeechRow] = deque()
        self._posted: deque[SpeechRow] = deque()
        self._alone: deque[SpeechRow] = deque()
        self._alone_next = False
        #: Windows that the batch can have.
        self.seats = _count_seats(self._model, spec)
        self._graphs = spec.options.get("decode") != "eager"
        # On a slow CPU a large encoder takes longer for a window than a stalled engine is given.
        for layer in self._model.get_encoder().layers:
            layer.register_forward_hook(lambda *_: self._note_progress())
        self.make_pages()

    @property
    def kv_used(self) -> float:
        return len(self._batch.windows) / self.seats

    def add(self, row: SpeechRow) -> None:
        super().add(row)
        row.alone = row.job.speech.timestamps == "word" or bool(self.other_settings)
        (self._alone if row.alone else self._ready).append(row)

    def cancel(self, row: SpeechRow) -> None:
        self._drop(row)
        if row.call is not None:
            row.call.abandon()

    def step(self) -> list[tuple[SpeechRow, StepOutput]]:
        """Begin windows, or write a token of each; go on with the recordings whose windows end."""
        outputs = []
        waiting = self._ready or self._posted or self._batch.windows
        if self._alone and (self._alone_next or not waiting):
            self._alone_next = False
            outputs += self._resume(self._alone.popleft())
        outputs += self._advance_batch()
        ready, self._ready = self._ready, deque()
        for row in ready:
            outputs += self._resume(row)
        return outputs

    def make_pages(self) -> None:
        self._batch = WindowBatch(self._model, self.seats, self._graphs)

    def drop_pages(self) -> None:
        del self._batch

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors on the device that are not the model's own and outlive its pages."""
        return ()

    def close(self) -> None:
        while self._rows:
            self.cancel(self._rows[0])

    def _drop(self, row: SpeechRow) -> None:
        super().cancel(row)
        for queue in (self._ready, self._posted, self._alone):
            if row in queue:
                queue.remove(row)
        if row.window in self._batch.windows:
            self._batch.free_seat(row.window)

    def _note_progress(self) -> None:
        if self._rows:
            self._rows[0].on_progress()

    def _advance_batch(self) -> list[tuple[SpeechRow, StepOutput]]:
        beginning = [
            self._posted.popleft() for _ in range(min(self._batch.free, len(self._posted)))
        ]
        if beginning:
            try:
                ended = self._batch.begin([row.window for row in beginning if row.window])
            except (MemoryError, torch.OutOfMemoryError, *_MISFITS) as error:
                return [self._fail(row, error) for row in beginning]
        elif self._batch.windows:
            ended = self._batch.step()
        else:
            return []
        self._ready += (row for row in self._rows if row.window in ended)
        self._alone_next |= bool(ended)
        return []

    def _resume(self, row: SpeechRow) -> list[tuple[SpeechRow, StepOutput]]:
        """Let the library go on with a recording, until it needs a window or has the next one."""
        if row.call is None:
            row.call = SteppedCall(partial(self._generate, row))
        try:
            with self._watching(row), self._attending(row.job.speech.timestamps == "word"):
                row.call.resume()
        except (RequestError, MemoryError, torch.OutOfMemoryError, *_MISFITS) as error:
            return [self._fail(row, error)]
        if row.call.done:
            self._drop(row)
        else:
            (self._alone if row.alone else self._posted).append(row)
        if row.cancelled or not (row.segments or row.call.done):  # silence
            return []
        return [(row, row.make_output())]

    def _fail(self, row: SpeechRow, error: BaseException) -> tuple[SpeechRow, StepOutput]:
        self.cancel(row)
        return row, _describe_failure(row, error)

    # ---- one recording

    @torch.no_grad()
    def _generate(self, row: SpeechRow) -> None:
        """Transcribe a recording by the library, which pauses for each window."""
        model, recording, speech = self._model, row.recording, row.job.speech
        features = recording.features.to(model.device, model.dtype)
        asked: dict[str, Any] = {}
        if self.reader.is_multilingual:
            if row.alone and not row.language:
                row.language = self._detect_language(features)
            asked |= {
                # The batch writes the one that it finds over any other.
                "language": row.language or next(iter(model.generation_config.lang_to_id)),
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

    def _write_window(
        self,
        row: SpeechRow,
        *,
        segment_input: Tensor,
        decoder_input_ids: Tensor,
        generation_config: Any,
        **_: Any,
    ) -> tuple[list[Tensor], list[Tensor], list[bool], list[bool], type[Tensor]]:
        """Let the batch write a window; the library calls this instead of its own method.

        Source of the arguments and results: WhisperGenerationMixin.generate_with_fallback.
        """
        assert row.call is not None
        [prompt] = decoder_input_ids.tolist()
        new, temperature = generation_config.max_new_tokens, row.job.params.temperature or 0.0
        row.window = window = Window(
            segment_input,
            prompt,
            generation_config.max_length if new is None else len(prompt) + new,
            timed=bool(generation_config.return_timestamps),
            scored=row.scored,
            temperature=temperature,
            top_k=generation_config.top_k or 0,
            noise=torch.Generator(self._model.device).manual_seed(row.seed)
            if temperature
            else None,
        )
        if self.reader.is_multilingual and not row.recording.language:
            self._set_language(row, window)
        row.call.pause()
        if window.language_at is not None:
            row.language_id = prompt[window.language_at]
            row.language = self._name_language(row.language_id)
        row.logprobs = window.logprobs[:-1] if row.scored else []  # the library notes no last one
        written = window.tokens
        if written[-1] == generation_config.eos_token_id:
            written = written[:-1]
        sequence = torch.tensor(written, dtype=torch.int64)
        return [sequence], [sequence], [False], [False], Tensor

    def _set_language(self, row: SpeechRow, window: Window) -> None:
        """Write the language that was found into a prompt, or its place."""
        start = self._model.generation_config.decoder_start_token_id
        place = len(window.prompt) - window.prompt[::-1].index(start)
        if row.language_id is None:
            window.language_at = place
        else:
            window.prompt[place] = row.language_id

    def _detect_language(self, features: Tensor) -> str:
        window = self.reader.window_frames
        [found] = self._model.detect_language(features, num_segment_frames=window).tolist()
        return self._name_language(found)

    def _name_language(self, found: int) -> str:
        """Return the code of a language by the id of its token."""
        codes = {id: token for token, id in self._model.generation_config.lang_to_id.items()}
        return str(codes[found]).strip("<|>")

    @contextmanager
    def _watching(self, row: SpeechRow) -> Iterator[None]:
        """Replace two methods of the model while the library goes on with a recording.

        One makes the segments of a window, which the library returns only after the last window:
        they are noted. The other writes a window: the batch does.
        """
        make = type(self._model)._retrieve_segment

        def note(**window: Any) -> Any:
            found = make(**window)
            self._note_window(row, window["seek_sequence"].tolist(), found[0])
            return found

        self._model._retrieve_segment = note
        if not row.alone:
            self._model.generate_with_fallback = partial(self._write_window, row)
        try:
            yield
        finally:
            del self._model._retrieve_segment
            if not row.alone:
                del self._model.generate_with_fallback

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
    runner = TranscriptionRunner(model, reader, tokenizer, spec)
    hears = "speech of several languages" if reader.is_multilingual else "English speech"
    how = f"{runner.seats} recordings at once"
    if runner.other_settings:
        how = f"recordings take turns, for {', '.join(runner.other_settings)} of the model"
    info = ModelInfo(
        max_context=runner.capacity,
        slots=runner.seats,
        chat=False,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kv_cache_bytes=runner.seats * count_seat_bytes(model.config, model.dtype.itemsize),
        detail=f"{hears}, {model.config._attn_implementation}, {how}",
        serves=("transcribe", "tokenize", "detokenize"),
        sleeps=True,
        max_audio_s=reader.max_s,
    )
    return runner, info


def _count_seats(model: Any, spec: WorkerSpec) -> int:
    """Return the number of recordings at once: as asked for, if their windows find room."""
    cuda = spec.device == "cuda"
    asked = int(spec.options.get("slots") or (CUDA_SLOTS if cuda else CPU_SLOTS))
    config, itemsize = model.config, model.dtype.itemsize
    room = device_memory.available_bytes(spec, model.device)
    room = int(room * (kv_cache.CUDA_FRACTION if cuda else kv_cache.CPU_FRACTION))
    room -= count_encoder_bytes(config, itemsize, cuda)
    room -= kv_cache.CUDA_HEADROOM_BYTES if cuda else 0
    return max(1, min(asked, room // count_seat_bytes(config, itemsize)))


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
