"""Loading of a model's projector: found beside the model's file or named, checked, and proved.

A projector that the configuration names has to fit the model. One that only lies beside the model's
file may belong to another: the model then serves texts, with a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from servekit.engines.api.base import Report
from servekit.engines.api.load_phases import phase
from servekit.engines.llamacpp.library.bindings import FLASH_ATTENTION, Binding, Settings
from servekit.engines.llamacpp.media.mtmd import Projector, open_mtmd
from servekit.engines.llamacpp.model import Model
from servekit.engines.media.media_warnings import warn_unavailable
from servekit.engines.model_files.source import resolve_file
from servekit.errors import LoadError
from servekit.model_metadata import projector
from servekit.model_metadata.gguf import Header, read_header
from servekit.protocol.messages import WorkerSpec


def find_projector(
    model: Path, header: Header, spec: WorkerSpec, report: Report
) -> tuple[Path, Header] | None:
    """Return the file of the model's projector and its header; None if it has none.

    Raises LoadError for a named file that is no projector, is damaged, or is another model's.
    """
    named = spec.options.get("mmproj")
    if named is False:
        return None
    if named is not None:
        path = resolve_file(str(named), None, report)
        found = read_header(path)
        if why := projector.find_fault(found, header):
            raise LoadError(f"options.mmproj: {path} {why}.")
        return path, found
    try:
        return projector.find_beside(model, header)
    except LoadError as error:
        warn_unavailable(spec.model, error.message)
        return None


def load_projector(
    binding: Binding, path: Path, model: Model, settings: Settings, spec: WorkerSpec
) -> Projector | None:
    """Load a projector; None, with a warning, for one that was only found and does not fit.

    Raises LoadError.
    """
    try:
        with phase("images", file=str(path)):
            return _load(binding, path, model, settings, spec)
    except LoadError as error:
        if spec.options.get("mmproj") is not None:
            raise LoadError(f"options.mmproj: {error.message}") from error
        warn_unavailable(spec.model, error.message)
        return None


def _load(
    binding: Binding, path: Path, model: Model, settings: Settings, spec: WorkerSpec
) -> Projector:
    mtmd = open_mtmd(binding.library)
    fields: dict[str, Any] = {
        "use_gpu": spec.device == "cuda",
        "print_timings": False,
        "n_threads": settings.threads,
        "flash_attn_type": FLASH_ATTENTION[settings.flash_attention],
    }
    for name in ("image_min_tokens", "image_max_tokens"):
        if (asked := spec.options.get(name)) is not None:
            fields[name] = int(asked)
    address = mtmd.load_projector(str(path), model.address, fields)
    if not address:
        raise LoadError(f"llama.cpp cannot load {path} for this model: {mtmd.log.complaints}.")
    found = Projector(mtmd, address, model.input_size, path)
    if not found.modalities:
        found.close()
        raise LoadError(f"{path} reads neither images nor recordings.")
    return found
