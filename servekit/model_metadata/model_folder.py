"""Cheap checks of a model folder: missing or truncated files are reported before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from servekit.errors import LoadError
from servekit.model_metadata import ctranslate2

#: What a file that is no JSON of the form that is read may raise.
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
_LEGACY = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check(folder: Path) -> None:
    """Raise LoadError unless transformers could load `folder` from safetensors.

    Reads only the headers of the weights.
    """
    if not folder.is_dir():
        raise LoadError(
            f"{folder} is a file; name the folder that holds the model, or a .gguf file."
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        raise LoadError(_no_config(folder))
    if not weights and ctranslate2.is_model(folder):
        raise LoadError(f"{folder} is a model of CTranslate2: {ctranslate2.ENGINE}.")
    if not weights:
        raise LoadError(no_weights(str(folder), [p.name for p in folder.iterdir()]))
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)
    for path in weights:
        if reason := damage(path):
            raise LoadError(f"{path} is damaged: {reason}. Fetch it again.")


def no_weights(where: str, names: list[str]) -> str:
    """Return the error text for a model without safetensors, by the formats it has instead."""
    legacy = sorted(n for n in names if n.endswith(_LEGACY))
    if legacy:
        return (
            f"{where} has its weights only as {legacy[0]}, a pickle format that can run code when "
            "it is read. servekit loads safetensors: convert it once with "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if ggufs:
        return f"{where} holds GGUF files; name one of them: {', '.join(ggufs[:8])}."
    return f"{where} has no *.safetensors file."


def lacks_tokenizer(folder: Path) -> str:
    """Return a sentence if no file of the folder can be a tokenizer; else ""."""
    known = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json", "*.bpe")
    if any(next(folder.glob(pattern), None) is not None for pattern in known):
        return ""
    return f"{folder} has no tokenizer: tokenizer.json, for example, lies beside its config.json."


def damage(path: Path) -> str | None:
    """Return why a safetensors file cannot be whole, or None. Reads its header only."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return "it does not start with a safetensors header"
            tensors = json.loads(file.read(length))
        ends = (t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__")
        expected = 8 + length + max(ends, default=0)
    except (OSError, struct.error, *_MALFORMED):
        return "its header cannot be read"
    size = path.stat().st_size
    return None if size == expected else f"it has {size} bytes where {expected} belong"


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter, not a whole model: it has no config.json."
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        return no_weights(str(folder), ggufs)
    return f"{folder} is not a model: it has no config.json."


def _check_index(index: Path) -> None:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = sorted(s for s in shards if not (index.parent / s).is_file())
    except _MALFORMED as error:
        raise LoadError(f"{index} cannot be read ({error}).") from error
    if missing:
        raise LoadError(f"{index.parent} lacks {len(missing)} of its weights: {missing[0]} …")
