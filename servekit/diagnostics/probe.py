"""A child that imports a module: `python -m servekit.diagnostics.probe MODULE`, one line of JSON.

It is a separate process, because an import may crash, hang or initialise CUDA. For torch it also
queries the GPUs, which creates a context on each for a moment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def probe_library() -> None:
    # The library may print; only the line of JSON goes to the real stdout.
    out = os.dup(1)
    os.dup2(2, 1)
    name = sys.argv[1]
    try:
        module = importlib.import_module(name)
        said = {"version": str(getattr(module, "__version__", "")), "error": ""}
        if name == "torch":
            said |= _probe_torch(module)
    except BaseException as error:
        said = {"version": "", "error": f"{type(error).__name__}: {error}"}
    os.write(out, json.dumps(said).encode() + b"\n")
    os._exit(0)  # skip the libraries' exit handlers


def _probe_torch(torch: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"cuda": torch.version.cuda, "gpus": [], "reason": ""}
    if torch.version.cuda is None:
        return said
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            torch.zeros(1, device=f"cuda:{index}")
            said["gpus"].append(str(properties.uuid))
    except Exception as error:
        said["reason"] = str(error).splitlines()[0]
    return said


if __name__ == "__main__":
    probe_library()
