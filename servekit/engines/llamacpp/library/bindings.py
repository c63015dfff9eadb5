"""Python bindings of llama.cpp, and how each fills in the parameters of models and contexts.

xllamacpp does not expose the structs to Python. It has llama.cpp's own `common_params` as an
object, stored directly behind the object's head, and llama.cpp converts that into both structs: no
layout is written down here. The start of the object is checked before its address is used. If a
version has no such object or conversion, its library's structs are recognised by their defaults.

llama-cpp-python declares both structs in ctypes, version by version.

Without a package, a folder with llama.cpp's own libraries can be used (`library_folder.py`).

Whatever the way, a created context is asked for its settings before it is used.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import Structure, c_char_p, c_void_p
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from servekit.engines.llamacpp.library.capi import Library
from servekit.engines.llamacpp.library.struct_layouts import (
    RawStruct,
    fill_copy,
    recognise_defaults,
    unknown_layout,
)
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
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
#: Prompt tokens of one pass that may need logits: each takes a row of the vocabulary's size.
PROMPT_OUTPUTS = 64
#: Proposed tokens of one pass, of all requests together, each of which needs logits, too.
PROPOSED_OUTPUTS = 64
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_SPLITS = {"layer": 1, "row": 2}
#: llama.cpp's functions from `common_params` to the structs of a model and of a context.
_CONVERTERS = (
    "_Z28common_model_params_to_llamaR13common_params",
    "_Z30common_context_params_to_llamaRK13common_params",
)
#: Names in `common_params` of the structs' fields, where they differ.
_COMMON_NAMES = {
    "n_seq_max": "n_parallel",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "embeddings": "embedding",
}
#: Fields that some versions lack, or have elsewhere, and do well without.
_OPTIONAL = {"n_outputs_max", "flash_attn", "n_threads", "n_threads_batch", "no_perf"}
#: xllamacpp's enums of some fields.
_ENUMS = {
    "split_mode": "llama_split_mode",
    "flash_attn_type": "llama_flash_attn_type",
    "type_k": "ggml_type",
    "type_v": "ggml_type",
    "pooling_type": "llama_pooling_type",
}


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
    cpu_moe_layers: int = 0  # layers, from the first, whose experts stay in the host's memory
    speculates: bool = False  # passes have proposed tokens

    @property
    def outputs(self) -> int:
        """Tokens of one pass that may need logits: see `count_outputs`."""
        return count_outputs(self.sequences, speculates=self.speculates)


def count_outputs(sequences: int, *, speculates: bool) -> int:
    """Return the tokens of a pass that may need logits: one a sequence, of prompts, proposed."""
    return sequences + PROMPT_OUTPUTS + (PROPOSED_OUTPUTS if speculates else 0)


class Binding(ABC):
    """A binding to llama.cpp's library, which creates models and contexts."""

    def __init__(self, library: Library, model: type[Structure], context: type[Structure]) -> None:
        """Store the library; `model` and `context` are the types of its structs of parameters."""
        self.library = library
        self._load = library.creating("llama_model_load_from_file", model, c_char_p)
        self._init = library.creating("llama_init_from_model", context, c_void_p)

    def load_model(self, settings: Settings) -> int | None:
        """Load a model and return its address; None if it fails (see `library.log`)."""
        made: int | None = self._load(settings.path.encode(), self._model_params(settings))
        return made

    def new_context(self, model: int, settings: Settings) -> int | None:
        """Create a context and return its address; None if it fails.

        Raises LoadError if the context reports other settings: the parameters were misunderstood.
        """
        made: int | None = self._init(model, self._context_params(settings))
        if made and self._differs(made, settings):
            self.library.call("llama_free", made)
            raise unknown_layout(self.library.binding)
        return made

    def _differs(self, context: int, settings: Settings) -> bool:
        asked = {
            "llama_n_ctx_seq": settings.context,
            "llama_n_seq_max": settings.sequences,
            "llama_n_threads": settings.threads,
            "llama_n_threads_batch": settings.threads,
        }
        least = min(settings.batch, settings.context)  # a batch is made no larger than the context
        small = any(self.library.call(f"llama_n_{n}", context) < least for n in ("batch", "ubatch"))
        return small or any(self.library.call(name, context) != asked[name] for name in asked)

    @abstractmethod
    def _model_params(self, settings: Settings) -> Structure: ...

    @abstractmethod
    def _context_params(self, settings: Settings) -> Structure: ...

    @property
    def without_gpu(self) -> str:
        """Reason why the binding has no GPU support."""
        return f"{self.library.binding} is built without CUDA. Install its CUDA wheel."


class _Placement(Structure):
    """llama_model_tensor_buft_override: tensors whose names match, and where they are put."""

    _fields_ = (("pattern", c_char_p), ("buffer_type", c_void_p))


class StructBinding(Binding):
    """A binding whose structs have known fields, which are set in a copy of the defaults."""

    def __init__(self, library: Library, model: Structure, context: Structure) -> None:
        """Store llama.cpp's default parameters of a model and of a context."""
        super().__init__(library, type(model), type(context))
        self._model, self._context = model, context

    def _model_params(self, settings: Settings) -> Structure:
        fields = model_fields(settings)
        if patterns := list_expert_patterns(settings.cpu_moe_layers):
            host = self.library.call("ggml_backend_cpu_buffer_type")
            # kept, because the struct points to it; an empty one ends the list
            self._placed = (_Placement * (len(patterns) + 1))(
                *(_Placement(pattern.encode(), host) for pattern in patterns)
            )
            fields["tensor_buft_overrides"] = ctypes.addressof(self._placed)
        return fill_copy(self._model, fields)

    def _context_params(self, settings: Settings) -> Structure:
        return fill_copy(self._context, context_fields(settings))


class XLlamaCpp(Binding):
    """The binding for xllamacpp; see the module's docstring."""

    def __init__(self, module: Any, library: Library) -> None:
        """Store xllamacpp's module. Raises LoadError if its `common_params` is not known."""
        super().__init__(library, RawStruct, RawStruct)
        self._module = module
        functions = ctypes.CDLL(module.xllamacpp.__file__)
        self._to_model, self._to_context = (_find_converter(functions, n) for n in _CONVERTERS)
        self._check_layout(params := module.CommonParams(), _address_of(params))
        self._params = params  # the structs point into it

    def _model_params(self, settings: Settings) -> Structure:
        address = self._fill_params(settings)
        if patterns := list_expert_patterns(settings.cpu_moe_layers):
            try:
                self._params.tensor_buft_overrides = ",".join(f"{one}=CPU" for one in patterns)
            except (AttributeError, ValueError) as error:
                raise unknown_layout(self.library.binding) from error
        return self._to_model(address)

    def _context_params(self, settings: Settings) -> Structure:
        return self._to_context(self._fill_params(settings))

    def _fill_params(self, settings: Settings) -> int:
        """Fill in a new `common_params` and return its address. Raises LoadError."""
        self._params = params = self._module.CommonParams()
        try:
            for one in (params.cpuparams, params.cpuparams_batch):
                one.n_threads = settings.threads
            for name, value in (model_fields(settings) | context_fields(settings)).items():
                self._set_field(params, name, value)
        except AttributeError as error:
            raise unknown_layout(self.library.binding) from error
        return _address_of(params)

    def _set_field(self, params: Any, name: str, value: Any) -> None:
        own, enum = _COMMON_NAMES.get(name, name), _ENUMS.get(name)
        if hasattr(params, own) or name not in _OPTIONAL:
            setattr(params, own, getattr(self._module, enum)(value) if enum else value)

    def _check_layout(self, params: Any, address: int) -> None:
        """Raise LoadError unless the first fields of `common_params` are at `address`."""
        marks = (1_234_567, 3_456_789, 5_678_901, 7_890_123)
        for name, mark in zip(("n_predict", "n_ctx", "n_batch", "n_ubatch"), marks, strict=True):
            setattr(params, name, mark)
        if struct.unpack("=4i", ctypes.string_at(address, 16)) != marks:
            raise unknown_layout(self.library.binding)


def _address_of(params: Any) -> int:
    return id(params) + object.__basicsize__


def _find_converter(functions: ctypes.CDLL, name: str) -> Callable[[int], Structure]:
    try:
        function = functions[name]
    except AttributeError:
        raise unknown_layout("This version of xllamacpp") from None
    function.restype, function.argtypes = RawStruct, (c_void_p,)
    made: Callable[[int], Structure] = function
    return made


def list_expert_patterns(layers: int) -> list[str]:
    """Return patterns of the names of all experts in the first layers.

    Source: llama.cpp, common/arg.cpp, `--n-cpu-moe`.
    """
    return [rf"blk\.{at}\.ffn_(up|down|gate|gate_up)_(ch|)exps" for at in range(layers)]


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
        "flash_attn_type": FLASH_ATTENTION[settings.flash_attention],
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


def _open_xllamacpp(module: Any) -> Binding:
    library = Library(module.xllamacpp.__file__, f"xllamacpp {metadata.version('xllamacpp')}")
    try:
        return XLlamaCpp(module, library)
    except (LoadError, AttributeError):  # a version with another `common_params`
        return StructBinding(library, *recognise_defaults(library))


def _open_llama_cpp_python(module: Any) -> Binding:
    low = importlib.import_module("llama_cpp.llama_cpp")
    version = metadata.version("llama-cpp-python")
    library = Library(low._lib._name, f"llama-cpp-python {version}")
    defaults = low.llama_model_default_params(), low.llama_context_default_params()
    return StructBinding(library, *defaults)


_KINDS: dict[str, Callable[[Any], Binding]] = {
    "xllamacpp": _open_xllamacpp,
    "llama-cpp-python": _open_llama_cpp_python,
}
#: A library is opened once: llama.cpp's log and its backends are global to the process.
_opened: dict[str, Binding] = {}


def open_binding(name_or_auto: str, library: str | None = None) -> Binding:
    """Return the binding of that name; "auto" means the first installed one. Raises LoadError.

    `library` is a folder with llama.cpp's own libraries, or a file in it, to use instead.
    """
    if library is not None:
        return _open_build(library)
    for name in MODULES if name_or_auto == "auto" else (name_or_auto,):
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
    if name_or_auto == "llama-cpp-python":
        raise LoadError("llama-cpp-python is not installed: pip install llama-cpp-python.")
    raise LoadError("engine llamacpp needs llama.cpp: pip install 'servekit[llamacpp]'.")


def _open_build(path: str) -> Binding:
    from servekit.engines.llamacpp.library.library_folder import Build  # it imports this module

    if path not in _opened:
        _opened[path] = Build(Path(path))
    return _opened[path]
