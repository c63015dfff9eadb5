"""A random Whisper, converted for CTranslate2, and the library that hears with it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ctranslate2
from faster_whisper import WhisperModel

from tests.unit.engines.hearing_model import read_wav, write_whisper


def convert_whisper(source: Path, folder: Path, *, multilingual: bool = True) -> Path:
    """Convert a model of `hearing_model.write_whisper`."""
    convert: Any = ctranslate2.converters.TransformersConverter(
        str(source), copy_files=["tokenizer.json", "preprocessor_config.json"]
    ).convert
    convert(str(folder))
    if multilingual:  # CTranslate2 tells it by the token "", which OpenAI's vocabulary has
        file = folder / "vocabulary.json"
        tokens = json.loads(file.read_text())
        tokens[tokens.index("<|startoflm|>")] = ""
        file.write_text(json.dumps(tokens))
    return folder


def write_ctranslate2(folder: Path, *, multilingual: bool = True, **sizes: Any) -> Path:
    """Write a random Whisper with windows of 30 s, as the library has them."""
    small = {"num_mel_bins": 80, "max_target_positions": 448}
    source = write_whisper(
        folder / "source", multilingual=multilingual, window_s=30, **{**small, **sizes}
    )
    return convert_whisper(source, folder / "converted", multilingual=multilingual)


class PlainFasterWhisper:
    """The library alone, with the options that servekit's engine has by default here."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._options = options
        self.model = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=1)
        #: Several tests ask for the same; it takes a second.
        self.hear = functools.cache(self._hear)

    def _hear(self, wav: bytes, **asked: Any) -> tuple[str, list[Any]]:
        """Return the text of a WAV file of 16 bits and one channel, and its segments."""
        samples = read_wav(wav)
        long = len(samples) > self.model.feature_extractor.n_samples
        known: dict[str, Any] = {
            "temperature": 0.0,
            "no_speech_threshold": None,
            "log_prob_threshold": None,
            "compression_ratio_threshold": None,
            "condition_on_previous_text": False,
            "without_timestamps": not long,
        }
        found, _ = self.model.transcribe(samples, **known | self._options | asked)
        segments = list(found)
        return "".join(one.text for one in segments), segments
