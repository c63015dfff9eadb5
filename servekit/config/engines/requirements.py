"""What a model asks of its engine, and what an engine lacks of it.

One truth for `servekit check`, which names it at its place in the file, and for `engine: auto`,
which passes over an engine that lacks something. Of the machine nothing is known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from servekit.config import paths
from servekit.config.engines.options import EngineKind
from servekit.config.paths import ADAPTER_FILE, ModelPath
from servekit.config.schema import AdapterConfig, ModelConfig

Format = Literal["folder", "gguf"]

_FORMATS = {"folder": "folders with safetensors", "gguf": "GGUF files"}
_THIS = {"folder": "a folder with safetensors", "gguf": "a GGUF file"}
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is asked for and not to be had. `at` is where, within the model's section.

    `what` goes on after the engine's name: "has no adapters".
    """

    at: tuple[str | int, ...]
    what: str
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What one model asks of whatever runs it; `format` is None where its path is of no use."""

    format: Format | None
    from_hub: bool = False
    adapters: tuple[str, ...] = ()  # PEFT's types, in order; _UNKNOWN of what is not here
    gpus: int = 1
    parallel: str = "auto"
    sleeps: bool = False
    on_cpu: bool = False  # it says so
    remote: bool = False  # its options name an endpoint
    options: frozenset[str] = frozenset()  # their names


def asked(model: ModelConfig, folder: Path) -> Asked:
    """Read off the file, and the headers of what it names; `folder` is the file's own."""
    try:
        path = paths.check(model.path, folder)
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
        remote="url" in model.options,
        options=frozenset(model.options),
    )


def format_of(path: ModelPath) -> Format:
    """A wheel holds a .gguf, named or not."""
    is_gguf = path.kind == "pypi" or path.text.lower().endswith(".gguf")
    return "gguf" if is_gguf else "folder"


def _type(adapter: AdapterConfig, folder: Path) -> str:
    """PEFT's type of an adapter, from its configuration; _UNKNOWN where that is not here."""
    try:
        path = paths.check_adapter(adapter.path, folder)
        config = json.loads((Path(path.text) / ADAPTER_FILE).read_bytes())
    except (ValueError, OSError):  # the engine says what is wrong with it
        return _UNKNOWN
    found = config.get("peft_type") if isinstance(config, dict) else None
    return found.upper() if isinstance(found, str) else _UNKNOWN


def lacks(kind: EngineKind, asks: Asked, *, unknown_too: bool = False) -> Iterator[Lack]:
    """What an engine of that kind lacks; with `unknown_too`, also what it may turn out to lack."""
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
        return  # how it is loaded is its endpoint's business
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
        yield Lack(("device",), f"runs on GPUs only{instead(kind)}")


def instead(kind: EngineKind) -> str:
    """How an engine that needs GPUs is had for CPUs; "" where it is not."""
    if not kind.cpu_package:
        return ""
    return f"; pip install {kind.cpu_package}, in an environment without it, brings one for CPUs"


def _format(kind: EngineKind, asks: Asked) -> Iterator[Lack]:
    if asks.format is None or not kind.reads_files or asks.format in kind.formats:
        return
    runs = " and ".join(text for name, text in _FORMATS.items() if name in kind.formats)
    hint = ""
    if asks.format == "gguf":
        hint = "; `engine: llamacpp` runs it as it is, `engine: transformers` converts it"
    elif asks.from_hub:
        hint = "; one file of a hub's model is org/name/FILE.gguf"
    yield Lack(("path",), f"runs {runs}, and this is {_THIS[asks.format]}{hint}")


def _adapters(kind: EngineKind, asks: Asked, *, unknown_too: bool) -> Iterator[Lack]:
    has = f"has {' and '.join(sorted(kind.adapter_types))} adapters only"
    for number, type_ in enumerate(asks.adapters):
        if type_ == _UNKNOWN and unknown_too:
            what = f"{has}, and what one on the hub is is not known before it is fetched"
            yield Lack(("adapters", number, "path"), what)
        elif type_ not in (_UNKNOWN, *kind.adapter_types):
            yield Lack(("adapters", number, "path"), f"{has}, and this one is {type_}")
