"""Linear layers of the CPU whose weights lie as its vector units read them.

A weight is stored row by row, and a product puts it in order first, or goes without: for the few
rows of a step that decodes that may take as long as the product itself. Packed by oneDNN, a pass of
SmolLM2 over 2 to 32 rows takes 0.45 to 0.75 of the time on an AMD EPYC in float32, 0.7 to 0.9 in
bfloat16, and a prompt in float32 0.85. On an Intel Xeon, for which the library's own products are
written, it gains little with one thread and loses with eight (`tests.bench.packed`). So it is done
by itself where that has been seen to help; which is not tried out, as what else runs meanwhile
would decide. A row's result is then the same whoever is beside it.

It is a copy. The weight itself stays where it is, for whoever reads it (adapters, a tied
embedding); where it is mapped from a file, its pages are the kernel's to forget. A copy of a layer
is a plain one, so an adapter and the base that it is compared with work alike.

oneDNN keeps a kernel of some 0.6 MiB for each number of rows and each shape, and gives none of it
back, so rows are filled up to one of a few numbers; four of them take less time than one or two.

Source for the operators: what torch's own compiler makes of a frozen linear layer
(torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from servekit.engines.model_files import file_lock
from servekit.engines.transformers.batching import kv_cache
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

log = logging.getLogger(__name__)

#: Unless it is asked for, no more of the memory that is available is taken.
SHARE = 0.25
#: Smaller weights, and models, are not worth it.
_LEAST_BYTES, _LEAST_MODEL_BYTES = 2**16, 2**24
#: Of the types that a CPU has fast products for, the greatest relative error that is rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
#: Rows of the products that are compared: with few and many, others are the kernels; and how much
#: of a weight: a head can have more than there is memory for a third time.
_ROWS = (1, 8, 48)
_COMPARED = 4096
#: Unless it is asked for, CPUs of this maker that can do this, and with no more threads.
_VENDOR, _FEATURE, _MOST_THREADS = "AuthenticAMD", "avx512f", 4
#: What oneDNN's kernels take beside; 106 MiB were seen of SmolLM2's shapes with up to 256 rows.
_KERNELS_BYTES = 128 * 2**20
#: How long one waits for another that packs.
_WAIT_S = 60.0
#: Of a claim on the host's memory, what libraries and caches need at least.
_REST_BYTES = 512 * 2**20


class Packed:
    """A weight's copy, for all layers that have this weight; None while there is none."""

    __slots__ = ("at", "share", "weight")

    def __init__(self, share: float) -> None:
        self.weight: Tensor | None = None
        self.at = 0  # where the weight lay when it was packed
        self.share = share  # of the memory available, what it may take with the others

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

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain layer: PEFT asks for its very class, and changes weights."""
        memo[id(self)] = twin = nn.Linear.__new__(nn.Linear)
        own = {name: value for name, value in self.__dict__.items() if name != "packed"}
        twin.__dict__.update(copy.deepcopy(own, memo))
        return twin


def pack(model: nn.Module, spec: WorkerSpec) -> int:
    """Pack what can be packed, where options, memory and CPU allow it; returns the bytes it takes.

    A model on GPUs, or over several ranks, is left alone. Raises LoadError where it is asked for
    and cannot be had.
    """
    wish: bool | None = spec.options.get("packed_weights")
    if wish is False or spec.device != "cpu" or spec.gpus > 1:
        return 0
    layers = list(_layers(model))
    size = _size_of(layers)
    if not wish and size < _LEAST_MODEL_BYTES:
        return 0
    with _alone(spec):
        why = ("" if wish else _no_gain()) or _lack(size, spec, wish) or _obstacle(layers)
        if not why and not _pack(layers, 1.0 if wish else SHARE):
            why = "there is no memory for it"
    if why:
        if wish:
            raise LoadError(
                f"options.packed_weights is true, and {why}. Without that option the model runs "
                "with its weights as they are.",
                permanent=False,
            )
        log.info("%s runs with its weights as they are: %s", spec.model, why)
        return 0
    return size


def _pack(layers: list[nn.Linear], share: float) -> bool:
    shared = {_place(layer): Packed(share) for layer in layers}
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.packed = shared[_place(layer)]  # type: ignore[assignment]  # it is one now
    packed: list[Any] = layers
    if make(packed):
        return True
    for layer in layers:
        del layer.packed
        layer.__class__ = nn.Linear
    return False


def _place(layer: nn.Linear) -> tuple[int, torch.Size]:
    return layer.weight.data_ptr(), layer.weight.shape


def _size_of(layers: Iterable[nn.Linear]) -> int:
    """Bytes of their weights, of those that share one once."""
    return sum({_place(layer): layer.weight.nbytes for layer in layers}.values())


@contextlib.contextmanager
def _alone(spec: WorkerSpec) -> Iterator[None]:
    """While no other worker of this instance and machine packs, and counts on the same memory.

    Not for ever: one that is stuck is not to keep the others from serving.
    """
    folder = Path(spec.socket).parent
    if not spec.socket.startswith("/") or not folder.is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not file_lock.take(descriptor) and time.monotonic() < deadline:
            time.sleep(file_lock.POLL_S)
        yield
    finally:
        os.close(descriptor)


def packed_in(model: nn.Module) -> list[PackedLinear]:
    """The layers of a model that `pack` has made."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def drop(layers: Iterable[PackedLinear]) -> None:
    """Give the copies' memory back. The layers go on with their weights as they are."""
    for layer in layers:
        layer.packed.drop()


def make(layers: Iterable[PackedLinear]) -> bool:
    """Make dropped copies again, and say whether all are there.

    Where there is no room the layers go on with their weights as they are.
    """
    layers = [layer for layer in layers if layer.packed.weight is None]
    size, room = _size_of(layers), kv_cache.available_host_bytes()
    try:
        if layers and size > room * layers[0].packed.share:
            raise MemoryError(f"{size / 2**30:.1f} GiB for copies, {room / 2**30:.1f} available")
        for layer in layers:
            if layer.packed.weight is None:
                layer.packed.make(layer.weight)
    except (RuntimeError, MemoryError) as error:
        drop(layers)
        log.warning("weights stay as they are: %s", _first_line(error))
        return False
    return True


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
    except (RuntimeError, NotImplementedError, AttributeError, MemoryError) as error:
        return f"this machine's torch cannot pack them: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@torch.no_grad()
def _error(layer: nn.Linear) -> float:
    weight = layer.weight.detach()[:_COMPARED]
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
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if vendor != _VENDOR or _FEATURE not in flags:
        return f"on a CPU of this kind ({vendor}) packing has not been seen to help"
    if torch.get_num_threads() > _MOST_THREADS:
        return f"with more than {_MOST_THREADS} threads packing has not been seen to help"
    return ""


def _lack(size: int, spec: WorkerSpec, wish: bool | None) -> str:
    """Why memory does not allow it, or ""."""
    room = kv_cache.available_host_bytes() - int(spec.options.get("kv_cache_bytes") or 0)
    if not wish:
        room = int(room * SHARE)
    if spec.host_memory_bytes:
        room = min(room, spec.host_memory_bytes - size - _REST_BYTES)
    if size + _KERNELS_BYTES <= room:
        return ""
    more, room = size + _KERNELS_BYTES, max(0, room)
    return f"packed they take {more / 2**30:.1f} GiB more, and {room / 2**30:.1f} GiB are for that"


def _reordered(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return found


def _product(given: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] → [..., out]."""
    width = given.shape[-1]
    rows = given.numel() // width
    filled = _filled(rows)
    if filled == rows:
        return _multiplied(given, packed, bias)
    flat = pad(given.reshape(rows, width), (0, 0, 0, filled - rows))
    found = _multiplied(flat, packed, bias)
    return found[:rows].view(*given.shape[:-1], found.shape[-1])


def _filled(rows: int) -> int:
    """The number that so many rows are filled up to: 4, 6, 8, then four to each power of two."""
    if rows <= 4:
        return 4
    step = 1 << max(1, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def _multiplied(given: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(given, packed, bias, "none", [], "")
    return found
