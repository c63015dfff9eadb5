"""A random Whisper with windows of two seconds, recordings for it, and engines that hear."""

from __future__ import annotations

import functools
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from servekit.engines.api.base import SpeechJob, SpeechOutput
from servekit.protocol.messages import SamplingParams, SpeechParams, SpokenSegment
from tests.unit.engines.harness import Harness, byte_level_tokenizer

RATE = 16_000
WINDOW_S = 2
LANGUAGES = ("en", "de", "fr")
library: Any = transformers  # it tells no types of these


def write_whisper(
    folder: Path,
    *,
    multilingual: bool = True,
    times: bool = True,
    window_s: int = WINDOW_S,
    ends: bool = True,
    **sizes: Any,
) -> Path:
    """Write a random Whisper, by default with two layers; its tokenizer and feature extractor.

    One that never `ends` writes text up to its limit, as one window.
    """
    tokenizer = _make_tokenizer(window_s)
    ids = tokenizer.convert_tokens_to_ids
    tokenizer.save_pretrained(folder)
    small = {
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_target_positions": 96,
        "init_std": 0.4,
    }
    made = {"vocab_size": len(tokenizer)} | small | sizes
    library.WhisperFeatureExtractor(
        feature_size=made["num_mel_bins"], chunk_length=window_s
    ).save_pretrained(folder)
    torch.manual_seed(11)
    end = ids("<|endoftext|>")
    config = library.WhisperConfig(
        **made,
        max_source_positions=50 * window_s,
        median_filter_width=3,
        decoder_start_token_id=ids("<|startoftranscript|>"),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        begin_suppress_tokens=None,
    )
    model = library.WhisperForConditionalGeneration(config)
    if not ends:  # the head is the same weight: ends and times are never the likeliest
        model.model.decoder.embed_tokens.weight.data[end:] = 0
    stated: dict[str, Any] = {
        "max_length": 16,
        "suppress_tokens": _list_unwanted(tokenizer),
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": end,
        "decoder_start_token_id": config.decoder_start_token_id,
        "prev_sot_token_id": ids("<|startofprev|>"),
        "max_initial_timestamp_index": 20,
        "is_multilingual": multilingual,
    }
    if times:
        stated |= {"no_timestamps_token_id": ids("<|notimestamps|>")}
        stated |= {"alignment_heads": [[0, 1], [1, 2]]}
    if multilingual:
        stated["lang_to_id"] = {f"<|{code}|>": ids(f"<|{code}|>") for code in LANGUAGES}
        stated["task_to_id"] = {name: ids(f"<|{name}|>") for name in ("translate", "transcribe")}
    model.generation_config = library.GenerationConfig(**stated)
    model.save_pretrained(folder)
    return folder


def _list_unwanted(tokenizer: Any) -> list[int]:
    """Return the special tokens but the end, and the tokens that are no readable text."""
    ids = range(tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1)
    end = tokenizer.eos_token_id
    return [id for id in ids if id > end or (id < end and not _is_readable(tokenizer.decode(id)))]


def _is_readable(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _make_tokenizer(window_s: int) -> Any:
    trained = byte_level_tokenizer().backend_tokenizer
    texts = [token for token, id in sorted(trained.get_vocab().items(), key=lambda one: one[1])]
    plain = [token for token in texts if not token.startswith("<|")]
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    vocabulary = {token: id for id, token in enumerate([*plain, "<|endoftext|>"])}
    tokenizer = library.WhisperTokenizer(vocab=vocabulary, merges=merges)
    special = ["<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([f"<|{at * 0.02:.2f}|>" for at in range(50 * window_s + 1)])
    return tokenizer


def make_samples(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray[Any, Any]:
    """Return a sound whose tones change, float32 from -1 to 1."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    tones = random.uniform(100, 3000, int(seconds * 4) + 1)
    sound = np.sin(2 * np.pi * tones[(times * 4).astype(int)] * times)
    noise = random.normal(0, 0.1, len(times))
    return np.asarray((0.5 * sound + noise).clip(-1, 1), np.float32)


def write_wav(samples: np.ndarray[Any, Any], rate: int = RATE) -> bytes:
    """Return samples, [samples] or [samples, channels], as a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def read_wav(wav: bytes) -> np.ndarray[Any, Any]:
    """Return the samples of a WAV file of 16 bits and one channel."""
    with wave.open(io.BytesIO(wav)) as file:
        frames = file.readframes(file.getnframes())
    return np.frombuffer(frames, "<i2").astype(np.float32) / 32768


class PlainWhisper:
    """The library alone."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = library.AutoModelForSpeechSeq2Seq.from_pretrained(
            folder, dtype=torch.float32
        )
        self.model.eval()
        self.tokenizer: Any = library.AutoTokenizer.from_pretrained(folder)
        self.extractor: Any = library.AutoFeatureExtractor.from_pretrained(folder)
        #: Several tests ask for the same; it takes a second.
        self.hear = functools.cache(self._hear)

    def _hear(self, wav: bytes, **asked: Any) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a WAV file of 16 bits and one channel, and its segments."""
        samples = read_wav(wav)
        is_long = len(samples) > self.extractor.n_samples
        made = self.extractor(
            samples, sampling_rate=RATE, return_tensors="pt",
            truncation=False, padding="longest" if is_long else "max_length",
        )  # fmt: skip
        if is_long:
            asked.setdefault("return_timestamps", True)
        if prompt := asked.pop("prompt", ""):
            asked["prompt_ids"] = torch.tensor(self.tokenizer.get_prompt_ids(prompt))
        heard = made["input_features"].to(self.model.device, self.model.dtype)
        told = self.model.generate(heard, return_segments=True, **asked)
        [text] = self.tokenizer.batch_decode(told["sequences"], skip_special_tokens=True)
        return text, told["segments"][0]


class Hearer(Harness):
    """An engine that hears."""

    def hear(self, file: bytes, params: SamplingParams | None = None, **asked: Any) -> int:
        speech = SpeechParams(len(file), file[:8] + file[-8:], **asked)
        self._last += 1
        recording = self.engine.read_recording(file, speech)
        job = SpeechJob(self._last, recording, params or SamplingParams(), speech)
        self.engine.transcribe(job)
        return self._last

    def spoken(self, job_id: int) -> list[SpeechOutput]:
        self.tokens(job_id)
        found: list[Any] = self.outputs[job_id]
        return found

    def segments(self, job_id: int) -> list[SpokenSegment]:
        heard = [output.speech for output in self.spoken(job_id)]
        return [segment for one in heard if one is not None for segment in one.segments]

    def text(self, job_id: int) -> str:
        return "".join(segment.text for segment in self.segments(job_id))
