"""The layouts of llama.cpp's two parameter structs in the known versions.

A library does not describe its layout, but it fills in defaults, and adjacent fields mostly have
different ones: a layout is accepted only if every field has its default. Fields after the last
known one keep the library's defaults. Source: llama.cpp, include/llama.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_float, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

from servekit.engines.llamacpp.library.capi import Functions, Library
from servekit.errors import LoadError

#: Name, type, and llama.cpp's default of each field, in order.
Layout = tuple[tuple[str, Any, Any], ...]


def _make_fields(kind: Any, default: Any, *names: str) -> Layout:
    return tuple((name, kind, default) for name in names)


MODEL: Layout = (
    *_make_fields(c_void_p, None, "devices", "tensor_buft_overrides"),
    *_make_fields(c_int32, -1, "n_gpu_layers"),
    *_make_fields(c_int32, 1, "split_mode"),
    *_make_fields(c_int32, -1, "load_mode"),
    *_make_fields(c_int32, 1, "lazy_mode"),
    *_make_fields(c_int32, 0, "main_gpu"),
    *_make_fields(
        c_void_p, None, "tensor_split", "progress_callback", "progress_callback_user_data"
    ),
    *_make_fields(c_void_p, None, "kv_overrides"),
    *_make_fields(c_bool, False, "vocab_only", "check_tensors"),
    *_make_fields(c_bool, True, "use_extra_bufts"),
    *_make_fields(c_bool, False, "no_host", "no_alloc", "load_mtp"),
)
_TO_CACHE_TYPES: Layout = (
    *_make_fields(c_uint32, 512, "n_ctx"),
    *_make_fields(c_uint32, 2048, "n_batch"),
    *_make_fields(c_uint32, 512, "n_ubatch"),
    *_make_fields(c_uint32, 1, "n_seq_max"),
    *_make_fields(c_uint32, 0, "n_rs_seq", "n_outputs_max"),
    *_make_fields(c_uint32, 1, "n_outputs_max_per_seq"),
    *_make_fields(c_int32, 4, "n_threads", "n_threads_batch"),
    *_make_fields(c_int32, 0, "ctx_type"),
    *_make_fields(
        c_int32, -1, "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"
    ),
    *_make_fields(c_float, 0.0, "rope_freq_base", "rope_freq_scale"),
    *_make_fields(c_float, -1.0, "yarn_ext_factor", "yarn_attn_factor"),
    *_make_fields(c_float, -1.0, "yarn_beta_fast", "yarn_beta_slow"),
    *_make_fields(c_uint32, 0, "yarn_orig_ctx"),
    *_make_fields(c_float, -1.0, "defrag_thold"),
    *_make_fields(c_void_p, None, "cb_eval", "cb_eval_user_data"),
    *_make_fields(c_int32, 1, "type_k", "type_v"),
)
_FROM_ABORT: Layout = (
    *_make_fields(c_void_p, None, "abort_callback", "abort_callback_data"),
    *_make_fields(c_bool, False, "embeddings"),
    *_make_fields(c_bool, True, "offload_kqv", "no_perf", "op_offload", "swa_full"),
    *_make_fields(c_bool, False, "kv_unified"),
)
#: The versions of these layouts, for messages.
VERSIONS = "llama.cpp 0.5 and 0.6"
MODEL_LAYOUTS = (MODEL,)
CONTEXT_LAYOUTS = (
    (*_TO_CACHE_TYPES, *_FROM_ABORT),  # 0.5
    (*_TO_CACHE_TYPES, *_make_fields(c_size_t, 0, "moe_cache_size"), *_FROM_ABORT),  # 0.6
)
#: Size of either struct, with a reserve: a callee accesses only its own struct's size.
ROOM = 2048


class RawStruct(ctypes.Structure):
    """Memory for either struct, whose layout is not known; it is passed on as it is."""

    _fields_ = (("words", ctypes.c_uint64 * (ROOM // 8)),)


def struct_of(layout: Layout) -> type[ctypes.Structure]:
    """Return the ctypes struct, with room for fields that a version adds at its end."""
    fields = [(name, kind) for name, kind, _ in layout]
    bare = type("Bare", (ctypes.Structure,), {"_fields_": fields})
    spare = ("spare", ctypes.c_uint8 * (ROOM - ctypes.sizeof(bare)))
    return type("Params", (ctypes.Structure,), {"_fields_": [*fields, spare]})


def recognise_layout(defaults: bytes, layouts: Sequence[Layout]) -> type[ctypes.Structure] | None:
    """Return the struct whose layout matches the `ROOM` bytes of `defaults`, if any."""
    return next((struct_of(one) for one in layouts if _matches_defaults(defaults, one)), None)


def _matches_defaults(defaults: bytes, layout: Layout) -> bool:
    found = struct_of(layout).from_buffer_copy(defaults)
    return all(getattr(found, name) == default for name, _, default in layout)


def recognise_defaults(library: Library) -> tuple[ctypes.Structure, ctypes.Structure]:
    """Return a library's default parameters of a model and of a context.

    Raises LoadError if a layout is not known.
    """
    return (
        recognise_default(library, "llama_model_default_params", MODEL_LAYOUTS),
        recognise_default(library, "llama_context_default_params", CONTEXT_LAYOUTS),
    )


def recognise_default(library: Functions, name: str, layouts: Sequence[Layout]) -> ctypes.Structure:
    """Return the default parameters that the function `name` tells. Raises LoadError."""
    library.declare(name, RawStruct, ())
    defaults = bytes(library.call(name))
    struct = recognise_layout(defaults, layouts)
    if struct is None:
        raise unknown_layout(library.binding)
    return struct.from_buffer_copy(defaults)


def fill_copy(defaults: ctypes.Structure, values: Mapping[str, Any]) -> ctypes.Structure:
    """Copy a struct and set those fields that it has."""
    params = type(defaults).from_buffer_copy(defaults)
    for name in {name for name, *_ in defaults._fields_} & values.keys():
        setattr(params, name, values[name])
    return params


def unknown_layout(library: str) -> LoadError:
    return LoadError(
        f"{library} lays its parameters out in a way that servekit does not know. Known are "
        f"{VERSIONS}, and the package of pip install 'servekit[llamacpp]'."
    )
