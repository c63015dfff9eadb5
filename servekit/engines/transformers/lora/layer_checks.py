"""Checks of an adapter's layers: their effect, merging, and accuracy against float32 on the CPU.

The inputs of each layer in one forward pass are recorded and passed again to

- the layer that it wraps: an output of zeros, NaN or Inf is then the adapter's fault;
- a merged copy of the layer;
- a copy of the layer in float32 on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from servekit.engines.transformers.lora import batching_mode, boft
from servekit.engines.transformers.lora.adapter_files import PARAM
from servekit.engines.transformers.lora.tolerance import Tolerance, error
from servekit.errors import RequestError

log: Any = structlog.get_logger(__name__)

#: Maximum size of the weights copied to the CPU; of a larger model every n-th layer is compared.
REFERENCE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Seen:
    """The inputs and output of one layer in one forward pass."""

    name: str
    layer: Any
    given: tuple[Any, ...]
    made: Tensor


@torch.no_grad()
def check(model: Any, run: Callable[[], object], tolerance: Tolerance) -> dict[str, float]:
    """Run a PeftModel by `run` and compare its layers; return the measurements by name.

    Raises RequestError with the name of the first wrong layer, or if no layer has any effect.
    """
    seen = _record(model, run)
    _require_alive(seen)
    if seen and not any(_effect(one) for one in seen):
        raise RequestError(
            f"The adapter changes nothing: each of its {len(seen)} layers, such as "
            f"{seen[0].name}, gives what the base's own gives.",
            param=PARAM,
        )
    chosen = _within_budget(seen)
    figures = {"layers": float(len(seen)), "layers_compared": float(len(chosen))}
    merged = [(one, _merged_error(one)) for one in chosen]
    known = [(one, value) for one, value in merged if value is not None]
    if known:
        figures["merge_error"] = _worst(known, tolerance, "merged, it gives something else")
    against = [(one, _reference_error(one)) for one in chosen]
    if against:
        what = "it differs from the same layer in float32 on the CPU"
        figures["layer_error"] = _worst(against, tolerance, what)
    return figures


def _record(model: Any, run: Callable[[], object]) -> list[Seen]:
    seen: list[Seen] = []
    handles = [
        layer.register_forward_hook(_recorder(name, seen))
        for name, layer in batching_mode.tuner_layers(model)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _recorder(name: str, seen: list[Seen]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    def record(layer: Any, given: tuple[Any, ...], made: Any) -> None:
        if isinstance(made, Tensor):
            seen.append(Seen(name, layer, given, made.detach().clone()))

    return record


def _require_alive(seen: list[Seen]) -> None:
    for one in seen:
        if not torch.isfinite(one.made).all():
            raise RequestError(f"Layer {one.name} gives NaN or Inf with the adapter.", param=PARAM)
        if not one.made.any() and _plain(one).any():
            raise RequestError(
                f"Layer {one.name} gives only zeros with the adapter, and not without it.",
                param=PARAM,
            )


def _plain(one: Seen) -> Tensor:
    found: Tensor = one.layer.get_base_layer()(*one.given)
    return found


def _effect(one: Seen) -> bool:
    return not torch.equal(one.made, _plain(one))


def _within_budget(seen: list[Seen]) -> list[Seen]:
    held = sum(4 * p.numel() for one in seen for p in one.layer.get_base_layer().parameters())
    stride = -(-held // REFERENCE_BYTES) or 1
    return seen[::stride]


def _worst(measured: list[tuple[Seen, float]], tolerance: Tolerance, what: str) -> float:
    for one, value in measured:
        if not value <= tolerance.layers:  # NaN is no agreement
            raise RequestError(
                f"Layer {one.name} is not right with the adapter: {what}, by {value:.1e} where "
                f"{tolerance.layers:.0e} is rounding.",
                param=PARAM,
            )
    return max(value for _, value in measured)


def _merged_error(one: Seen) -> float | None:
    """Return the relative error of the merged layer; None if the tuner cannot be merged."""
    memo: dict[int, Any] = {id(p): p for p in (*one.layer.parameters(), *one.layer.buffers())}
    for parameter in one.layer.get_base_layer().parameters():
        memo[id(parameter)] = _parameter(parameter.clone())
    layer: Any = copy.deepcopy(one.layer, memo)
    try:
        layer.merge()
    except Exception as reason:  # of many kinds, depending on the tuner
        log.info("layer_merge_failed", layer=one.name, reason=str(reason))
        return None
    return error(layer(*one.given), one.made)


def _reference_error(one: Seen) -> float:
    memo: dict[int, Any] = {}
    for parameter in one.layer.parameters():
        memo[id(parameter)] = _parameter(_on_cpu(parameter))
    for buffer in one.layer.buffers():
        memo[id(buffer)] = _on_cpu(buffer)
    layer = copy.deepcopy(one.layer, memo)
    given = [_on_cpu(each) if isinstance(each, Tensor) else each for each in one.given]
    with _own_arithmetic():
        return error(one.made.cpu(), layer(*given))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _on_cpu(tensor: Tensor) -> Tensor:
    found = tensor.detach().to("cpu")
    return found.float() if found.is_floating_point() else found


@contextmanager
def _own_arithmetic() -> Iterator[None]:
    """Compute the reference without the extension that it is meant to check."""
    from peft.tuners.boft import layer

    library: Any = layer
    used = library._FBD_CUDA
    boft.use_torch()
    try:
        yield
    finally:
        library._FBD_CUDA = used
