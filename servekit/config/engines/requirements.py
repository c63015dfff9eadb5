"""Requirements of a model, and those that an engine does not meet.

`servekit check` reports them at their place in the file; `engine: auto` skips an engine that lacks
something. The machine plays no role here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from servekit.config import paths
from servekit.config.engines.options import EngineKind
from servekit.config.paths import ADAPTER_FILE, ModelPath
from servekit.config.schema import AdapterConfig, ModelConfig
from servekit.model_metadata import ctranslate2

Format = Literal["folder", "gguf", "ctranslate2"]

_FORMATS = {
    "folder": "folders with safetensors",
    "gguf": "GGUF files",
    "ctranslate2": "Whisper models of CTranslate2",
}
_THIS = {
    "folder": "a folder with safetensors",
    "gguf": "a GGUF file",
    "ctranslate2": "a model of CTranslate2",
}
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Lack:
    """An unmet requirement. `at` is its place within the model's section.

    `what` continues a sentence after the engine's name: "has no adapters".
    """

    at: tuple[str | int, ...]
    what: str
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """The requirements of one model; `format` is None where its path is invalid."""

    format: Format | None
    from_hub: bool = False
    adapters: tuple[str, ...] = ()  # PEFT's types, in order; _UNKNOWN if not local
    gpus: int = 1
    parallel: str = "auto"
    sleeps: bool = False
    on_cpu: bool = False  # explicitly
    options: frozenset[str] = frozenset()  # their names


def requirements_of(model: ModelConfig, folder: Path) -> Asked:
    """Read the requirements from the model's section and its adapters' configurations.

    `folder` is that of the configuration file.
    """
    try:
        path = paths.check_model_path(model.path, folder)
    except ValueError:
        path = None
    return Asked(
        format=None if path is None else format_of(path),
        from_hub=path is not None and path.kind == "hub",
        adapters=tuple(_type(adapter, folder) for adapter in model.adapters),
        gpus=model.gpus_per_replica,
        parallel=model.parallel,
        sleeps=model.idle_sleep_s is not None,
        on_cpu=model.device == "cpu",
        options=frozenset(model.options),
    )


def engine_of_options(options: Collection[str]) -> str:
    """Return the engine that the names of the options tell, or ""."""
    return "openai" if "url" in options else "command" if "command" in options else ""


def format_of(path: ModelPath) -> Format:
    """Return the format of a path; a model of the hub is a folder until it is fetched."""
    if path.is_gguf:
        return "gguf"
    is_ours = path.kind == "local" and ctranslate2.is_model(Path(path.text))
    return "ctranslate2" if is_ours else "folder"


def _type(adapter: AdapterConfig, folder: Path) -> str:
    """Return PEFT's type of an adapter, from its local configuration, or _UNKNOWN."""
    try:
        path = paths.check_adapter_path(adapter.path, folder)
        config = json.loads((Path(path.text) / ADAPTER_FILE).read_bytes())
    except (ValueError, OSError):  # the engine will report the error
        return _UNKNOWN
    found = config.get("peft_type") if isinstance(config, dict) else None
    return found.upper() if isinstance(found, str) else _UNKNOWN


def find_lacks(kind: EngineKind, asks: Asked, *, unknown_too: bool = False) -> Iterator[Lack]:
    """Yield the unmet requirements; with `unknown_too`, also those that cannot be decided yet."""
    yield from _format(kind, asks)
    if asks.adapters and not kind.adapters:
        yield Lack(("adapters",), "has no adapters", at_key=True)
    elif asks.adapters and asks.gpus > 1 and not kind.adapters_spread:
        yield Lack(
            ("adapters",), "has none for a model with `gpus_per_replica` over 1", at_key=True
        )
    elif kind.adapter_types:
        yield from _adapters(kind, asks, unknown_too=unknown_too)
    if "remote" in kind.formats:
        return  # the endpoint decides how the model is loaded
    if asks.gpus > 1 and not kind.parallel:
        yield Lack(("gpus_per_replica",), "cannot be spread over several GPUs")
    elif asks.parallel not in ("auto", *kind.parallel):
        has = f", only {' or '.join(kind.parallel)}" if kind.parallel else ""
        yield Lack(("parallel",), f"has no `parallel: {asks.parallel}`{has}")
    if asks.sleeps and (not kind.sleeps or kind.is_for_cpus):
        on_cpu = " on a CPU" if kind.sleeps else ""
        what = f"cannot sleep{on_cpu}; `idle_unload_s` unloads a model, whatever runs it"
        yield Lack(("idle_sleep_s",), what, at_key=True)
    if asks.on_cpu and kind.gpu_here == "must":
        yield Lack(("device",), f"runs on GPUs only{suggest_engines(kind)}")


def suggest_engines(kind: EngineKind) -> str:
    """Return a hint for the CPU build of an engine that needs GPUs; "" if there is none."""
    if not kind.cpu_package:
        return ""
    return f"; pip install {kind.cpu_package}, in an environment without it, brings one for CPUs"


def _format(kind: EngineKind, asks: Asked) -> Iterator[Lack]:
    if asks.format is None or not kind.reads_files or asks.format in kind.formats:
        return
    if asks.format == "ctranslate2" and "folder" in kind.formats:
        return  # another package's engine may load it; of ours, the check of the files tells
    runs = " and ".join(text for name, text in _FORMATS.items() if name in kind.formats)
    hint = ""
    if asks.format == "gguf":
        hint = "; `engine: llamacpp` runs it as it is, `engine: transformers` converts it"
    elif asks.format == "ctranslate2":
        hint = f"; {ctranslate2.ENGINE}"
    elif asks.from_hub:
        hint = "; a GGUF file of the hub is org/name:Q4_K_M, or org/name/FILE.gguf"
    yield Lack(("path",), f"runs {runs}, and this is {_THIS[asks.format]}{hint}")


def _adapters(kind: EngineKind, asks: Asked, *, unknown_too: bool) -> Iterator[Lack]:
    has = f"has {' and '.join(sorted(kind.adapter_types))} adapters only"
    for number, type_ in enumerate(asks.adapters):
        if type_ == _UNKNOWN and unknown_too:
            what = f"{has}, and what one on the hub is is not known before it is fetched"
            yield Lack(("adapters", number, "path"), what)
        elif type_ not in (_UNKNOWN, *kind.adapter_types):
            yield Lack(("adapters", number, "path"), f"{has}, and this one is {type_}")
