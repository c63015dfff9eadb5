"""A probe for NAME==VERSION in the index, run with `python -m`; prints a line of JSON.

For `servekit check` and `servekit doctor`, which import no engine and wait a few seconds at most;
they also end this process. Only pages of the index are fetched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from servekit.engines.model_files import package_index
from servekit.engines.model_files.cache import default_root, disk_free_bytes
from servekit.errors import LoadError
from servekit.units import format_bytes

#: Timeout of each answer of the index; there are no retries.
TIMEOUT_S = 3.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "UV_OFFLINE")


def probe_wheel(requirement: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return a level (ok, warning, error) and a message on a wheel that is not cached."""
    for name in _OFFLINE:
        if environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            said = (
                f"{requirement} is not on this machine, and no index was asked for it: {name}"
                " is set."
            )
            return "warning", said
    settings = replace(
        package_index.Settings.from_environ(environ),
        timeout_s=TIMEOUT_S,
        read_timeout_s=TIMEOUT_S,
        retries=0,
    )
    try:
        wheel = package_index.find_wheel(requirement, settings)
    except package_index.NoSuchWheel as error:
        return "error", error.message
    except LoadError as error:
        return "warning", error.message
    return _of_room(requirement, package_index.find_wheel_bytes(wheel, settings))


def _of_room(requirement: str, size_bytes: int) -> tuple[str, str]:
    if not size_bytes:
        return "ok", f"{requirement} will be fetched; its index does not state its size."
    root = default_root()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free_bytes = disk_free_bytes(there)
    said = f"{requirement} will be fetched: {format_bytes(size_bytes)}"
    if free_bytes < 2 * size_bytes:  # the wheel and its extracted files exist at once
        free = f"{format_bytes(free_bytes)} are free in {root}"
        return "warning", f"{said}, and twice that on the disk; {free}. Free some."
    return "ok", f"{said}; the disk has room."


def main() -> None:
    level, said = probe_wheel(sys.argv[1], os.environ)
    sys.stdout.write(json.dumps({"level": level, "said": said}) + "\n")


if __name__ == "__main__":
    main()
