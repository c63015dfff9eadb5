"""Offloading of weights from their device during sleep.

    on a GPU    every byte is copied to host memory, page-locked if the system allows it, and the
                device memory under the tensors is freed; the tensors remain the same objects, so
                modules that share them (a tied head, an adapter's model) are not affected
    on a CPU    weights mapped from their file are left to the kernel, which reads them again on
                use; converted weights are dropped and loaded again; packed copies are dropped
                and created again

Source for freeing under a tensor: `UntypedStorage.resize_`, as FSDP does it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from servekit.engines.transformers import packed_linear
from servekit.errors import LoadError
from servekit.system import cgroup
from servekit.units import format_bytes

log: Any = structlog.get_logger(__name__)

_SMAPS = Path("/proc/self/smaps")

Tensors = Callable[[], Iterable[Tensor]]


class WeightStore(Protocol):
    """Store of weights, awake or asleep; both methods are idempotent."""

    def sleep(self) -> None:
        """Offload the weights. Raises LoadError, and the weights are then awake."""

    def wake(self) -> None:
        """Restore the weights. Raises LoadError, and the weights are then asleep."""


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Return a module's weights and buffers; of a quantised weight, its values and scales."""
    return (tensor for _, tensor in _named_tensors(module))


def unique_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the tensors' storages, each once; of a tensor sharded over ranks, this rank's part."""
    local = (each for tensor in tensors for _, each in _flatten_tensor("", tensor))
    found = (tensor.untyped_storage() for tensor in local)
    return list({storage._cdata: storage for storage in found if storage.nbytes()}.values())


def count_model_bytes(model: nn.Module) -> int:
    """Return the size of a model's weights and buffers."""
    return sum(storage.nbytes() for storage in unique_storages(tensors_of(model)))


def weight_store(
    model: nn.Module,
    device: torch.device,
    more: Tensors = list,
    load: Callable[[], nn.Module] | None = None,
) -> WeightStore:
    """Return the store for a model, on a GPU also for `more`; `load` loads the model again."""
    if device.type == "cuda":
        return HostOffload(lambda: chain(tensors_of(model), more()))
    return DiskReload(model, load)


# ---------------------------------------------------------------- on a GPU


class HostOffload:
    """Store of GPU weights that sleep in host memory."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._kept: list[tuple[UntypedStorage, Tensor]] = []  # with a copy of its bytes
        self._host: Tensor | None = None

    def sleep(self) -> None:
        if self._kept:
            return
        on_gpu = [each for each in unique_storages(self._tensors()) if each.device.type == "cuda"]
        if not all(storage.resizable() for storage in on_gpu):
            raise LoadError("The model's weights are in memory that another library holds.")
        self._host = host = _host_memory(sum(storage.nbytes() for storage in on_gpu))
        parts = torch.split(host, [storage.nbytes() for storage in on_gpu])
        kept = list(zip(on_gpu, parts, strict=True))
        for storage, part in kept:
            part.copy_(_as_bytes(storage), non_blocking=True)
        _synchronize_devices(on_gpu)
        for storage in on_gpu:
            storage.resize_(0)
        self._kept = kept
        _empty_caches()

    def wake(self) -> None:
        try:
            for storage, part in self._kept:
                storage.resize_(len(part))
                _as_bytes(storage).copy_(part, non_blocking=True)
        except torch.OutOfMemoryError as error:
            self._fall_back()
            raise LoadError(
                f"The GPU has no room to wake the model: {str(error).splitlines()[0]}",
                permanent=False,
            ) from error
        _synchronize_devices([storage for storage, _ in self._kept])
        self._kept = []
        if self._host is not None:
            _unlock_memory(self._host)
            self._host = None

    def _fall_back(self) -> None:
        _synchronize_devices([storage for storage, _ in self._kept])
        for storage, _ in self._kept:
            storage.resize_(0)
        _empty_caches()


def _as_bytes(storage: UntypedStorage) -> Tensor:
    """Return a storage as a tensor, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int) -> Tensor:
    """Allocate host memory, page-locked if possible. Raises LoadError.

    It is locked in place, because torch's pinned memory comes in powers of two.
    """
    room = cgroup.available_memory_bytes()
    if size > room:
        raise LoadError(
            f"The weights take {format_bytes(size)}, and the host has {format_bytes(room)} to "
            "keep them in.",
            permanent=False,
        )
    host = torch.empty(size, dtype=torch.uint8)
    if size and int(_cudart().cudaHostRegister(host.data_ptr(), size, 0)):
        log.warning("page_lock_failed", size_bytes=size)
    return host


def _unlock_memory(host: Tensor) -> None:
    if len(host):
        _cudart().cudaHostUnregister(host.data_ptr())


def _cudart() -> Any:
    runtime: Any = torch.cuda
    return runtime.cudart()


def _synchronize_devices(on_gpu: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in on_gpu}:
        torch.cuda.synchronize(device)


def _empty_caches() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- on a CPU


class DiskReload:
    """Store of CPU weights; `load` loads the model again.

    Without `load` only file-mapped weights can be released.
    """

    def __init__(self, model: nn.Module, load: Callable[[], nn.Module] | None) -> None:
        self._model = model
        self._load = load
        self._packed = packed_linear.packed_in(model)
        self._dropped: dict[int, tuple[UntypedStorage, int]] = {}  # with its size in bytes

    def sleep(self) -> None:
        if self._dropped:
            return
        packed_linear.drop_copies(self._packed)
        own = unique_storages(tensors_of(self._model))
        release_pages(own)
        if self._load is not None:
            converted = [storage for storage in own if storage.resizable()]
            self._dropped = {each._cdata: (each, each.nbytes()) for each in converted}
        for storage, _ in self._dropped.values():
            storage.resize_(0)

    def wake(self) -> None:
        if self._dropped and self._load is not None:
            self._read_again(self._load)
        if self._packed and packed_linear.make_copies(self._packed):
            release_pages(unique_storages(tensors_of(self._model)))

    def _read_again(self, load: Callable[[], nn.Module]) -> None:
        again = dict(_named_tensors(load()))
        for name, tensor in _named_tensors(self._model):
            found = self._dropped.pop(tensor.untyped_storage()._cdata, None)
            if found is not None:
                storage, size = found
                storage.resize_(size)
                storage.copy_(again[name].untyped_storage())


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return chain.from_iterable(_flatten_tensor(name, tensor) for name, tensor in named)


def _flatten_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that hold the data of a tensor, such as a quantised or sharded one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)  # of bitsandbytes
        if isinstance(scales, Tensor):
            yield f"{name}.absmax", scales
        return
    wrapper: Any = tensor
    for part in wrapper.__tensor_flatten__()[0]:
        if isinstance(held := getattr(tensor, part), Tensor):  # a sharded one names its ranks, too
            yield from _flatten_tensor(f"{name}.{part}", held)


def release_pages(own: Iterable[UntypedStorage]) -> None:
    """Make the kernel drop the pages of mapped files; they are read again on use.

    Mappings with modified pages are skipped, because the changes would be lost, and so are all
    where the kernel does not report them.
    """
    places = [storage.data_ptr() for storage in own if not storage.resizable()]
    if not places or not _SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    for start, end, written_kb in _file_mappings(_SMAPS):
        if not written_kb and any(start <= place < end for place in places):
            size = ctypes.c_size_t(end - start)
            libc.madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def _file_mappings(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, KiB of private pages) of this process's file mappings."""
    place: tuple[int, int] | None = None
    anonymous_kb = 0
    for line in path.read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            mapped = len(words) > 4 and words[4].startswith("/")
            place = (int(start, 16), int(end, 16)) if mapped else None
        elif name == "Anonymous:":
            anonymous_kb = int(words[0])
        elif name == "Swap:" and place is not None:
            yield *place, anonymous_kb + int(words[0])
