"""Linear layers on the CPU whose weights are stored in the layout of its vector units.

A weight is stored row by row, and a product reorders it first or computes more slowly: for the few
rows of a decode step this may take as long as the product itself. A weight packed by oneDNN avoids
this. It helps on AMD CPUs; on Intel Xeons, for which the library's products are written, it gains
little with one thread and loses with eight (`tests.bench.packed`). So packing is the default only
where it is known to help. It is not measured at start, because other load on the machine would
decide the result. With packing, the result of a row does not depend on the other rows of the batch.

The packed weight is a copy. The original remains for other users (adapters, a tied embedding); if
it is mapped from a file, the kernel may evict its pages. A deep copy of a packed layer is a plain
layer, so that an adapter and the base that it is compared with compute alike.

oneDNN keeps a kernel of about 0.6 MiB for each shape and number of rows, and never frees it, so
rows are padded to one of a few numbers; four rows take less time than one or two.

The operators are those that torch's compiler generates for a frozen linear layer
(torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from servekit.engines.model_files import file_lock
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec
from servekit.system import cgroup
from servekit.units import format_bytes

log: Any = structlog.get_logger(__name__)

#: Maximum share of available memory to use, unless packing is requested.
SHARE = 0.25
#: Minimum size of weights and of models for packing.
_LEAST_BYTES, _LEAST_MODEL_BYTES = 2**16, 2**24
#: Dtypes with fast CPU products, with the relative error that counts as rounding.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
#: Row counts of the compared products (kernels differ between few and many rows), and the number of
#: weight rows compared: there may be no memory for a third copy of a whole head.
_ROWS = (1, 8, 48)
_COMPARED = 4096
#: Without a request, only CPUs of this vendor with this feature are packed, and with at most this
#: number of threads.
_VENDOR, _FEATURE, _MOST_THREADS = "AuthenticAMD", "avx512f", 4
#: Memory for oneDNN's kernels.
_KERNELS_BYTES = 128 * 2**20
#: How long a worker waits for another one that packs.
_WAIT_S = 60.0
#: Minimum of a host memory claim that is left to libraries and caches.
_REST_BYTES = 512 * 2**20


class Packed:
    """The packed copy of a weight, for all layers that share it; None before packing."""

    __slots__ = ("at", "share", "weight")

    def __init__(self, share: float) -> None:
        self.weight: Tensor | None = None
        self.at = 0  # address of the weight when it was packed
        self.share = share  # maximum share of available memory for all copies

    def make(self, weight: Tensor) -> None:
        self.weight = _reorder_weight(weight.detach())
        self.at = weight.data_ptr()

    def drop(self) -> None:
        self.weight, self.at = None, 0


class PackedLinear(nn.Linear):
    """A linear layer that uses `packed` as long as that is a copy of its current weight."""

    packed: Packed

    def forward(self, input: Tensor) -> Tensor:
        packed = self.packed
        if packed.weight is None or packed.at != self.weight.data_ptr():
            return super().forward(input)
        return _multiply_padded(input, packed.weight, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a plain layer: PEFT checks for that exact class, and changes weights."""
        memo[id(self)] = twin = nn.Linear.__new__(nn.Linear)
        own = {name: value for name, value in self.__dict__.items() if name != "packed"}
        twin.__dict__.update(copy.deepcopy(own, memo))
        return twin


def pack_layers(model: nn.Module, spec: WorkerSpec) -> int:
    """Pack all suitable layers if options, memory and CPU allow it; return the bytes used.

    A model on GPUs or over several ranks is not packed. Raises LoadError if packing is requested
    but impossible.
    """
    packed: bool | None = spec.options.get("packed_weights")
    if packed is False or spec.device != "cpu" or spec.gpus > 1:
        return 0
    layers = list(_find_layers(model))
    size = _size_of(layers)
    if not packed and size < _LEAST_MODEL_BYTES:
        return 0
    with _hold_lock(spec):
        why = (
            ("" if packed else _no_gain())
            or _explain_lack(size, spec, packed)
            or _find_obstacle(layers)
        )
        if not why and not _pack_all(layers, 1.0 if packed else SHARE):
            why = "there is no memory for it"
    if why:
        if packed:
            raise LoadError(
                f"options.packed_weights is true, and {why}. Without that option the model runs "
                "with its weights as they are.",
                permanent=False,
            )
        log.info("weights_not_packed", model=spec.model, reason=why)
        return 0
    return size


def _pack_all(layers: list[nn.Linear], share: float) -> bool:
    shared = {_weight_place(layer): Packed(share) for layer in layers}
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.packed = shared[_weight_place(layer)]  # type: ignore[assignment]  # it is one now
    packed: list[Any] = layers
    if make_copies(packed):
        return True
    for layer in layers:
        del layer.packed
        layer.__class__ = nn.Linear
    return False


def _weight_place(layer: nn.Linear) -> tuple[int, torch.Size]:
    return layer.weight.data_ptr(), layer.weight.shape


def _size_of(layers: Iterable[nn.Linear]) -> int:
    """Return the bytes of the layers' weights, counting shared ones once."""
    return sum({_weight_place(layer): layer.weight.nbytes for layer in layers}.values())


@contextlib.contextmanager
def _hold_lock(spec: WorkerSpec) -> Iterator[None]:
    """Hold the packing lock of this instance and machine.

    The lock keeps two workers from counting on the same free memory. The wait for it is limited: a
    worker that hangs must not keep the others from serving.
    """
    folder = Path(spec.socket).parent
    if not spec.socket.startswith("/") or not folder.is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not file_lock.take_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(file_lock.POLL_S)
        yield
    finally:
        os.close(descriptor)


def packed_in(model: nn.Module) -> list[PackedLinear]:
    """Return the layers of a model that `pack_layers` has packed."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def drop_copies(layers: Iterable[PackedLinear]) -> None:
    """Free the packed copies; the layers continue with their plain weights."""
    for layer in layers:
        layer.packed.drop()


def make_copies(layers: Iterable[PackedLinear]) -> bool:
    """Pack dropped copies again; return whether all copies exist.

    Without enough memory the layers continue with their plain weights.
    """
    layers = [layer for layer in layers if layer.packed.weight is None]
    size, room = _size_of(layers), cgroup.available_memory_bytes()
    try:
        if layers and size > room * layers[0].packed.share:
            raise MemoryError(f"{format_bytes(size)} for copies, {format_bytes(room)} available")
        for layer in layers:
            if layer.packed.weight is None:
                layer.packed.make(layer.weight)
    except (RuntimeError, MemoryError) as error:
        drop_copies(layers)
        log.warning("weight_packing_failed", reason=_first_line(error))
        return False
    return True


def _find_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype in _TOLERANCE:
            weight = module.weight
            plain = type(weight.data) is Tensor and weight.device.type == "cpu"
            if plain and weight.is_contiguous() and weight.nbytes >= _LEAST_BYTES:
                yield module


def _find_obstacle(layers: list[nn.Linear]) -> str:
    """Return why these layers cannot be packed here, or ""; one layer of each shape is tried."""
    if not layers:
        return "it has no linear layers of a kind that can be packed"
    try:
        for layer in {(layer.weight.shape, layer.weight.dtype): layer for layer in layers}.values():
            error = _measure_error(layer)
            if not error <= _TOLERANCE[layer.weight.dtype]:  # NaN is no agreement
                return f"packed, a product of {tuple(layer.weight.shape)} is off by {error:.1e}"
    except (RuntimeError, NotImplementedError, AttributeError, MemoryError) as error:
        return f"this machine's torch cannot pack them: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@torch.no_grad()
def _measure_error(layer: nn.Linear) -> float:
    weight = layer.weight.detach()[:_COMPARED]
    packed = _reorder_weight(weight)
    worst = 0.0
    for rows in _ROWS:
        given = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
        given = given.to(weight.dtype)
        expected = linear(given.float(), weight.float())
        found = _multiply_padded(given, packed, None).float()
        worst = max(worst, float((found - expected).norm() / expected.norm().clamp(min=1e-6)))
    return worst


def _no_gain(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return why packing is not known to help on this CPU, or ""."""
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


def _explain_lack(size: int, spec: WorkerSpec, packed: bool | None) -> str:
    """Return why memory does not allow packing, or ""."""
    room = cgroup.available_memory_bytes() - int(spec.options.get("kv_cache_bytes") or 0)
    if not packed:
        room = int(room * SHARE)
    if spec.host_memory_bytes:
        room = min(room, spec.host_memory_bytes - size - _REST_BYTES)
    if size + _KERNELS_BYTES <= room:
        return ""
    more, room = size + _KERNELS_BYTES, max(0, room)
    return f"packed they take {format_bytes(more)} more, and {format_bytes(room)} are for that"


def _reorder_weight(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return found


def _multiply_padded(given: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `given` [..., in] with the packed weight; return [..., out]."""
    width = given.shape[-1]
    rows = given.numel() // width
    filled = _padded_rows(rows)
    if filled == rows:
        return _multiply_packed(given, packed, bias)
    flat = pad(given.reshape(rows, width), (0, 0, 0, filled - rows))
    found = _multiply_packed(flat, packed, bias)
    return found[:rows].view(*given.shape[:-1], found.shape[-1])


def _padded_rows(rows: int) -> int:
    """Return the number of rows after padding: 4, 6, 8, then four values per power of two."""
    if rows <= 4:
        return 4
    step = 1 << max(1, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def _multiply_packed(given: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(given, packed, bias, "none", [], "")
    return found
