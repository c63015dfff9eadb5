"""Loads a CTranslate2 Whisper model by faster-whisper, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel

from servekit.engines.api.base import Report
from servekit.engines.api.cpu_threads import count_threads
from servekit.engines.api.load_phases import phase
from servekit.engines.api.process_activity import report_activity
from servekit.engines.model_files.source import resolve_ctranslate2
from servekit.errors import LoadError, describe_error
from servekit.model_metadata import ctranslate2 as files
from servekit.model_metadata.ctranslate2 import Header
from servekit.protocol.messages import WorkerSpec

#: Tokens that the library writes in a window at most, its prompt included.
_MOST_TOKENS = 448


def load_whisper(spec: WorkerSpec, report: Report) -> tuple[Any, Header]:
    """Return faster-whisper's model, and the header of its file. Raises LoadError."""
    folder = resolve_ctranslate2(spec.path, spec.revision, report)
    header = files.check_whisper(folder)
    compute_type = _choose_compute_type(spec)
    try:
        with phase("weights"), report_activity(report):
            whisper: Any = WhisperModel(
                str(folder),
                device=spec.device,
                compute_type=compute_type,
                cpu_threads=count_threads(
                    spec.options.get("threads"), on_gpu=spec.device == "cuda"
                ),
                local_files_only=True,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise LoadError(f"CTranslate2 cannot load {folder}: {describe_error(error)}") from error
    except Exception as error:  # tokenizers raises plain ones for a damaged tokenizer.json
        raise LoadError(f"{folder} cannot be loaded: {describe_error(error)}") from error
    _check_parts(folder, whisper, header.variables)
    places = _find_shape(header.variables, "decoder/position_encodings/encodings")
    if places is not None:
        whisper.max_length = min(_MOST_TOKENS, places[0])
    if spec.device == "cuda":
        _try_gpu(whisper)
    return whisper, header


def _choose_compute_type(spec: WorkerSpec) -> str:
    """Return CTranslate2's compute type, by `options.compute_type` or `dtype`. Raises LoadError."""
    asked = str(spec.options.get("compute_type") or "auto")
    if asked == "auto":
        asked = "default" if spec.dtype == "auto" else spec.dtype
    known = ctranslate2.get_supported_compute_types(spec.device)
    if asked != "default" and asked not in known:
        raise LoadError(
            f"compute_type {asked} is not for this {spec.device}; it has"
            f" {', '.join(sorted(known))}."
        )
    return asked


def _check_parts(folder: Path, whisper: Any, variables: Mapping[str, files.Variable]) -> None:
    """Raise LoadError if the tokenizer or the features are another model's: these would crash."""
    heard, made = whisper.model.n_mels, whisper.feature_extractor.mel_filters.shape[0]
    if heard != made:
        raise LoadError(
            f"{folder}: the model hears {heard} mel bins, and preprocessor_config.json says {made}"
            " (80 without the file); copy it from the model that was converted."
        )
    wanted = ("<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>")
    tokenizer = whisper.hf_tokenizer
    if lacks := [token for token in wanted if tokenizer.token_to_id(token) is None]:
        raise LoadError(f"{folder}: tokenizer.json is no Whisper's: it has no {lacks[0]}.")
    table = _find_shape(variables, "decoder/embeddings/weight")
    if table is not None and tokenizer.get_vocab_size() > table[0]:
        raise LoadError(
            f"{folder}: tokenizer.json has {tokenizer.get_vocab_size()} tokens, and the model"
            f" {table[0]}; copy it from the model that was converted."
        )


def _find_shape(variables: Mapping[str, files.Variable], name: str) -> tuple[int, ...] | None:
    found = variables.get(name)
    return None if found is None else found.shape


def _try_gpu(whisper: Any) -> None:
    """Encode silence: the libraries of CUDA are loaded when they are first used."""
    silence = np.zeros((whisper.model.n_mels, whisper.feature_extractor.nb_max_frames), np.float32)
    try:
        whisper.encode(silence)
    except RuntimeError as error:
        lacks = "libcublas" in str(error) or "libcudnn" in str(error)
        hint = "; pip install nvidia-cublas-cu12 'nvidia-cudnn-cu12>=9'" if lacks else ""
        raise LoadError(f"CTranslate2 cannot use the GPU: {error}{hint}") from error
