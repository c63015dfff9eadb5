"""An adapter's files: fetched like a model's, with only their headers read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from servekit.engines.model_files.source import resolve_adapter
from servekit.errors import RequestError
from servekit.model_metadata import model_folder
from servekit.protocol.adapters import AdapterSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PARAM = "lora_path"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder, its configuration as written, and the shape of each tensor by name."""

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def read_adapter(spec: AdapterSpec) -> AdapterFiles:
    """Find the adapter and fetch it if necessary; its weights are not read.

    Raises RequestError if the folder holds no adapter, a damaged one, or weights only as a pickle,
    and LoadError if it cannot be fetched now.
    """
    folder = resolve_adapter(spec.path, spec.revision)
    config = _read_config(folder)
    _require_safetensors(folder)
    return AdapterFiles(folder, config, _read_shapes(folder / WEIGHTS))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        what = (
            "a whole model, not an adapter" if (folder / "config.json").is_file() else "no adapter"
        )
        raise RequestError(f"{folder} is {what}: it has no {CONFIG}.", param=PARAM)
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise RequestError(f"{path} cannot be read: {error}.", param=PARAM) from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} is not a JSON object.", param=PARAM)
    return config


def _require_safetensors(folder: Path) -> None:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        reason = (
            f"it has its weights only as {pickles[0]}, a pickle format that can run code when it "
            "is read; save the adapter once more with peft's save_pretrained"
            if pickles
            else f"it has no {WEIGHTS}"
        )
        raise RequestError(f"{folder} cannot be loaded: {reason}.", param=PARAM)
    if reason := model_folder.damage(path) or "":
        raise RequestError(f"{path} is damaged: {reason}. Fetch it again.", param=PARAM)


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
