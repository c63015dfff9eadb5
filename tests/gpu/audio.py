"""`python -m tests.gpu.audio`: recordings in the transformers engine on a GPU.

--device cpu   try the script itself, with a small model
--only NAME    one of: texts, speed

- texts: a small Whisper in float32 says what the library's own `generate` says of the recordings.
- speed: a Whisper of the size of large-v3-turbo with random weights: seconds of audio in a second,
  of one recording, of four at once, and by the library's `generate` in this process. Each is one
  window with the most tokens that the model may write, 128.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.gpu.checks import Row
from tests.gpu.engines import entry, serving
from tests.gpu.images import show
from tests.integration.instance import Instance
from tests.unit.engines.hearing_model import PlainWhisper, make_samples, write_wav, write_whisper

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
MOST_TOKENS = 128
LENGTHS_S = (1.5, 5.0, 11.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.audio")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", choices=["texts", "speed"])
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        if args.only != "speed":
            rows += show(compare_texts(Path(made) / "small", args.device))
        if args.only != "texts":
            rows += show(measure_speed(Path(made) / "large", args.device))
    return 0 if all(row.ok is not False for row in rows) else 1


def compare_texts(folder: Path, device: str) -> list[Row]:
    write_whisper(folder)
    plain, rows = PlainWhisper(folder), []
    model = entry("m", "transformers", folder, device, dtype="float32", memory="4GiB")
    with serving([model]) as instance:
        for number, seconds in enumerate(LENGTHS_S):
            wav = write_wav(make_samples(seconds, number))
            due, _ = plain.hear(wav, language="en", task="transcribe")
            same = bool(due.strip()) and transcribe(instance, wav).strip() == due.strip()
            rows.append(Row(f"{seconds} s: the library's text", "same" if same else "other", same))
    return rows


def transcribe(instance: Instance, wav: bytes) -> str:
    answer = httpx.post(
        f"{instance.url}/v1/audio/transcriptions",
        data={"model": "m", "language": "en"},
        files={"file": ("speech.wav", wav)},
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


def measure_speed(folder: Path, device: str) -> list[Row]:
    large = device == "cuda"
    seconds = 29.0 if large else 1.9  # one window: of random weights nothing ends sooner
    write_whisper(folder, **(LARGE if large else {}))
    wavs = [write_wav(make_samples(seconds, number)) for number in range(4)]
    plain = PlainWhisper(folder)
    plain.model.to(device, torch.bfloat16 if large else torch.float32)
    plain.model.generation_config.max_length = MOST_TOKENS if large else 24
    plain.model.generation_config.save_pretrained(folder)
    took = []
    for wav in wavs[:2]:
        began = time.perf_counter()
        plain.hear(wav, language="en", task="transcribe")
        took.append(time.perf_counter() - began)
    alone = seconds / took[-1]
    rows = [Row("the library's generate", f"{alone:.0f} s of audio a second")]
    del plain
    torch.cuda.empty_cache()
    dtype = "bfloat16" if large else "float32"
    with serving([entry("m", "transformers", folder, device, dtype=dtype, memory="20GiB")]) as up:
        transcribe(up, wavs[0])
        for count in (1, 4):
            began = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda wav: transcribe(up, wav), wavs[:count]))
            rate = count * seconds / (time.perf_counter() - began)
            near = rate > 0.7 * alone or not large
            rows.append(
                Row(f"recordings at once: {count}", f"{rate:.0f} s of audio a second", near)
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
