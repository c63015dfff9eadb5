"""A converter of an Ollama installation: its models are GGUF files, which are served from there.

    MODELS/manifests/registry.ollama.ai/library/qwen3/0.6b    JSON: the layers of qwen3:0.6b
    MODELS/blobs/sha256-…                                     a layer: weights, parameters, …

MODELS is OLLAMA_MODELS or ~/.ollama/models, of the service /usr/share/ollama/.ollama/models. A text
as `ollama list` prints it may say which models are brought.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servekit.cli.init import brought_models
from servekit.cli.init.brought_models import BroughtModel, Carried
from servekit.config import ollama_names
from servekit.errors import ConfigError
from servekit.model_metadata import gguf

#: How long Ollama keeps a model loaded.
_KEEP_S = 300
_LATEST = ":latest"
_LIBRARY = "registry.ollama.ai/library/"
_REGISTRY = "registry.ollama.ai/"
_LAYER = "application/vnd.ollama.image."
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
#: Layers that are not the weights or their parameters, and what becomes of them.
_WHY_NOT = {
    "template": "",  # the file has the publisher's own, which is used
    "license": "",
    "system": "its system prompt: clients send one, or `chat_template` has it",
    "projector": "its projector: it answers to text only",
    "adapter": "its adapter, which is a GGUF file: the weights are served without it",
    "messages": "its example messages: clients send them",
}
_HEAD = (
    "Made from Ollama's models by `servekit init --from ollama`. Weights are served from Ollama's"
    " own folder: `ollama rm` removes them here, too.",
    "Models are loaded by the first request for them, and leave after five minutes without one, as"
    " there. Clients of Ollama's API find it at the same paths. Check the file, then serve it:",
)


@dataclass(frozen=True, slots=True)
class _Store:
    """Ollama's folder of models."""

    root: Path

    def names(self) -> list[str]:
        """Return the names of all models, as `ollama list` has them."""
        manifests = self.root / "manifests"
        files = sorted(path for path in manifests.rglob("*") if path.is_file())
        return [_name_of(str(path.relative_to(manifests))) for path in files]

    def layers(self, name: str) -> list[Mapping[str, Any]]:
        """Return the layers of a model; [] if it is not here."""
        try:
            manifest = json.loads(self._manifest_of(name).read_bytes())
            return [layer for layer in manifest["layers"] if isinstance(layer, dict)]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def _manifest_of(self, name: str) -> Path:
        path, _, tag = name.partition(":")
        host = "" if "." in path.partition("/")[0] and "/" in path else _REGISTRY
        space = "" if "/" in path else "library/"
        return self.root / "manifests" / f"{host}{space}{path}" / (tag or "latest")

    def blob(self, digest: str) -> Path:
        """Return the file of a layer, which old versions named with a colon."""
        dashed = self.root / "blobs" / digest.replace(":", "-")
        return dashed if dashed.exists() else self.root / "blobs" / digest


def convert_models(
    source: str | None, environ: Mapping[str, str], *, stdin: str | None = None
) -> Carried:
    """Convert the models of a folder, or those that a list names; raises ConfigError.

    `source` is Ollama's folder, or a file with the output of `ollama list`; "-" is `stdin`.
    """
    text = _read_list(source, stdin)
    store = _find_store(source if text is None else None, environ, needed=text is None)
    names = _parse_list(text) if text is not None else store.names() if store else []
    if not names:
        raise ConfigError(f"{source or 'Ollama'} has no models")
    models = _merge_equal([_bring_model(name, store) for name in names])
    brought_models.require_models(models, source or "Ollama")
    brought_models.name_models(models)
    notes = ["port 11434, where its clients look: write it below once Ollama is stopped"]
    tail: dict[str, Any] = {"server": {"host": "127.0.0.1", "port": 8000}}
    return Carried(
        brought_models.compose_file(_HEAD, models, tail, notes),
        brought_models.left_out_lines(models, notes),
    )


def _merge_equal(models: list[BroughtModel]) -> list[BroughtModel]:
    """Make one model of names with the same weights and parameters: the others are aliases."""
    kept: list[BroughtModel] = []
    for model in models:
        same = (one for one in kept if "path" in model.keys and _settings(one) == _settings(model))
        if (first := next(same, None)) is None:
            kept.append(model)
        else:
            names = [model.name, *model.keys.get("aliases", ())]
            first.keys["aliases"] = [*first.keys.get("aliases", ()), *names]
    return kept


def _settings(model: BroughtModel) -> dict[str, Any]:
    return {key: value for key, value in model.keys.items() if key != "aliases"}


# ---------------------------------------------------------------- where the models are


def _read_list(source: str | None, stdin: str | None) -> str | None:
    """Return a list of models as text; None if `source` is a folder."""
    if source == "-":
        return sys.stdin.read() if stdin is None else stdin
    if source is None or not Path(source).is_file():
        return None
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None


def _parse_list(text: str) -> list[str]:
    """Return the names in the output of `ollama list`. Raises ConfigError."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[0][:2] != ["NAME", "ID"]:
        raise ConfigError("this is no output of `ollama list`, which begins with NAME and ID")
    return [words[0] for words in lines[1:]]


def _find_store(source: str | None, environ: Mapping[str, str], *, needed: bool) -> _Store | None:
    if source is not None:
        folders = [Path(source), Path(source) / "models"]
    else:
        home = Path(environ.get("HOME") or Path.home())
        own = environ.get("OLLAMA_MODELS")
        folders = [Path(own)] if own else []
        folders += [home / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
    for folder in folders:
        if (folder / "manifests").is_dir():
            return _Store(folder.absolute())
    if not needed:
        return None
    looked = " or ".join(map(str, folders))
    raise ConfigError(
        f"there are no models of Ollama in {looked}; name its folder, or a file with the output of"
        " `ollama list`: servekit init --from ollama FOLDER"
    )


def _name_of(path: str) -> str:
    """Return Ollama's name for the path of a manifest: qwen3:0.6b."""
    name, _, tag = path.rpartition("/")
    short = name.removeprefix(_LIBRARY).removeprefix(_REGISTRY)
    return f"{short}:{tag}"


# ---------------------------------------------------------------- a model


def _bring_model(name: str, store: _Store | None) -> BroughtModel:
    short = name.removesuffix(_LATEST)
    model = BroughtModel(short, {"aliases": [name]} if short != name else {})
    layers = {_kind_of(layer): layer for layer in store.layers(name)} if store else {}
    blob = store.blob(str(layers["model"].get("digest"))) if store and "model" in layers else None
    if blob is not None and blob.is_file():
        _bring_weights(model, blob)
    elif name.endswith("-cloud") or (layers and "model" not in layers):
        model.notes.append("the model: it runs in Ollama's cloud")
    else:
        _bring_from_hub(model, name)
    if "path" not in model.keys:
        return model
    params = _read_params(store, layers.get("params")) if store else {}
    _bring_params(model, params)
    model.keys |= {"load": "on_demand", "idle_unload_s": _KEEP_S}
    for kind in layers.keys() & _WHY_NOT.keys():
        if reason := _WHY_NOT[kind]:
            model.notes.append(reason)
    return model


def _kind_of(layer: Mapping[str, Any]) -> str:
    return str(layer.get("mediaType", "")).removeprefix(_LAYER)


def _bring_weights(model: BroughtModel, blob: Path) -> None:
    try:
        metadata = gguf.read_gguf(blob).metadata
    except (ValueError, OSError) as error:
        model.notes.append(f"the model: {error}")
        return
    model.keys |= {"path": str(blob), "engine": "auto"}
    kind = metadata.get("general.architecture")
    what = [str(metadata.get("general.name") or kind), gguf.quantization(metadata)]
    model.comments.append(" ".join(filter(None, what)))
    if f"{kind}.vision.block_count" in metadata or kind in _OF_OLLAMA:
        hub_id = ollama_names.find_hub_id(model.name)
        instead = f": {hub_id}" if hub_id else ""
        model.comments.append(
            "Its file is made for Ollama's own engine, and llama.cpp may refuse it; the hub has"
            f" others{instead}."
        )
    elif "tokenizer.chat_template" not in metadata and f"{kind}.pooling_type" not in metadata:
        model.notes.append("its prompt template: the file has none; see `chat_template`")


#: Architectures that Ollama names otherwise than llama.cpp.
_OF_OLLAMA = {"gptoss", "mllama"}


def _bring_from_hub(model: BroughtModel, name: str) -> None:
    """Bring a model whose weights are not in Ollama's folder, where its name says a hub id."""
    if name.startswith(("hf.co/", "huggingface.co/")):
        path, reason = brought_models.resolve_model(name.removesuffix(_LATEST))
        if reason:
            model.notes.append(f"the model: {reason}")
        else:
            model.keys |= {"path": path, "engine": "auto"}
    elif hub_id := ollama_names.find_hub_id(name):
        model.keys |= {"path": hub_id, "engine": "auto"}
        model.notes.append("Ollama's weights, which are not here: these are the publisher's own")
    else:
        model.notes.append("the model: its weights are not here, and no hub id is known for it")


def _read_params(store: _Store, layer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if layer is None:
        return {}
    try:
        found = json.loads(store.blob(str(layer.get("digest"))).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _bring_params(model: BroughtModel, params: Mapping[str, Any]) -> None:
    sampling = dict(_read_sampling(params))
    if sampling:
        model.keys["sampling"] = sampling
    context = params.get("num_ctx")
    if isinstance(context, int) and context >= 16:
        model.keys["max_context"] = context
    for key, value in params.items():
        if key == "stop":
            texts = ", ".join(map(repr, value if isinstance(value, list) else [value]))
            model.notes.append(f"stop ({texts}): the file's own ends of an answer count")
        elif key not in ("num_ctx", "num_predict") and _SAMPLING.get(key) not in sampling:
            model.notes.append(f"{key}: {value}")


def _read_sampling(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, name in _SAMPLING.items():
        value = params.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if name != "max_tokens" or value >= 1:  # -1 is the end of the context
            yield name, value
