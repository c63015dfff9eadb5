"""The hook that Python imports at its start, because its folder is first on PYTHONPATH.

It starts the recorder, then removes itself: the folder leaves `sys.path`, and the shadowed
`sitecustomize` is imported. Stdlib only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Optional

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, folder: str) -> ModuleType:
    """Load a module of `folder`, a path relative to this folder, under a private name."""
    path = os.path.join(_HERE, folder, name + ".py")
    spec = importlib.util.spec_from_file_location("_servekit_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _start() -> None:
    directory = os.environ.get("SERVEKIT_TRACE_CUDA", "")
    if directory:
        chain = _load("import_chain", "../../../system/python")
        _load("recorder", "..").start(directory, chain)


def _next(skip: str) -> Optional[ModuleType]:
    """Import the `sitecustomize` that this one shadows, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != skip]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "sitecustomize":  # not when imported as part of the package
    try:
        _start()
    except Exception as error:  # the program must run; the report shows the gap
        sys.stderr.write("servekit trace-cuda: cannot record: %r\n" % (error,))
    _next(_HERE)
