"""Guard against forbidden imports in the supervisor and the gateway, naming the import chain.

The guard is a finder at the head of `sys.meta_path` rather than an audit hook: Python calls it once
per imported module, whereas an audit hook would run for every file, socket and process.

The refusal is an ImportError. A library that uses torch optionally, with `try: import torch` and
`except ImportError`, works without it, and `importlib.util.find_spec` still finds what is
installed. All other code stops with a message.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from servekit.errors import ForbiddenImport
from servekit.system.python.import_chain import importers

#: Packages that initialise CUDA when imported or first used, or exist only for it.
NO_CUDA = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "xformers", "flash_attn"}
    | {"triton", "vllm", "llama_cpp", "xllamacpp", "tensorflow", "jax", "jaxlib", "cupy"}
    | {"numba", "pycuda", "cuda", "tensorrt", "ctranslate2", "faster_whisper", "onnxruntime"}
)


class ImportGuard(MetaPathFinder, Loader):
    """Import finder that finds forbidden modules and refuses to load them."""

    def __init__(self, process: str, names: frozenset[str] = NO_CUDA) -> None:
        self._process = process
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:  # top-level names suffice: submodules cannot be reached
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None:
            found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise ForbiddenImport(self._sentence(spec.name), name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: never reached, since `create_module` raises."""

    def _sentence(self, name: str) -> str:
        chain = [step for step, _, _ in importers(sys._getframe(2)) if step != __name__]
        led = " → ".join([*dict.fromkeys(chain), name])
        return f"{name} was imported in the {self._process}, which stays without CUDA: {led}"


def install_guard(process: str) -> ImportGuard:
    """Guard this process from now on. Raises ForbiddenImport for modules already imported."""
    guard = ImportGuard(process)
    for name in sorted(NO_CUDA & sys.modules.keys()):
        raise ForbiddenImport(f"{name} was imported in the {process} before its guard", name=name)
    sys.meta_path.insert(0, guard)
    return guard


@contextlib.contextmanager
def guard_process(process: str) -> Iterator[None]:
    """Guard this process for the duration of the block."""
    guard = install_guard(process)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
