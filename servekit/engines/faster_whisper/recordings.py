"""What a request to transcribe becomes: log-mel features, and a prompt's ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from faster_whisper import vad
from numpy.typing import NDArray

from servekit.engines.media.recording import MAX_AUDIO_S, Samples, decode_recording
from servekit.engines.media.spoken_languages import NAMES, find_language
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import SpeechParams, WorkerSpec

_library: Any = vad  # typed in part


@dataclass(frozen=True)
class Recording:
    """A recording as its model hears it."""

    features: NDArray[np.float32]  # [mel bins, frames]
    timed: bool  # it is written with timestamps
    duration_s: float
    language: str  # its code as asked for; "": to be found out
    prompt: tuple[int, ...]
    #: The samples with speech, of which alone the features are; None: of all.
    speech: list[dict[str, int]] | None


class RecordingReader:
    """The reader of recordings for one model; any thread may use it."""

    def __init__(self, whisper: Any, spec: WorkerSpec) -> None:
        self._extractor: Any = whisper.feature_extractor
        self._tokenizer: Any = whisper.hf_tokenizer
        self._max_s = float(spec.options.get("max_audio_s") or MAX_AUDIO_S)
        self._filters = bool(spec.options.get("vad_filter"))
        self._most_prompt = whisper.max_length // 2 - 1
        self._end: int = self._tokenizer.token_to_id("<|endoftext|>")
        #: Whether it hears several languages, and translates. Another model hears English.
        self.is_multilingual = bool(whisper.model.is_multilingual)
        known = [code for code in NAMES if self._tokenizer.token_to_id(f"<|{code}|>") is not None]
        #: Codes of the languages that it hears.
        self.languages = tuple(known) if self.is_multilingual else ("en",)

    def read_speech(self, file: bytes, speech: SpeechParams) -> Recording:
        """Decode a recording, and check the request. Raises RequestError."""
        language = find_language(speech.language, self.languages) if speech.language else ""
        if not self.is_multilingual:
            language = "en"
            if speech.translate:
                raise Unsupported(
                    "this model hears English only, and does not translate", param="model"
                )
        prompt = self._encode_prompt(speech.prompt)
        rate = self._extractor.sampling_rate
        samples = decode_recording(file, rate, self._max_s)
        timed = bool(speech.timestamps) or len(samples) > self._extractor.n_samples
        duration_s = len(samples) / rate
        places = None
        if self._filters:
            places = _library.get_speech_timestamps(samples, _library.VadOptions())
            samples = _keep_speech(samples, places)
        features = self._extractor(samples)
        return Recording(features, timed, duration_s, language, prompt, places)

    def _encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return a prompt's last ids that fit, as the library has it."""
        if not text.strip():
            return ()
        ids: list[int] = self._tokenizer.encode(f" {text.strip()}", add_special_tokens=False).ids
        if any(id >= self._end for id in ids):
            raise RequestError(
                "prompt: it has one of the model's special tokens, such as <|en|>; leave these out",
                param="prompt",
            )
        return tuple(ids[-self._most_prompt :])


def _keep_speech(samples: Samples, places: list[dict[str, int]]) -> Samples:
    if not places:
        return samples[:0]
    parts, _ = _library.collect_chunks(samples, places)
    joined: Samples = np.concatenate(parts)
    return joined
