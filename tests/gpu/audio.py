"""`python -m tests.gpu.audio`: recordings in the transformers engine on a GPU.

--device cpu   try the script itself, with a small model
--only NAME    one of: texts, speed, faster_whisper

- texts: a small Whisper in float32, and one of the size of large-v3-turbo with random weights: many
  recordings at once have the texts and times that the library's own `generate` has alone.
- speed: the large one in bfloat16: seconds of audio in a second, of 1, 4, 8 and 16 recordings at
  once, and by the library's `generate` in this process, alone and with 8 in a batch. Each is one
  window with the most tokens that the model may write, 128; each client sends four, one after
  another. Where what it needs is installed, `transformers serve` is asked the same by turns; it
  reads one recording at a time, so many clients send it one each.
- faster_whisper: the same by `engine: faster_whisper`, where it is installed. Its small model has
  the texts that the library has on the CPU, also after it has slept; the large one runs beside the
  library's own loop in float16.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.bench import peers
from tests.gpu.checks import MIB, Row
from tests.gpu.engines import entry, held_by_group, serving
from tests.gpu.images import show
from tests.integration.instance import Instance
from tests.unit.engines.hearing_model import (
    RATE,
    PlainWhisper,
    make_samples,
    read_wav,
    write_wav,
    write_whisper,
)

#: Of openai/whisper-large-v3-turbo.
LARGE: dict[str, Any] = {
    "window_s": 30,
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 4,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_target_positions": 448,
    "init_std": 0.02,
}
VOCABULARY = 51866
MOST_TOKENS = 128
AT_ONCE = (1, 4, 8, 16)
EACH, ROUNDS = 4, 3
#: Tokens that the prompt of a transcription has.
PROMPT = 4
#: What `transformers serve` needs, and servekit does not.
PEER = "`transformers serve`"
NEEDED_BY_PEER = ("openai", "librosa")

#: A client of its own for each request would take 30 ms to read the system's certificates.
HTTP = httpx.Client(timeout=300)
#: Sends a recording, and returns the answer.
Ask = Callable[[bytes], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.audio")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", choices=["texts", "speed", "faster_whisper"])
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        if args.only in (None, "texts"):
            rows += show(compare_texts(Path(made), args.device))
        if args.only in (None, "speed"):
            rows += show(measure_speed(Path(made) / "speed", args.device))
        if args.only == "faster_whisper" or (
            args.only is None and importlib.util.find_spec("faster_whisper")
        ):
            rows += show(compare_faster_whisper(Path(made) / "small-ct2", args.device))
            rows += show(measure_faster_whisper(Path(made) / "large-ct2", args.device))
    return 0 if all(row.ok is not False for row in rows) else 1


def compare_texts(folder: Path, device: str) -> list[Row]:
    rows = _compare_with_library("small", folder / "small", device, (0.7, 1.5, 3.0, 5.0, 11.0))
    if device == "cuda":
        rows += _compare_with_library("large", folder / "large", device, (5, 20, 29, 70), **LARGE)
    return rows


def _compare_with_library(
    name: str, folder: Path, device: str, lengths_s: Sequence[float], **sizes: Any
) -> list[Row]:
    write_whisper(folder, **sizes)
    plain = PlainWhisper(folder)
    plain.model.to(device)
    wavs = [write_wav(make_samples(seconds, at)) for at, seconds in enumerate(lengths_s)] * 2
    asked: list[dict[str, str]] = [{"language": "en"}] * len(lengths_s)
    asked += [{"response_format": "verbose_json"}] * len(lengths_s)
    due = []
    for wav, form in zip(wavs, asked, strict=True):
        timed = "response_format" in form
        how = {"return_timestamps": True} if timed else {"language": "en"}
        text, segments = plain.hear(wav, task="transcribe", **how)
        due.append((text.strip(), _read_times(segments) if timed else []))
    del plain
    model = entry("m", "transformers", folder, device, dtype="float32", memory="16GiB")
    with (
        serving([model]) as instance,
        concurrent.futures.ThreadPoolExecutor(len(wavs)) as pool,
    ):
        found = list(pool.map(partial(transcribe, instance.url), wavs, asked))
    same = [
        (told["text"].strip(), _read_times(told.get("segments", ()))) == (text, times)
        for told, (text, times) in zip(found, due, strict=True)
    ]
    empty = sum(not text for text, _ in due)  # random weights may end at once
    measured = f"{sum(same)} of {len(same)} as the library alone, {empty} of them without text"
    good = all(same) and empty < len(due) / 2
    return [Row(f"texts and times, {name}, {len(wavs)} at once", measured, good)]


def _read_times(segments: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(round(float(one["start"]), 2), round(float(one["end"]), 2)) for one in segments]


def transcribe(
    url: str, wav: bytes, form: dict[str, str], model: str | Path = "m"
) -> dict[str, Any]:
    answer = HTTP.post(
        f"{url}/v1/audio/transcriptions",
        data={"model": str(model)} | form,
        files={"file": ("speech.wav", wav)},
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def measure_speed(folder: Path, device: str) -> list[Row]:
    large = device == "cuda"
    seconds = 29.0 if large else 1.9  # of one window
    write_whisper(folder, ends=False, **(LARGE | {"vocab_size": VOCABULARY} if large else {}))
    wavs = [write_wav(make_samples(seconds, number)) for number in range(max(AT_ONCE))]
    plain = PlainWhisper(folder)
    plain.model.to(device, torch.bfloat16 if large else torch.float32)
    stated = plain.model.generation_config
    stated.max_length = MOST_TOKENS if large else 24
    stated.language, stated.task = "en", "transcribe"  # the peer ignores what requests say
    stated.save_pretrained(folder)
    alone, together = _measure_library(plain, wavs, seconds)
    del plain
    torch.cuda.empty_cache()
    rows = [
        Row("the library's generate", f"{alone:.0f} s of audio a second"),
        Row("the library's generate, a batch of 8", f"{together:.0f} s of audio a second"),
    ]
    dtype = "bfloat16" if large else "float32"
    model = entry("m", "transformers", folder, device, dtype=dtype, memory="20GiB")
    with serving([model]) as up, _serve_peer(folder, device, dtype) as peer:
        asks: dict[str, Ask] = {"servekit": partial(transcribe, up.url, form={"language": "en"})}
        if peer:
            asks[PEER] = partial(transcribe, peer.url, form={}, model=folder)
        said = {name: ask(wavs[0])["text"] for name, ask in asks.items()}  # and warms up
        if peer and not large:  # in bfloat16 random weights say other texts in other batches
            same = said["servekit"] == said[PEER]
            rows.append(Row(f"the text of {PEER}", "the same" if same else "another", same))
        for count in AT_ONCE:
            rates = _take_turns(asks, wavs[:count], seconds)
            ours, theirs = (rates.get(name, 0.0) for name in ("servekit", PEER))
            text = f"{ours:.0f} s of audio a second"
            if peer:
                text += f"; {PEER} {theirs:.0f}, {ours / theirs:.2f}"
            due = max(alone if count == 1 else 3 * alone, theirs)
            rows.append(Row(f"recordings at once: {count}", text, ours >= due or not large))
    return rows


@contextlib.contextmanager
def _serve_peer(model: Path, device: str, dtype: str) -> Iterator[peers.Peer | None]:
    if not all(map(importlib.util.find_spec, NEEDED_BY_PEER)):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder:
        log, python = Path(folder) / "log", Path(sys.executable)
        with peers.serve(python, model, (), os.environ, log, device=device, dtype=dtype) as peer:
            yield peer


def _take_turns(asks: dict[str, Ask], wavs: Sequence[bytes], seconds: float) -> dict[str, float]:
    """Return the seconds of audio in a second of each, a client for each recording."""
    rates: dict[str, list[float]] = {name: [] for name in asks}
    for _ in range(ROUNDS):
        for name, ask in asks.items():
            each = EACH if name == "servekit" else max(1, EACH // len(wavs))
            began = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(len(wavs)) as pool:
                list(pool.map(ask, [*wavs] * each))
            rates[name].append(len(wavs) * each * seconds / (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


def _measure_library(
    plain: PlainWhisper, wavs: Sequence[bytes], seconds: float
) -> tuple[float, float]:
    """Return seconds of audio in a second, of recordings alone and of a batch of 8."""
    for wav in wavs[: 1 + EACH]:
        if wav is wavs[1]:  # after one to warm up
            began = time.perf_counter()
        plain.hear(wav, language="en", task="transcribe")
    alone = EACH * seconds / (time.perf_counter() - began)
    for _ in range(2):
        began = time.perf_counter()
        _generate_batch(plain, wavs[:8])
    return alone, 8 * seconds / (time.perf_counter() - began)


def _generate_batch(plain: PlainWhisper, wavs: Sequence[bytes]) -> None:
    samples = [read_wav(wav) for wav in wavs]
    made = plain.extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
    heard = made.to(plain.model.device, plain.model.dtype)
    told = plain.model.generate(heard, language="en", task="transcribe")
    plain.tokenizer.batch_decode(told, skip_special_tokens=True)


# ---------------------------------------------------------------- faster-whisper


def compare_faster_whisper(folder: Path, device: str) -> list[Row]:
    from tests.unit.engines.ctranslate2_model import PlainFasterWhisper, write_ctranslate2

    path = write_ctranslate2(folder)
    plain = PlainFasterWhisper(path, language="en", beam_size=1)
    wavs = [write_wav(make_samples(seconds, at)) for at, seconds in enumerate((2, 5, 29, 70))]
    due = [plain.hear(wav)[0].strip() for wav in wavs]
    options = {"beam_size": 1, "compute_type": "float32", "no_speech_threshold": None}
    claim = {"memory": "4GiB"} if device == "cuda" else {}
    model = entry("m", "faster_whisper", path, device, options=options, **claim)

    def compare(what: str) -> Row:
        with concurrent.futures.ThreadPoolExecutor(len(wavs)) as pool:
            ask = partial(transcribe, instance.url, form={"language": "en"})
            found = [told["text"].strip() for told in pool.map(ask, wavs * 2)]
        same = sum(one == other for one, other in zip(found, due * 2, strict=True))
        shown = f"{same} of {len(found)}, {sum(not one for one in due)} of {len(due)} without text"
        return Row(f"faster-whisper: {what}: as the library on the CPU", shown, same == len(found))

    with serving([model]) as instance:
        rows = [compare("texts")]
        if device == "cuda":
            held = [held_by_model(instance)]
            for command in ("sleep", "wake"):
                done = instance.run(command, "m")
                assert done.returncode == 0, done.stderr
                held.append(held_by_model(instance))
            shown = ", ".join(f"{mib:,}" for mib in held) + " MiB"
            rows += [Row("… held before, asleep, awake", shown), compare("texts after that")]
    return rows


def held_by_model(instance: Instance) -> int:
    """Return the MiB of GPUs that the processes of the model "m" hold."""
    [replica] = instance.model("m").replicas
    return sum(held_by_group(replica.pid).values()) // MIB


def measure_faster_whisper(folder: Path, device: str) -> list[Row]:
    from faster_whisper import WhisperModel

    from tests.unit.engines.ctranslate2_model import write_ctranslate2

    large = device == "cuda"
    sizes = LARGE | {"vocab_size": VOCABULARY} if large else {}
    sizes.pop("window_s", None)
    path = write_ctranslate2(folder, ends=False, **sizes)
    compute = "float16" if large else "float32"
    whisper: Any = WhisperModel(str(path), device=device, compute_type=compute)
    wavs = [write_wav(make_samples(29.0, number)) for number in range(max(AT_ONCE))]
    new = MOST_TOKENS if large else 24
    asked: dict[str, Any] = {
        "language": "en",
        "beam_size": 1,
        "temperature": 0.0,
        "without_timestamps": True,
        "condition_on_previous_text": False,
        "max_new_tokens": 2 * new - PROMPT,  # CTranslate2 writes half of this and the prompt
        "no_speech_threshold": None,
        "log_prob_threshold": None,
        "compression_ratio_threshold": None,
    }

    def hear(wav: bytes) -> dict[str, Any]:
        found, _ = whisper.transcribe(read_wav(wav), **asked)
        [segment] = found
        return {"text": segment.text, "tokens": len(segment.tokens)}

    options = {"beam_size": 1, "compute_type": compute, "max_new_tokens": new}
    options |= {"no_speech_threshold": None}
    claim = {"memory": "20GiB"} if large else {}
    model = entry("m", "faster_whisper", path, device, options=options, **claim)
    rows = []
    with serving([model]) as instance:
        ask = partial(transcribe, instance.url, form={"language": "en"})
        ours, theirs = ask(wavs[0])["text"].strip(), hear(wavs[0])
        assert theirs["tokens"] == new, theirs
        same = ours == theirs["text"].strip()
        rows.append(Row("faster-whisper: the text of its own loop", f"the same: {same}", same))
        for count in AT_ONCE:
            one: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(ROUNDS):
                began = time.perf_counter()
                with concurrent.futures.ThreadPoolExecutor(count) as pool:
                    list(pool.map(ask, wavs[:count] * EACH))
                one["ours"].append(count * EACH * 29.0 / (time.perf_counter() - began))
                began = time.perf_counter()
                for wav in wavs[:count]:
                    hear(wav)
                one["theirs"].append(count * 29.0 / (time.perf_counter() - began))
            mine, other = (statistics.median(one[name]) for name in ("ours", "theirs"))
            shown = f"{mine:.0f} s of audio a second; its own loop {other:.0f}, {mine / other:.2f}"
            what = f"faster-whisper: recordings at once: {count}"
            rows.append(Row(what, shown, mine > other or not large))
    return rows


if __name__ == "__main__":
    sys.exit(main())
