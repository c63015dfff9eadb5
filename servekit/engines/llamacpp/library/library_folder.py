"""A build of llama.cpp without a Python package: a folder with its shared libraries.

Such a folder is the result of compiling llama.cpp, or comes with packages of other languages, for
CUDA too. Its structs must match those of `struct_layouts.py`: they are checked by the library's
default parameters before use, and by the properties of a created context afterwards.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from ctypes import c_char_p, c_size_t
from pathlib import Path
from typing import Any

import structlog

from servekit.engines.llamacpp.library.bindings import StructBinding
from servekit.engines.llamacpp.library.capi import Library
from servekit.engines.llamacpp.library.struct_layouts import recognise_defaults
from servekit.errors import LoadError

log: Any = structlog.get_logger(__name__)

#: File names may contain the version or the target: libllama.so.0, libllama.0.so.
_LIBRARY = re.compile(r"libllama(\.[\w.-]+)?\.(so|dylib)(\.[\d.]+)?")
_MISSING = re.compile(r"(\S+): cannot open shared object file")
_CUDA = "libggml-cuda.so"
_DRIVER = "That is of NVIDIA's driver, which is not installed."
_TOOLKIT = (
    "What it needs of CUDA comes with its toolkit, or with pip: nvidia-cuda-runtime and "
    "nvidia-cublas (of CUDA 12: nvidia-cuda-runtime-cu12 and nvidia-cublas-cu12)."
)


class Build(StructBinding):
    """The binding for a folder with llama.cpp's libraries; see the module's docstring."""

    def __init__(self, path: Path) -> None:
        """Open the folder `path`, or libllama in it. Raises LoadError."""
        file = _find_library(path)
        self._folder = file.parent
        self._obstacle = _open_cuda(self._folder / _CUDA)
        try:
            library = Library(str(file), f"llama.cpp {_read_version(file)}")
        except OSError as error:
            raise LoadError(self._obstacle or f"{file} cannot be loaded: {error}.") from error
        library.declare("ggml_backend_reg_count", c_size_t, ())
        library.declare("ggml_backend_load_all_from_path", None, (c_char_p,))
        if not library.call("ggml_backend_reg_count"):  # no backend is linked into it
            library.call("ggml_backend_load_all_from_path", str(self._folder).encode())
        super().__init__(library, *recognise_defaults(library))

    @property
    def without_gpu(self) -> str:
        if self._obstacle:
            return self._obstacle
        if not (self._folder / _CUDA).exists():
            return f"{self._folder} has no {_CUDA}, llama.cpp's backend for GPUs."
        return f"{self.library.binding} in {self._folder} finds no GPU."


def _find_library(path: Path) -> Path:
    """Return the path of libllama. Raises LoadError."""
    if path.is_file():
        return path.absolute()
    found = sorted(one for one in path.glob("libllama*") if _LIBRARY.fullmatch(one.name))
    if not found:
        raise LoadError(f"options.library: there is no libllama.so in {path}.")
    return found[0].absolute()


def _read_version(file: Path) -> str:
    try:
        function = ctypes.CDLL(str(file))["llama_version"]
    except AttributeError:
        return "of an unknown version"
    function.restype, function.argtypes = c_char_p, ()
    return str((function() or b"").decode(errors="replace"))


# ---------------------------------------------------------------- NVIDIA's libraries


def _open_cuda(path: Path) -> str:
    """Open llama.cpp's CUDA backend, which llama.cpp itself skips silently if it cannot be loaded.

    Returns the reason of a failure; "" if there is none.
    """
    if not path.exists():
        return ""
    try:
        _open_library(path, set())
    except OSError as error:
        log.info("library_load_failed", path=str(path), reason=str(error))
        remedy = _DRIVER if "libcuda.so" in str(error) else _TOOLKIT
        return f"{path} cannot be loaded: {error}. {remedy}"
    return ""


def _open_library(path: Path, tried: set[str]) -> None:
    """Open a library, after the dependencies that the loader does not find.

    In pip's CUDA packages each library is in a folder of its own, which no loader searches.
    """
    while True:
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            missing = _MISSING.match(str(error))
            found = next(_in_packages(missing[1]), None) if missing else None
            if missing is None or found is None or missing[1] in tried:
                raise
            tried.add(missing[1])
            _open_library(found, tried)
        else:
            return


def _in_packages(name: str) -> Iterator[Path]:
    for entry in sys.path:
        yield from Path(entry, "nvidia").glob(f"*/lib/{name}")
