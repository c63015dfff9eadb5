"""What the supervisor and the gateway refuse to import, with the chain that led there.

A finder at the head of `sys.meta_path` rather than an audit hook: Python asks it once per module
that is imported, and never again; an audit hook would run at every file, socket and process.

The refusal is an ImportError. A library that uses torch only where it can be had, and says so with
`try: import torch` and `except ImportError`, goes on without it; and `importlib.util.find_spec`
still tells the truth about what is installed. Everybody else stops, with a sentence.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from servekit.errors import ForbiddenImport
from servekit.system.import_chain import importers

#: Whatever initialises CUDA when imported or at the first use, or is there for nothing else.
NO_CUDA = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "xformers", "flash_attn"}
    | {"triton", "vllm", "llama_cpp", "xllamacpp", "tensorflow", "jax", "jaxlib", "cupy"}
    | {"numba", "pycuda", "cuda", "tensorrt"}
)


class ImportGuard(MetaPathFinder, Loader):
    """Finds forbidden modules, and refuses to load them."""

    def __init__(self, process: str, names: frozenset[str] = NO_CUDA) -> None:
        self._process = process
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:  # a package's name: within it nobody gets further
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None:
            found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise ForbiddenImport(self._sentence(spec.name), name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not reached: there is no module."""

    def _sentence(self, name: str) -> str:
        chain = [step for step, _, _ in importers(sys._getframe(2)) if step != __name__]
        led = " → ".join([*dict.fromkeys(chain), name])
        return f"{name} was imported in the {self._process}, which stays without CUDA: {led}"


def stand(process: str) -> ImportGuard:
    """Guard this process from now on. Raises ForbiddenImport for what is there already."""
    guard = ImportGuard(process)
    for name in sorted(NO_CUDA & sys.modules.keys()):
        raise ForbiddenImport(f"{name} was imported in the {process} before its guard", name=name)
    sys.meta_path.insert(0, guard)
    return guard


@contextlib.contextmanager
def guarded(process: str) -> Iterator[None]:
    """Guard this process within the block."""
    guard = stand(process)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
