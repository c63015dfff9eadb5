"""Transcription by faster-whisper: its loop cuts recordings into windows, a batch writes them.

The library's loop runs in a thread for each recording (`SteppedCall`), and pauses where a window is
to be written. A step writes the windows of several recordings in one call of CTranslate2. Windows
with samples, and those with the times of words, are written one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper import transcribe
from faster_whisper.tokenizer import Tokenizer
from numpy.typing import NDArray

from servekit.engines.api.base import SpeechJob, SpeechOutput, StepOutput
from servekit.engines.api.job_state import TurnRunner
from servekit.engines.faster_whisper.recordings import Recording, RecordingReader
from servekit.engines.faster_whisper.windows import SteppedWhisper, Window
from servekit.engines.media.spoken_languages import NAMES
from servekit.engines.media.stepped_call import SteppedCall
from servekit.errors import RequestError, describe_error
from servekit.protocol.messages import SpokenSegment, SpokenWord, Transcript

_library: Any = transcribe  # typed in part
#: As the library has it.
BEAM_SIZE = 5
#: Temperatures of the library for a window whose text repeats itself, or is unlikely.
_FALLBACK = (0.2, 0.4, 0.6, 0.8, 1.0)
#: Errors of the library for what it cannot transcribe. Others mean that a step failed.
_MISFITS = (ValueError, TypeError, LookupError)


class SpeechRow:
    """A recording that is transcribed, and what was heard in its last window."""

    def __init__(self, job: SpeechJob, on_progress: Callable[[], None]) -> None:
        assert isinstance(job.recording, Recording)
        self.job, self.recording = job, job.recording
        self.cancelled = False
        self.ended: StepOutput | None = None  # never: a transcription begins at the beginning
        self.language = self.recording.language
        self.tokenizer: Any = None
        self.call: SteppedCall | None = None
        self.window: Window | None = None  # to be written
        self.on_progress = on_progress
        self.segments: list[SpokenSegment] = []
        self.repeats = True  # another worker would write the same
        self._written = 0  # tokens since the last output

    def note_window(self, result: Any) -> None:
        """Note what was written of a window."""
        self._written += len(result.sequences_ids[0])

    def note_segment(self, segment: Any) -> None:
        """Note a segment of the library."""
        words = tuple(
            SpokenWord(word.word, float(word.start), float(word.end))
            for word in segment.words or ()
        )
        self.segments.append(
            SpokenSegment(
                *(segment.text, float(segment.start), float(segment.end), tuple(segment.tokens)),
                *(segment.avg_logprob, segment.compression_ratio, words, segment.seek),
                no_speech=segment.no_speech_prob,
            )
        )

    def make_output(self) -> SpeechOutput:
        """Return what was heard since the last output."""
        assert self.call is not None
        language = NAMES.get(self.language, self.language)
        heard = Transcript(
            tuple(self.segments), language, self.recording.duration_s, repeats=self.repeats
        )
        output = SpeechOutput(
            self.job.id, [0] * self._written, "stop" if self.call.done else None, speech=heard,
            prompt_tokens=len(self.recording.prompt),
        )  # fmt: skip
        self.segments, self._written = [], 0
        return output


class TranscriptionRunner(TurnRunner[SpeechRow]):
    """Runner of recordings: a step goes on with those that can, or writes windows of several.

    A recording is `_ready` to go on by the library, or `_posted` with a window.
    """

    def __init__(self, whisper: Any, reader: RecordingReader, seats: int, options: Any) -> None:
        super().__init__()
        self._whisper = whisper
        self._model: Any = whisper.model
        self._reader = reader
        self._options = options
        self._ready: deque[SpeechRow] = deque()
        self._posted: deque[SpeechRow] = deque()
        #: Windows in one call.
        self.seats = seats
        self._writing = 0

    @property
    def kv_used(self) -> float:
        return self._writing / self.seats

    def add(self, row: SpeechRow) -> None:
        super().add(row)
        self._ready.append(row)

    def cancel(self, row: SpeechRow) -> None:
        self._drop(row)
        if row.call is not None:
            row.call.abandon()

    def close(self) -> None:
        while self._rows:
            self.cancel(self._rows[0])

    def step(self) -> list[tuple[SpeechRow, StepOutput]]:
        outputs: list[tuple[SpeechRow, StepOutput]] = []
        if self._ready:
            ready, self._ready = self._ready, deque()
            for row in ready:
                outputs += self._resume(row)
        elif self._posted:
            rows = self._take_batch()
            try:
                self._write_windows(rows)
            except (MemoryError, RuntimeError) as error:
                if not _lacks_memory(error):
                    raise
                return [self._fail(row, MemoryError()) for row in rows]
            finally:
                self._writing = 0
            self._ready += rows
        return outputs

    def _drop(self, row: SpeechRow) -> None:
        super().cancel(row)
        for queue in (self._ready, self._posted):
            if row in queue:
                queue.remove(row)

    # ---- windows

    def _take_batch(self) -> list[SpeechRow]:
        """Take the recording that has waited for longest, and those that fit to it."""
        first, *others = self._posted
        rows, window = [first], _window_of(first)
        if not window.alone:
            kind = window.kind
            fitting = ((row, _window_of(row)) for row in others)
            rows += [row for row, one in fitting if not one.alone and one.kind == kind]
        rows = rows[: self.seats]
        for row in rows:
            self._posted.remove(row)
        return rows

    def _write_windows(self, rows: list[SpeechRow]) -> None:
        """Have the model write the windows of some recordings in one call."""
        windows = [_window_of(row) for row in rows]
        self._writing = len(windows)
        encoded = windows[0].encoded
        if encoded is None:
            encoded = self._encode(rows)
        if any(window.language_at is not None for window in windows):
            self._find_languages(rows, encoded)
        results = self._model.generate(
            encoded, [window.prompt for window in windows], **windows[0].settings
        )
        for row, window, result in zip(rows, windows, results, strict=True):
            window.result = result
            window.encoded = encoded if window.alone else None
            row.note_window(result)

    def _encode(self, rows: list[SpeechRow]) -> Any:
        """Return what the encoder makes of windows, [windows, positions, size].

        On a CPU one by one: a window keeps it busy, and fits into its cache better than several.
        """
        features = [_window_of(row).features for row in rows]
        if self._model.device != "cpu" or len(rows) == 1:
            return self._model.encode(_store(np.stack(features)))
        parts = []
        for row, one in zip(rows, features, strict=True):
            made = self._model.encode(_store(one[None]))
            if made.dtype != ctranslate2.DataType.float32:  # numpy has no bfloat16
                made = made.to(ctranslate2.DataType.float32)
            parts.append(np.array(made))
            row.on_progress()
        return _store(np.concatenate(parts))

    def _find_languages(self, rows: list[SpeechRow], encoded: Any) -> None:
        """Write the languages that are found into prompts."""
        for row, found in zip(rows, self._model.detect_language(encoded), strict=True):
            window = _window_of(row)
            if window.language_at is not None:
                token, _ = found[0]
                row.language, row.tokenizer.language_code = (token.strip("<|>"),) * 2
                row.tokenizer.language = row.tokenizer.tokenizer.token_to_id(token)
                window.prompt[window.language_at] = row.tokenizer.language

    # ---- one recording

    def _resume(self, row: SpeechRow) -> list[tuple[SpeechRow, StepOutput]]:
        """Let the library go on with a recording, until it needs a window."""
        if row.call is None:
            row.call = SteppedCall(partial(self._transcribe, row))
        try:
            row.call.resume()
        except (RequestError, MemoryError, RuntimeError, *_MISFITS) as error:
            if isinstance(error, RuntimeError) and not _lacks_memory(error):
                raise
            return [self._fail(row, error)]
        if row.call.done:
            self._drop(row)
        else:
            self._posted.append(row)
        if row.cancelled or not (row.segments or row.call.done):  # silence
            return []
        return [(row, row.make_output())]

    def _fail(self, row: SpeechRow, error: BaseException) -> tuple[SpeechRow, StepOutput]:
        self.cancel(row)
        return row, _describe_failure(row, error)

    def _transcribe(self, row: SpeechRow) -> None:
        """Transcribe a recording by the library, which pauses for each window."""
        recording, speech = row.recording, row.job.speech
        if recording.speech == []:
            return
        language = row.language or self._reader.languages[0]
        task = "translate" if speech.translate else "transcribe"
        row.tokenizer = Tokenizer(
            self._whisper.hf_tokenizer, self._reader.is_multilingual, task=task, language=language
        )
        whisper: Any = SteppedWhisper(self._whisper, partial(self._await_window, row))
        found = whisper.generate_segments(
            recording.features, row.tokenizer, self._make_options(row), log_progress=False
        )
        if recording.speech is not None:
            rate = self._whisper.feature_extractor.sampling_rate
            found = _library.restore_speech_timestamps(found, recording.speech, rate)
        for segment in found:
            row.note_segment(segment)

    def _make_options(self, row: SpeechRow) -> Any:
        """Return the library's options; what the model's section leaves out is its default."""
        options, asked = self._options, row.job.params.temperature or 0.0
        recording = row.recording
        falls_back = bool(options.get("fallback")) and not asked
        silent = options.get("no_speech_threshold")
        return _library.TranscriptionOptions(
            beam_size=options.get("beam_size") or BEAM_SIZE,
            best_of=5,
            patience=1.0,
            length_penalty=1.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            log_prob_threshold=-1.0 if falls_back or silent is not None else None,
            no_speech_threshold=silent,
            compression_ratio_threshold=2.4 if falls_back else None,
            condition_on_previous_text=bool(options.get("condition_on_previous_text")),
            prompt_reset_on_temperature=0.5,
            temperatures=[asked, *(_FALLBACK if falls_back else ())],
            initial_prompt=recording.prompt or None,
            prefix=None,
            suppress_blank=True,
            suppress_tokens=_library.get_suppressed_tokens(row.tokenizer, [-1]),
            without_timestamps=not recording.timed,
            max_initial_timestamp=1.0,
            word_timestamps=row.job.speech.timestamps == "word",
            prepend_punctuations="\"'“¿([{-",
            append_punctuations="\"'.。,，!！?？:：”)]}、",
            multilingual=False,
            max_new_tokens=None,
            clip_timestamps="0",
            hallucination_silence_threshold=None,
            hotwords=None,
        )

    def _await_window(self, row: SpeechRow, window: Window) -> None:
        """Wait until a window is written; the library's loop calls this."""
        assert row.call is not None
        samples = window.settings.get("sampling_temperature", 0.0) > 0
        row.repeats = row.repeats and not samples
        window.alone = samples or row.job.speech.timestamps == "word"
        unknown = len(window.prompt) - window.prompt[::-1].index(row.tokenizer.sot)
        window.language_at = None if row.language else unknown
        limits = row.job.params.max_tokens, self._options.get("max_new_tokens")
        if stated := [limit for limit in limits if limit is not None]:
            # CTranslate2 writes half of `max_length`, and no more than this beside the prompt.
            new = min(stated)
            longest = max(2 * new, len(window.prompt) + new)
            window.settings["max_length"] = min(window.settings["max_length"], longest)
        row.window = window
        row.call.pause()


def _window_of(row: SpeechRow) -> Window:
    assert row.window is not None
    return row.window


def _store(numbers: NDArray[np.float32]) -> Any:
    return ctranslate2.StorageView.from_array(np.ascontiguousarray(numbers))


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def _describe_failure(row: SpeechRow, error: BaseException) -> StepOutput:
    if isinstance(error, RequestError):
        return StepOutput(row.job.id, [], error=error.message, param=error.param or "file")
    if _lacks_memory(error):
        return StepOutput(row.job.id, [], error="There is no memory left for this recording.")
    why = f"file: the model cannot transcribe this recording: {describe_error(error)}"
    return StepOutput(row.job.id, [], error=why, param="file")
