"""Linear layers of the CPU whose weights lie as its vector units read them.

A weight is stored row by row, and a product puts it in order first, or goes without: for the few
rows of a step that decodes that may take as long as the product itself. Packed by oneDNN, products
of SmolLM2 take 0.5 to 0.75 of the time on an AMD EPYC, at 3 to 32 rows in float32 and at any number
in bfloat16, and those of a prompt 0.85. On an Intel Xeon, for which the library's own are written,
they gain little with one thread and lose with eight (`tests.bench.packed`). So it is done by itself
where that has been seen to help; which is not tried out, as what else runs meanwhile would decide.
A row's result is then the same whoever is beside it, as long as it is not alone.

It is a copy. The weight itself stays where it is, for whoever reads it (adapters, a tied
embedding); where it is mapped from a file, its pages are the kernel's to forget.

Source for the operators: what torch's own compiler makes of a frozen linear layer
(torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from servekit.engines import kv_cache
from servekit.errors import LoadError
from servekit.wire.messages import WorkerSpec

log = logging.getLogger(__name__)

#: Unless it is asked for, no more of the memory that is available is taken.
SHARE = 0.25
#: Smaller weights, and models, are not worth it.
_LEAST_BYTES, _LEAST_MODEL_BYTES = 2**16, 2**24
#: Of the types that a CPU has fast products for, the greatest relative error that is rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
#: Rows of the products that are compared: with one, a few, and many, others are the kernels.
_ROWS = (1, 4, 48)
#: Unless it is asked for, CPUs of this maker, and with no more threads.
_VENDOR, _MOST_THREADS = "AuthenticAMD", 4


class Packed:
    """A weight's copy, for all layers that have this weight; None while there is none."""

    __slots__ = ("at", "weight")

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.at = 0  # where the weight lay when it was packed

    def make(self, weight: Tensor) -> None:
        self.weight = _reordered(weight.detach())
        self.at = weight.data_ptr()

    def drop(self) -> None:
        self.weight, self.at = None, 0


class PackedLinear(nn.Linear):
    """A linear layer that multiplies with `packed` while that is a copy of its own weight."""

    packed: Packed

    def forward(self, input: Tensor) -> Tensor:
        packed = self.packed
        if packed.weight is None or packed.at != self.weight.data_ptr():
            return super().forward(input)
        return _product(input, packed.weight, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Shares what is packed. A copy whose weight is another one makes no use of it."""
        memo[id(self.packed)] = self.packed
        twin = PackedLinear.__new__(PackedLinear)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(v, memo) for name, v in self.__dict__.items()})
        return twin


def pack(model: nn.Module, spec: WorkerSpec) -> int:
    """Pack what can be packed, where options, memory and CPU allow it; returns the bytes it takes.

    Raises LoadError where it is asked for and cannot be had.
    """
    wish: bool | None = spec.options.get("packed_weights")
    if wish is False or spec.device != "cpu" or spec.gpus > 1:
        return 0
    layers = list(_layers(model))
    size = sum({layer.weight.data_ptr(): layer.weight.nbytes for layer in layers}.values())
    if not wish and size < _LEAST_MODEL_BYTES:
        return 0
    why = ("" if wish else _no_gain()) or _lack(size, spec, wish) or _obstacle(layers)
    if why:
        if wish:
            raise LoadError(f"options.packed_weights is true, and {why}.", permanent=False)
        log.info("%s runs with its weights as they are: %s", spec.model, why)
        return 0
    shared = {layer.weight.data_ptr(): Packed() for layer in layers}
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.packed = shared[layer.weight.data_ptr()]  # type: ignore[assignment]  # it is one now
    make(packed_in(model))
    return size


def packed_in(model: nn.Module) -> list[PackedLinear]:
    """The layers of a model that `pack` has made."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def drop(layers: Iterable[PackedLinear]) -> None:
    """Give the copies' memory back. The layers go on with their weights as they are."""
    for layer in layers:
        layer.packed.drop()


def make(layers: Iterable[PackedLinear]) -> bool:
    """Make dropped copies again, and say whether any was; with no room for them there are none."""
    made = False
    for packed, weight in {layer.packed: layer.weight for layer in layers}.items():
        if packed.weight is None:
            try:
                packed.make(weight)
            except (RuntimeError, MemoryError) as error:
                log.warning("weights stay as they are: %s", str(error).splitlines()[0])
                return made
            made = True
    return made


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype in _TOLERANCE:
            weight = module.weight
            plain = type(weight.data) is Tensor and weight.device.type == "cpu"
            if plain and weight.is_contiguous() and weight.nbytes >= _LEAST_BYTES:
                yield module


def _obstacle(layers: list[nn.Linear]) -> str:
    """Why these cannot be packed here, or "": one of each shape is tried."""
    if not layers:
        return "it has no linear layers of a kind that can be packed"
    try:
        for layer in {(layer.weight.shape, layer.weight.dtype): layer for layer in layers}.values():
            error = _error(layer)
            if not error <= _TOLERANCE[layer.weight.dtype]:  # NaN is no agreement
                return f"packed, a product of {tuple(layer.weight.shape)} is off by {error:.1e}"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"this machine's torch cannot pack them: {str(error).splitlines()[0]}"
    return ""


@torch.no_grad()
def _error(layer: nn.Linear) -> float:
    weight = layer.weight.detach()[:1024]  # enough of a head
    packed = _reordered(weight)
    worst = 0.0
    for rows in _ROWS:
        given = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
        given = given.to(weight.dtype)
        expected = linear(given.float(), weight.float())
        found = _product(given, packed, None).float()
        worst = max(worst, float((found - expected).norm() / expected.norm().clamp(min=1e-6)))
    return worst


def _no_gain(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why packing is not known to help on this CPU, or ""."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    vendor = next(named, "unknown")
    if vendor != _VENDOR:
        return f"on a CPU of this maker ({vendor}) packing has not been seen to help"
    if torch.get_num_threads() > _MOST_THREADS:
        return f"with more than {_MOST_THREADS} threads packing has not been seen to help"
    return ""


def _lack(size: int, spec: WorkerSpec, wish: bool | None) -> str:
    room = kv_cache.available_host_bytes()
    if not wish:
        room = int(room * SHARE)
    if spec.memory_bytes:
        room = min(room, spec.memory_bytes - size)
    if size <= room:
        return ""
    return f"packed they take {size / 2**30:.1f} GiB more, and {room / 2**30:.1f} GiB are for that"


def _reordered(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return found


def _product(given: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(given, packed, bias, "none", [], "")
    return found
