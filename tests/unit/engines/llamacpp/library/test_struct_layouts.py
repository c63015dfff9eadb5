"""Telling a layout by its defaults: each field that is moved, or not there, is noticed."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_uint32, c_void_p
from typing import Any

import pytest

from servekit.engines.llamacpp.library.struct_layouts import (
    CONTEXT_LAYOUTS,
    MODEL_LAYOUTS,
    ROOM,
    Layout,
    fill_copy,
    recognise_layout,
    struct_of,
)

LAYOUTS = [*MODEL_LAYOUTS, *CONTEXT_LAYOUTS]
#: A field that a later version may bring: of any kind, and off, none or "as the model has it".
NEW: list[tuple[str, Any, Any]] = [
    ("new", c_uint32, 0),
    ("new", c_int32, -1),
    ("new", c_float, 0.0),
    ("new", c_void_p, None),
    ("new", c_bool, False),
    ("new", c_bool, True),
]
#: What is set in each: where another field stands there, something else would be asked for.
SET = {"n_gpu_layers", "split_mode"} | {
    *("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"),
    *("flash_attn_type", "type_k", "type_v", "embeddings", "no_perf", "swa_full", "kv_unified"),
    *("pooling_type", "n_outputs_max"),
}


def defaults_of(layout: Layout, rest: bytes = b"") -> bytes:
    """What a library with that layout says; `rest` follows its last field."""
    stated = {name: default for name, _, default in layout if default is not None}
    params: Any = fill_copy(struct_of(layout)(), stated)
    ctypes.memmove(params.spare, rest, len(rest))
    return bytes(params)


def places(struct: type[ctypes.Structure]) -> dict[str, int]:
    return {name: getattr(struct, name).offset for name in SET if hasattr(struct, name)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=len)
def test_a_layout_is_known_by_its_own_defaults(layout: Layout) -> None:
    for rest in (b"", b"\1" * 64):  # a later version may add to its end
        found = recognise_layout(defaults_of(layout, rest), LAYOUTS)
        assert found is not None
        assert places(found) == places(struct_of(layout))
        assert ctypes.sizeof(found) == ROOM


@pytest.mark.parametrize("layout", LAYOUTS, ids=len)
def test_whatever_is_set_has_its_place_or_the_layout_is_refused(layout: Layout) -> None:
    """A field more or less anywhere: unknown, unless all that is set stands where it stood.

    All but `kv_unified`, for what follows it tells nothing; a context says whether it has that.
    """
    changed = [(*layout[:at], *layout[at + 1 :]) for at in range(len(layout))]
    changed += [(*layout[:at], new, *layout[at:]) for at in range(len(layout) + 1) for new in NEW]
    refused = 0
    for other in changed:
        found = recognise_layout(defaults_of(other), LAYOUTS)
        refused += found is None
        if found is not None:
            mine, theirs = places(found), places(struct_of(other))
            moved = {name for name in theirs if mine[name] != theirs[name]}
            assert moved <= {"kv_unified"}, [name for name, *_ in other]
    assert refused > len(changed) / 2


def test_only_fields_that_are_there_are_set() -> None:
    params: Any = fill_copy(
        struct_of(MODEL_LAYOUTS[0])(), {"n_gpu_layers": 7, "of_another_version": 1}
    )
    assert params.n_gpu_layers == 7
    assert not hasattr(params, "of_another_version")
