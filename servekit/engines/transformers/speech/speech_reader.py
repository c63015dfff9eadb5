"""What a request to transcribe becomes for the model: log-mel features and a prompt's ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from servekit.engines.media.recording import MAX_AUDIO_S, decode_recording
from servekit.engines.media.spoken_languages import find_language
from servekit.engines.transformers import weights
from servekit.errors import LoadError, RequestError, Unsupported, describe_error
from servekit.protocol.messages import SpeechParams, WorkerSpec


@dataclass(frozen=True)
class Recording:
    """A recording as its model hears it."""

    features: Tensor  # float32 [1, mel bins, frames]
    frames: int  # without the padding to a whole window
    is_long: bool  # it has several windows
    duration_s: float
    language: str = ""  # its code as asked for; "": to be found out
    prompt: Tensor | None = None  # int64 [tokens]


class SpeechReader:
    """The reader of recordings for one model; any thread may use it."""

    def __init__(self, model: Any, tokenizer: Any, extractor: Any, spec: WorkerSpec) -> None:
        """Raises LoadError if the files lack what a Whisper model needs."""
        if not hasattr(tokenizer, "get_prompt_ids") or not hasattr(extractor, "nb_max_frames"):
            raise LoadError(
                f"The tokenizer or the feature extractor of {spec.model} is no Whisper's."
            )
        self._tokenizer = tokenizer
        self._extractor = extractor
        #: The length that a recording may have, s.
        self.max_s = float(spec.options.get("max_audio_s") or MAX_AUDIO_S)
        self._most_prompt = model.config.max_target_positions // 2 - 1
        config = model.generation_config
        self._codes = {token.strip("<|>") for token in getattr(config, "lang_to_id", None) or ()}
        #: Whether it hears several languages, and translates. Another model hears English.
        self.is_multilingual = bool(self._codes) and getattr(config, "is_multilingual", True)
        self._has_tasks = bool(getattr(config, "task_to_id", None))
        self._has_times = getattr(config, "no_timestamps_token_id", None) is not None
        self._has_word_times = bool(getattr(config, "alignment_heads", None))

    @property
    def window_frames(self) -> int:
        """Return the frames that the model hears at once: 30 s of them."""
        return int(self._extractor.nb_max_frames)

    def read_speech(self, file: bytes, speech: SpeechParams) -> Recording:
        """Decode a recording, and check the request. Raises RequestError."""
        language = self._find_language(speech.language)
        if speech.translate and not (self.is_multilingual and self._has_tasks):
            raise Unsupported(
                "this model hears English only, and does not translate", param="model"
            )
        if speech.timestamps and not self._has_times:
            raise self._refuse_times("response_format")
        if speech.timestamps == "word" and not self._has_word_times:
            raise Unsupported(
                "timestamp_granularities: this model has no alignment heads, which the times of"
                " words are found by; ask for those of segments",
                param="timestamp_granularities",
            )
        prompt = self._encode_prompt(speech.prompt)
        rate = self._extractor.sampling_rate
        samples = decode_recording(file, rate, self.max_s)
        is_long = len(samples) > self._extractor.n_samples
        if is_long and not self._has_times:
            raise self._refuse_times("file")
        made = self._extractor(
            samples, sampling_rate=rate, return_tensors="pt",
            truncation=False, padding="longest" if is_long else "max_length",
        )  # fmt: skip
        frames = len(samples) // self._extractor.hop_length
        duration_s = len(samples) / rate
        return Recording(made["input_features"], frames, is_long, duration_s, language, prompt)

    def _refuse_times(self, param: str) -> Unsupported:
        return Unsupported(
            f"{param}: this model's generation config has no timestamps; it transcribes up to"
            f" {self._extractor.chunk_length} s, as json or text",
            param=param,
        )

    def _find_language(self, asked: str) -> str:
        """Return the code of a language given by its name or code; "" if none is given."""
        if not asked:
            return "" if self.is_multilingual else "en"
        return find_language(asked, self._codes if self.is_multilingual else {"en"})

    def _encode_prompt(self, text: str) -> Tensor | None:
        """Return a prompt's ids: the mark of a prompt, and the last of its tokens that fit."""
        if not text.strip():
            return None
        try:
            ids: list[int] = self._tokenizer.get_prompt_ids(text).tolist()
        except ValueError as error:  # it has a special token
            raise RequestError(f"prompt: {describe_error(error)}", param="prompt") from None
        return torch.tensor([ids[0], *ids[1:][-(self._most_prompt - 1) :]])


def load_extractor(folder: Path, spec: WorkerSpec) -> Any:
    """Return the model's feature extractor. Raises LoadError."""
    with weights.explain_errors(folder, spec):
        library: Any = transformers  # untyped there
        return library.AutoFeatureExtractor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=spec.trust_remote_code
        )
