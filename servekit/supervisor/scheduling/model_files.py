"""Problems with model files that the engines would find when they load them.

For `servekit check`: only headers are read, and neither torch nor an engine is imported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from servekit.config.engines.quantization_checks import get_method
from servekit.config.schema import ModelConfig
from servekit.errors import LoadError
from servekit.model_metadata import ctranslate2, gguf, model_folder, projector
from servekit.model_metadata.gguf import read_header
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.scheduling import local_model_files

#: Engines that convert a GGUF file and load it with transformers; llamacpp loads it directly.
_CONVERTING = {"transformers", "vllm"}
#: Ends of the names of architectures that write no text, or only what is said.
_NO_WRITERS = ("ForSequenceClassification", "WhisperForConditionalGeneration")
#: Other packages' engines may load files of any kind.
_OURS = {*_CONVERTING, "llamacpp", "faster_whisper"}


def problems(plan: Plan) -> Iterator[str]:
    """Yield a message for each model whose files are here and cannot be loaded."""
    for index, model, path in _find_local(plan):
        if reason := problem(model, path):
            yield f"models[{index}].path: {model.name}: {reason}"


def list_blind(plan: Plan) -> Iterator[str]:
    """Yield a message for each model that serves texts only, for its projector is unusable."""
    for index, model, path in _find_local(plan):
        if not problem(model, path) and (reason := _explain_no_images(model, path)):
            yield f"models[{index}].path: {model.name} serves texts only: {reason}"


def _find_local(plan: Plan) -> Iterator[tuple[int, ModelConfig, Path]]:
    """Yield each model of our engines whose files are here: its place in the file, and they."""
    if plan.config.launcher == "ray":  # the files are on other machines
        return
    for index, model in enumerate(plan.config.models):
        if model.engine in _OURS:
            environ = {**plan.source.environ, **model.env}
            path = local_model_files.find_model_files(model.path, model.revision, environ)
            if path is not None:
                yield index, model, path


def problem(model: ModelConfig, path: Path) -> str:
    """Return why the engine of `model` cannot load the files at `path`, or "".

    Unreadable files are reported, not raised.
    """
    try:
        if model.engine == "llamacpp" and path.is_dir():
            [path] = projector.find_models(path)
        if model.engine == "faster_whisper":
            ctranslate2.check_whisper(path)
            return ""
        if path.is_file():
            return _of_gguf(model, path) or _of_projector(model, path)
        model_folder.check(path)
        fault = model_folder.lacks_tokenizer(path) or _unknown_folder(model, path)
        return fault or _of_quantization(model, path)
    except LoadError as error:
        return error.message
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    except ValueError:  # none or several .gguf files: left to the engine
        return ""


def _of_gguf(model: ModelConfig, path: Path) -> str:
    parts = gguf.parts(path)
    if missing := [part for part in parts if not part.is_file()]:
        return f"{path} is one of {len(parts)} parts, and {missing[0].name} is not there."
    converted = model.engine in _CONVERTING
    for part in parts:
        header = read_header(part, part=not converted)
        if part == path and "tokenizer.ggml.tokens" not in header.metadata:
            return f"{path} has no tokenizer: its metadata has no tokenizer.ggml.tokens."
    architecture = read_header(path, part=True).architecture
    names = ("modeling_gguf_pytorch_utils.py", "integrations/ggml.py")
    if model.engine == "transformers" and not _is_named(architecture, names):
        return (
            f"{path}: transformers cannot convert the architecture {architecture!r}; "
            "engine llamacpp may load it."
        )
    return ""


def _of_projector(model: ModelConfig, path: Path) -> str:
    """Return why llama.cpp cannot load the projector that the options name, if it is here."""
    named = model.options.get("mmproj")
    if model.engine != "llamacpp" or not named or not (file := Path(str(named))).is_file():
        return ""
    fault = projector.find_fault(read_header(file), read_header(path, part=True))
    return f"options.mmproj: {file} {fault}." if fault else ""


def _explain_no_images(model: ModelConfig, path: Path) -> str:
    """Return why llama.cpp cannot use the projector beside the model, or ""."""
    if model.engine != "llamacpp" or model.options.get("mmproj") is not None:
        return ""
    try:
        if path.is_dir():
            [path] = projector.find_models(path)
        projector.find_beside(path, read_header(path, part=True))
    except LoadError as error:
        return error.message
    except (OSError, ValueError):  # left to the engine
        return ""
    return ""


def _unknown_folder(model: ModelConfig, folder: Path) -> str:
    """Return a message if neither transformers nor the folder has code for the model type."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kind, own = config.get("model_type"), config.get("auto_map")
    except (ValueError, AttributeError, RecursionError):
        return f"{folder / 'config.json'} is damaged: it has to be a JSON object."
    names = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    if model.engine != "transformers" or not kind or own or _is_named(str(kind), names):
        return ""
    return f"{folder}: this version of transformers does not know the model type {kind!r}."


def _of_quantization(model: ModelConfig, folder: Path) -> str:
    """Return why transformers cannot quantise the weights while it loads them, or ""."""
    if not get_method(model):
        return ""
    config = json.loads((folder / "config.json").read_bytes())
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    scores = model.options.get("task") == "rerank" or (folder / "modules.json").is_file()
    if scores or architecture.endswith(_NO_WRITERS):
        return "options.quantization is for models that write text, and this one does not."
    if config.get("quantization_config"):
        return "it is quantised already: leave out options.quantization."
    return ""


def _is_named(name: str, files: tuple[str, ...]) -> bool:
    """Return whether one of transformers' source files contains the name; True if unreadable.

    The text is searched because an import would take seconds, and torch.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return True
    root = Path(found.submodule_search_locations[0])
    there = [root / file for file in files if (root / file).is_file()]
    texts = [file.read_text(errors="replace") for file in there]
    return not texts or any(f'"{name}"' in text or f"'{name}'" in text for text in texts)
