"""The kind of a model, by the files in its folder: it generates, embeds, scores or hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

#: A causal language model; a transformer with a pooling in the layout of sentence-transformers; a
#: sequence classifier, which is a cross-encoder if it has one label; a causal language model that
#: answers whether a document fits a query; a Whisper model; a causal language model with eyes, as
#: which the transformers engine loads a "generate" whose processor it has.
ModelKind = Literal["generate", "embed", "classify", "rerank", "transcribe", "see"]
_CLASSIFIER = "ForSequenceClassification"
_WHISPER = "WhisperForConditionalGeneration"
_CAUSAL = "ForCausalLM"
#: The module of sentence-transformers that makes a score of the logits of one or two tokens.
_LOGIT_SCORE = "LogitScore"
#: Rerankers whose files may say nothing of it are known by this beginning of their names.
_RERANKERS = {"Qwen3ForCausalLM": "qwen3-reranker"}


def find_model_kind(folder: Path, spec: WorkerSpec) -> ModelKind:
    """Return the kind of the model in a folder: `options.task`, else by its files.

    Raises LoadError if the files cannot have that task.
    """
    asked = spec.options.get("task", "auto")
    modules = read_json(folder / "modules.json")
    architecture = _read_architecture(folder)
    if asked == "rerank" and not architecture.endswith((_CAUSAL, _CLASSIFIER)):
        raise LoadError(
            f"options.task is rerank, and {spec.model} is no causal language model; its files name"
            f" {architecture or 'no architecture'}."
        )
    if architecture.endswith(_CLASSIFIER) and not _has_module(modules, "Pooling"):
        return "classify"
    if architecture == _WHISPER:
        return "transcribe"
    if asked == "generate":
        return "generate"
    if asked == "rerank" or (asked == "auto" and _reranks(modules, architecture, spec.path)):
        return "rerank"
    return "generate" if modules is None else "embed"


def _reranks(modules: Any, architecture: str, path: str) -> bool:
    if modules is not None:
        return _has_module(modules, _LOGIT_SCORE)
    begins = _RERANKERS.get(architecture)
    return begins is not None and Path(path).name.lower().startswith(begins)


class ScoreTokens(msgspec.Struct, frozen=True):
    """The tokens whose logits make a score, as `LogitScore` of sentence-transformers has them.

    The score is the difference of the logits, or the logit of `true_token_id` alone.
    """

    true_token_id: int
    false_token_id: int | None = None


def read_score_tokens(folder: Path) -> ScoreTokens | None:
    """Return the tokens that the files name; None if they name none. Raises LoadError."""
    modules = read_json(folder / "modules.json")
    if not _has_module(modules, _LOGIT_SCORE):
        return None
    named = next(one.get("path") for one in modules if _is_module(one, _LOGIT_SCORE))
    try:
        file = folder / str(named) / "config.json"
        return msgspec.json.decode(file.read_bytes(), type=ScoreTokens)
    except (OSError, msgspec.DecodeError) as error:
        raise LoadError(f"The tokens of {named}/config.json cannot be read: {error}.") from None


def refuse_speech(folder: Path, spec: WorkerSpec) -> None:
    """Raise LoadError for a Whisper model, in the name of an engine that has no recordings."""
    if find_model_kind(folder, spec) == "transcribe":
        raise LoadError(
            f"{spec.model} hears speech, which this engine does not serve; write engine:"
            " transformers, or engine: command for a server whose /v1/audio/transcriptions is"
            " forwarded."
        )


def _read_architecture(folder: Path) -> str:
    config = read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    return str(named[0]) if isinstance(named, list) and named else ""


def _has_module(modules: Any, name: str) -> bool:
    return isinstance(modules, list) and any(_is_module(one, name) for one in modules)


def _is_module(one: Any, name: str) -> bool:
    return isinstance(one, dict) and str(one.get("type", "")).endswith(f".{name}")


def read_json(path: Path) -> Any:
    """Return the content of a file; None if it is missing, {} if it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    except OSError:
        return None
