"""The kind of a model, by the files in its folder: it generates, embeds or classifies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

#: A causal language model; a transformer with a pooling in the layout of sentence-transformers; a
#: sequence classifier, which is a cross-encoder if it has one label; a causal language model with
#: eyes, as which the transformers engine loads a "generate" whose processor it has.
ModelKind = Literal["generate", "embed", "classify", "see"]
_CLASSIFIER = "ForSequenceClassification"


def kind_of(folder: Path) -> ModelKind:
    """Return the kind of the model in a folder."""
    modules = _read_json(folder / "modules.json")
    if _is_classifier(folder) and not _has_pooling(modules):
        return "classify"
    return "generate" if modules is None else "embed"


def _is_classifier(folder: Path) -> bool:
    config = _read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(named, list) and bool(named) and str(named[0]).endswith(_CLASSIFIER)


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
