"""Models of random weights that see and hear, and what clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.hearing_model import make_samples, write_wav, write_whisper
from tests.unit.engines.seeing_model import write_qwen2_audio, write_seeing_model
from tests.unit.engines.transformers.vision.pictures import RED

EYES, EARS, WHISPER = "eyes", "ears", "whisper"


def write_models(folder: Path) -> list[dict[str, Any]]:
    """Write a LLaVA, a Qwen2-Audio and a Whisper, and return the models of a configuration."""
    tiny = write_tiny_llama(folder / "tiny")
    paths = {
        EYES: write_seeing_model(folder / EYES, tiny),
        EARS: write_qwen2_audio(folder / EARS, tiny),
        WHISPER: write_whisper(folder / WHISPER),
    }
    common: dict[str, Any] = {"engine": "transformers", "device": "cpu", "standby": False}
    common |= {"options": {"threads": 1}}
    return [{"name": name, "path": str(path)} | common for name, path in paths.items()]


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write a picture and a recording of 1.5 s, for these models."""
    picture, speech = folder / "picture.png", folder / "speech.wav"
    picture.write_bytes(RED.data)
    speech.write_bytes(write_wav(make_samples(1.5)))
    return picture, speech
