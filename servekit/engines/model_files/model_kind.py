"""The kind of a model, by the files in its folder: it generates, embeds, classifies or hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from servekit.errors import LoadError

#: A causal language model; a transformer with a pooling in the layout of sentence-transformers; a
#: sequence classifier, which is a cross-encoder if it has one label; a Whisper model; a causal
#: language model with eyes, as which the transformers engine loads a "generate" whose processor it
#: has.
ModelKind = Literal["generate", "embed", "classify", "transcribe", "see"]
_CLASSIFIER = "ForSequenceClassification"
_WHISPER = "WhisperForConditionalGeneration"


def kind_of(folder: Path) -> ModelKind:
    """Return the kind of the model in a folder."""
    modules = _read_json(folder / "modules.json")
    architecture = _read_architecture(folder)
    if architecture.endswith(_CLASSIFIER) and not _has_pooling(modules):
        return "classify"
    if architecture == _WHISPER:
        return "transcribe"
    return "generate" if modules is None else "embed"


def refuse_speech(folder: Path, model: str) -> None:
    """Raise LoadError for a Whisper model, in the name of an engine that has no recordings."""
    if kind_of(folder) == "transcribe":
        raise LoadError(
            f"{model} hears speech, which this engine does not serve; write engine: transformers,"
            " or engine: command for a server whose /v1/audio/transcriptions is forwarded."
        )


def _read_architecture(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    return str(named[0]) if isinstance(named, list) and named else ""


def _has_pooling(modules: Any) -> bool:
    kinds = [one.get("type", "") for one in modules or () if isinstance(one, dict)]
    return any(str(kind).endswith(".Pooling") for kind in kinds)


def _read_json(path: Path) -> Any:
    """Return the content of a file; None if it is missing, {} if it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    except OSError:
        return None
