"""Python bindings of llama.cpp, and how each fills in the parameters of models and contexts.

xllamacpp does not expose the structs to Python. It has llama.cpp's own `common_params` as an
object, stored directly behind the object's head, and llama.cpp converts that into both structs: no
layout is written down here. The start of the object is checked before its address is used.

llama-cpp-python declares both structs in ctypes, version by version.

Without a package, a folder with llama.cpp's own libraries can be used (`library_folder.py`).
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable
from ctypes import c_char_p, c_void_p
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from servekit.engines.llamacpp.capi import Library
from servekit.engines.llamacpp.struct_layouts import fill_fields
from servekit.errors import LoadError

#: Value of the `binding` option to the module's name; "auto" prefers the first.
MODULES = {"xllamacpp": "xllamacpp", "llama-cpp-python": "llama_cpp"}
#: For each KV cache type: ggml's number, and the bytes per element.
CACHE_TYPES: dict[str, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q4_0": (2, 18 / 32),
}
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3}
#: Prompt tokens of one pass that may need logits: each takes a row of the vocabulary's size.
PROMPT_OUTPUTS = 64
_FLASH = {"auto": -1, "off": 0, "on": 1}
_SPLITS = {"layer": 1, "row": 2}
#: Size of either struct, with a reserve: a callee accesses only its own struct's size.
_STRUCT_WORDS = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a model and a context, in llama.cpp's terms."""

    path: str
    gpu_layers: int  # more than the number of layers: all of them, and the output
    split: str
    context: int  # capacity in tokens of all sequences together
    batch: int  # tokens in one pass
    sequences: int
    threads: int
    flash_attention: str
    cache_type: str
    pooling: int | None  # None: the model generates

    @property
    def outputs(self) -> int:
        """Tokens of one pass that may need logits: one per sequence, and prompt tokens."""
        return self.sequences + PROMPT_OUTPUTS


class Binding:
    """A binding to llama.cpp's library, which creates models and contexts."""

    library: Library

    def load_model(self, settings: Settings) -> int | None:
        """Load a model and return its address; None if it fails (see `library.complaints`)."""
        raise NotImplementedError

    def new_context(self, model: int, settings: Settings) -> int | None:
        raise NotImplementedError

    @property
    def without_gpu(self) -> str:
        """Reason why the binding has no GPU support."""
        return f"{self.library.binding} is built without CUDA. Install its CUDA wheel."


class _Struct(ctypes.Structure):
    """Opaque memory for either struct, passed on the stack, or by address if it is large."""

    _fields_ = (("words", ctypes.c_uint64 * _STRUCT_WORDS),)


class XLlamaCpp(Binding):
    """The binding for xllamacpp; see the module's docstring."""

    def __init__(self, module: Any) -> None:
        self._module = module
        path = module.xllamacpp.__file__
        self.library = Library(path, f"xllamacpp {metadata.version('xllamacpp')}")
        functions = ctypes.CDLL(path)
        self._model_params = _find_converter(
            functions, "_Z28common_model_params_to_llamaR13common_params"
        )
        self._context_params = _find_converter(
            functions, "_Z30common_context_params_to_llamaRK13common_params"
        )
        self._load = self.library.creating("llama_model_load_from_file", _Struct, c_char_p)
        self._init = self.library.creating("llama_init_from_model", _Struct, c_void_p)

    def load_model(self, settings: Settings) -> int | None:
        params, address = self._fill_params(settings)
        made: int | None = self._load(settings.path.encode(), self._model_params(address))
        del params  # the struct points into it
        return made

    def new_context(self, model: int, settings: Settings) -> int | None:
        params, address = self._fill_params(settings)
        made: int | None = self._init(model, self._context_params(address))
        del params
        return made

    def _fill_params(self, settings: Settings) -> tuple[Any, int]:
        params = self._module.CommonParams()
        address = id(params) + object.__basicsize__
        self._check_layout(params, address)
        enums = self._module
        params.n_gpu_layers = settings.gpu_layers
        params.split_mode = enums.llama_split_mode(_SPLITS[settings.split])
        params.n_ctx = settings.context
        params.n_batch = params.n_ubatch = settings.batch
        params.n_parallel = settings.sequences
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
        params.flash_attn_type = enums.llama_flash_attn_type(_FLASH[settings.flash_attention])
        kind = enums.ggml_type(CACHE_TYPES[settings.cache_type][0])
        params.cache_type_k = params.cache_type_v = kind
        params.no_perf = True
        params.swa_full = True  # without it, sequences with a sliding window could not be cut
        if settings.pooling is None:
            params.n_outputs_max = settings.outputs
        else:
            params.embedding = True
            params.pooling_type = enums.llama_pooling_type(settings.pooling)
        return params, address

    def _check_layout(self, params: Any, address: int) -> None:
        """Raise LoadError unless the first fields of `common_params` are at `address`."""
        marks = (1_234_567, 3_456_789, 5_678_901, 7_890_123)
        names = ("n_predict", "n_ctx", "n_batch", "n_ubatch")
        before = [getattr(params, name) for name in names]
        for name, mark in zip(names, marks, strict=True):
            setattr(params, name, mark)
        seen = struct.unpack("=4i", ctypes.string_at(address, 16))
        for name, value in zip(names, before, strict=True):
            setattr(params, name, value)
        if seen != marks:
            raise _unknown_layout(self.library.binding)


def _find_converter(functions: ctypes.CDLL, name: str) -> Callable[[int], _Struct]:
    try:
        function = functions[name]
    except AttributeError:
        raise _unknown_layout("This version of xllamacpp") from None
    function.restype, function.argtypes = _Struct, (c_void_p,)
    made: Callable[[int], _Struct] = function
    return made


class LlamaCppPython(Binding):
    """The binding for llama-cpp-python; only its declarations and its library are used."""

    def __init__(self, module: Any) -> None:
        self._module = low = importlib.import_module("llama_cpp.llama_cpp")
        version = metadata.version("llama-cpp-python")
        self.library = Library(low._lib._name, f"llama-cpp-python {version}")
        self._load = self.library.creating(
            "llama_model_load_from_file", low.llama_model_params, c_char_p
        )
        self._init = self.library.creating(
            "llama_init_from_model", low.llama_context_params, c_void_p
        )

    def load_model(self, settings: Settings) -> int | None:
        params = self._module.llama_model_default_params()
        fill_fields(params, model_fields(settings))
        made: int | None = self._load(settings.path.encode(), params)
        return made

    def new_context(self, model: int, settings: Settings) -> int | None:
        params = self._module.llama_context_default_params()
        fill_fields(params, context_fields(settings))
        made: int | None = self._init(model, params)
        return made


def model_fields(settings: Settings) -> dict[str, Any]:
    """Return the model parameters by llama.cpp's field names."""
    return {"n_gpu_layers": settings.gpu_layers, "split_mode": _SPLITS[settings.split]}


def context_fields(settings: Settings) -> dict[str, Any]:
    """Return the context parameters by llama.cpp's field names of all versions."""
    kind = CACHE_TYPES[settings.cache_type][0]
    fields = {
        "n_ctx": settings.context,
        "n_batch": settings.batch,
        "n_ubatch": settings.batch,
        "n_seq_max": settings.sequences,
        "n_threads": settings.threads,
        "n_threads_batch": settings.threads,
        "flash_attn_type": _FLASH[settings.flash_attention],
        "flash_attn": settings.flash_attention == "on",  # for older versions
        "type_k": kind,
        "type_v": kind,
        "kv_unified": True,
        "swa_full": True,  # without it, sequences with a sliding window could not be cut
        "no_perf": True,
    }
    if settings.pooling is None:
        return fields | {"n_outputs_max": settings.outputs}
    return fields | {"embeddings": True, "pooling_type": settings.pooling}


_KINDS: dict[str, Callable[[Any], Binding]] = {
    "xllamacpp": XLlamaCpp,
    "llama-cpp-python": LlamaCppPython,
}
#: A library is opened once: llama.cpp's log and its backends are global to the process.
_opened: dict[str, Binding] = {}


def open_binding(wish: str, library: str | None = None) -> Binding:
    """Return the binding named `wish`; "auto" means the first installed one. Raises LoadError.

    `library` is a folder with llama.cpp's own libraries, or a file in it, to use instead.
    """
    if library is not None:
        return _open_build(library)
    for name in MODULES if wish == "auto" else (wish,):
        if name in _opened:
            return _opened[name]
        try:
            module = importlib.import_module(MODULES[name])
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == MODULES[name]:
                continue
            raise LoadError(f"{name} is installed, but cannot be loaded: {error}.") from error
        _opened[name] = _KINDS[name](module)
        return _opened[name]
    if wish == "llama-cpp-python":
        raise LoadError("llama-cpp-python is not installed: pip install llama-cpp-python.")
    raise LoadError("engine llamacpp needs llama.cpp: pip install 'servekit[llamacpp]'.")


def _open_build(path: str) -> Binding:
    from servekit.engines.llamacpp.library_folder import Build  # it imports this module

    if path not in _opened:
        _opened[path] = Build(Path(path))
    return _opened[path]


def _unknown_layout(what: str) -> LoadError:
    return LoadError(
        f"{what} is laid out in a way that servekit does not know. Install the version that it "
        "was tested with: pip install 'servekit[llamacpp]'."
    )
