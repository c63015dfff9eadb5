"""A build of llama.cpp without a Python package: a folder with its shared libraries.

Such a folder is the result of compiling llama.cpp, or comes with packages of other languages, for
CUDA too. Its structs must match those of `struct_layouts.py`: they are checked by the library's
default parameters before use, and by the properties of a created context afterwards.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import structlog

from servekit.engines.llamacpp.bindings import (
    Binding,
    Settings,
    context_fields,
    model_fields,
)
from servekit.engines.llamacpp.capi import Library
from servekit.engines.llamacpp.struct_layouts import (
    CONTEXT_LAYOUTS,
    MODEL_LAYOUTS,
    ROOM,
    VERSIONS,
    Layout,
    fill_fields,
    recognise_layout,
)
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


class _Raw(ctypes.Structure):
    """A struct of either kind, before its layout is recognised."""

    _fields_ = (("bytes", ctypes.c_uint8 * ROOM),)


_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_reg_count": (c_size_t, ()),
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "llama_model_default_params": (_Raw, ()),
    "llama_context_default_params": (_Raw, ()),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_n_threads": (c_int32, (c_void_p,)),
}


class Build(Binding):
    """The binding for a folder with llama.cpp's libraries; see the module's docstring."""

    def __init__(self, path: Path) -> None:
        """Open the folder `path`, or libllama in it. Raises LoadError."""
        file = _find_library(path)
        self._folder = file.parent
        self._obstacle = _open_cuda(self._folder / _CUDA)
        try:
            self.library = Library(str(file), f"llama.cpp {_read_version(file)}")
        except OSError as error:
            raise LoadError(self._obstacle or f"{file} cannot be loaded: {error}.") from error
        for name, (result, arguments) in _PROTOTYPES.items():
            self.library.declare(name, result, arguments)
        if not self.library.call("ggml_backend_reg_count"):  # no backend is linked into it
            self.library.call("ggml_backend_load_all_from_path", str(self._folder).encode())
        self._model_params = self._default_params("llama_model_default_params", MODEL_LAYOUTS)
        self._context_params = self._default_params("llama_context_default_params", CONTEXT_LAYOUTS)
        self._load = self.library.creating(
            "llama_model_load_from_file", type(self._model_params), c_char_p
        )
        self._init = self.library.creating(
            "llama_init_from_model", type(self._context_params), c_void_p
        )

    def load_model(self, settings: Settings) -> int | None:
        params = type(self._model_params).from_buffer_copy(self._model_params)
        fill_fields(params, model_fields(settings))
        made: int | None = self._load(settings.path.encode(), params)
        return made

    def new_context(self, model: int, settings: Settings) -> int | None:
        params = type(self._context_params).from_buffer_copy(self._context_params)
        fill_fields(params, context_fields(settings))
        made: int | None = self._init(model, params)
        if made:
            self._confirm_settings(made, settings)
        return made

    @property
    def without_gpu(self) -> str:
        if self._obstacle:
            return self._obstacle
        if not (self._folder / _CUDA).exists():
            return f"{self._folder} has no {_CUDA}, llama.cpp's backend for GPUs."
        return f"{self.library.binding} in {self._folder} finds no GPU."

    def _default_params(self, name: str, layouts: Sequence[Layout]) -> ctypes.Structure:
        """Return llama.cpp's default parameters in the library's layout. Raises LoadError."""
        defaults = bytes(self.library.call(name))
        struct = recognise_layout(defaults, layouts)
        if struct is None:
            raise self._unknown_layout()
        return struct.from_buffer_copy(defaults)

    def _confirm_settings(self, context: int, settings: Settings) -> None:
        """Raise LoadError unless a context reports the requested settings."""
        asked = {
            "llama_n_ctx_seq": settings.context,
            "llama_n_seq_max": settings.sequences,
            "llama_n_threads": settings.threads,
        }
        if any(self.library.call(name, context) != value for name, value in asked.items()):
            raise self._unknown_layout()

    def _unknown_layout(self) -> LoadError:
        return LoadError(
            f"{self.library.binding} in {self._folder} lays its parameters out in a way that "
            f"servekit does not know. It knows those of {VERSIONS}."
        )


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
