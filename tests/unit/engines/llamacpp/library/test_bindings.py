"""Parameters that reach llama.cpp, whose own log tells of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.llamacpp.library.bindings import (
    Binding,
    Settings,
    StructBinding,
    XLlamaCpp,
    open_binding,
)
from servekit.engines.llamacpp.library.struct_layouts import recognise_defaults
from tests.unit.engines.origins import write_tiny_gguf

_PLACED = re.compile(r"tensor (\S+) .*overridden to CPU")


@pytest.mark.parametrize("by_struct", [False, True])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_experts_of_the_first_layers_stay_in_the_hosts_memory(
    tmp_path: Path, by_struct: bool, layers: int
) -> None:
    module = pytest.importorskip("xllamacpp")
    lines: list[str] = []

    def listen(level: int, text: bytes | None, more: Any) -> None:
        lines.append((text or b"").decode(errors="replace"))

    library = open_binding("xllamacpp").library
    binding: Binding = XLlamaCpp(module, library)
    if by_struct:
        binding = StructBinding(library, *recognise_defaults(library))
    path = write_tiny_gguf(tmp_path / "moe.gguf", float32=True, experts=4)
    settings = Settings(
        path=str(path),
        gpu_layers=0,
        split="layer",
        context=256,
        batch=64,
        sequences=1,
        threads=1,
        flash_attention="auto",
        cache_type="f32",
        pooling=None,
        cpu_moe_layers=layers,
    )
    usual: Any = library.log.callback
    library.call("llama_log_set", hears := type(usual)(listen), None)
    try:
        model = binding.load_model(settings)
    finally:
        library.call("llama_log_set", usual, None)
        del hears  # until now llama.cpp might have called it
        XLlamaCpp(module, library)  # the library's functions take its structs again
    assert model
    library.call("llama_model_free", model)
    found = {match[1] for line in lines if (match := _PLACED.search(line))}
    kinds = ("gate", "up", "down")
    assert found == {f"blk.{at}.ffn_{one}_exps.weight" for at in range(layers) for one in kinds}
