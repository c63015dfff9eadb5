"""Models of random weights that see and hear, and what clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.engines.ctranslate2_model import write_ctranslate2
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.hearing_model import make_samples, write_wav, write_whisper
from tests.unit.engines.llamacpp.seeing_gguf import convert_model
from tests.unit.engines.seeing_model import write_qwen2_audio, write_qwen2_vl, write_seeing_model
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
    return [_describe(name, "transformers", path) for name, path in paths.items()]


def write_converted(folder: Path) -> list[dict[str, Any]]:
    """Write a Qwen2-VL and a Qwen2-Audio for llama.cpp, and a Whisper for faster-whisper."""
    tiny = write_tiny_llama(folder / "tiny")
    sources = {
        EYES: write_qwen2_vl(folder / "seeing", tiny),
        EARS: write_qwen2_audio(folder / "hearing", tiny, hears_s=30),
    }
    files = {name: convert_model(path, folder / name)[0] for name, path in sources.items()}
    described = [_describe(name, "llamacpp", file) for name, file in files.items()]
    return [*described, _describe(WHISPER, "faster_whisper", write_ctranslate2(folder / WHISPER))]


def _describe(name: str, engine: str, path: Path) -> dict[str, Any]:
    common: dict[str, Any] = {"device": "cpu", "standby": False, "options": {"threads": 1}}
    return {"name": name, "engine": engine, "path": str(path)} | common


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write a picture and a recording of 1.5 s, for these models."""
    picture, speech = folder / "picture.png", folder / "speech.wav"
    picture.write_bytes(RED.data)
    speech.write_bytes(write_wav(make_samples(1.5)))
    return picture, speech
