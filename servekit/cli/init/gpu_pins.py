"""GPUs that another program's file gives a model, as keys of servekit."""

from __future__ import annotations

import re

from servekit.cli.init.brought_models import BroughtModel
from servekit.system.gpu.gpus import Gpu


def of_docker(value: str) -> str | None:
    """Return the devices of docker's `--gpus` as CUDA_VISIBLE_DEVICES has them; None: all."""
    found = re.search(r"device=([\w,-]+)", value)
    return found[1] if found else None


def pin_model(
    model: BroughtModel, visible: str | None, gpus: tuple[Gpu, ...], *, per_replica: int = 0
) -> None:
    """Add the GPUs of CUDA_VISIBLE_DEVICES, None: all; `per_replica` are those a server uses.

    0 is all that it sees. GPUs that this machine lacks are written as a comment, since a file
    that names them could not be served here.
    """
    if visible is None:
        count = per_replica or len(gpus)
        if count > 1 and len(gpus) >= count:
            model.keys |= {"replicas": model.keys.get("replicas", 1), "gpus_per_replica": count}
        elif count > 1:
            _drop_spread(model, count)
        return
    named = [part.strip() for part in visible.split(",") if part.strip()]
    if not named or named == ["-1"]:
        model.keys["device"] = "cpu"
        return
    pins = [int(part) if part.isdecimal() else part for part in named]
    keys: dict[str, object] = {"gpus": pins, "replicas": model.keys.get("replicas", 1)}
    if (count := per_replica or len(pins)) > 1:
        keys["gpus_per_replica"] = count
    if all(_is_there(pin, gpus) for pin in pins):
        model.keys |= keys
        return
    for key in ("gpus_per_replica", "memory"):
        model.keys.pop(key, None)
    keys = {key: value for key, value in keys.items() if key not in model.keys}
    model.hints += [f"{key}: {_flow(value)}" for key, value in keys.items()]
    model.notes.append(f"CUDA_VISIBLE_DEVICES={visible}: this machine has no such GPUs")


def _drop_spread(model: BroughtModel, count: int) -> None:
    """Leave out the spread over more GPUs than there are."""
    model.keys.pop("gpus_per_replica", None)
    model.hints.append(f"gpus_per_replica: {count}")
    model.notes.append(f"{count} GPUs: this machine has fewer")


def _is_there(pin: int | str, gpus: tuple[Gpu, ...]) -> bool:
    return any(pin == gpu.index or (isinstance(pin, str) and gpu.uuid == pin) for gpu in gpus)


def _flow(value: object) -> str:
    return str(value).replace("'", "")
