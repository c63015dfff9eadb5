"""How much memory of a device this process may take, and that it takes no more."""

from __future__ import annotations

import torch

from servekit.engines.transformers.batching import kv_cache
from servekit.protocol.messages import WorkerSpec

#: What a process holds on a GPU beside torch's tensors: its context, the kernels that it has
#: loaded, the workspaces of libraries. 612 MiB were seen on an H200.
CONTEXT_BYTES = 640 * 2**20
#: The same for NCCL's buffers, where several processes share a model.
NCCL_BYTES = 512 * 2**20


def bound(spec: WorkerSpec, device: torch.device) -> None:
    """Have torch refuse what goes over `spec.memory_bytes`, where that is said."""
    if not spec.memory_bytes or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = tensors_bytes(spec) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)


def tensors_bytes(spec: WorkerSpec) -> int:
    """Of `spec.memory_bytes`, what is for tensors."""
    ranks = spec.parallel == "tensor" and spec.gpus > 1
    return spec.memory_bytes - CONTEXT_BYTES - (NCCL_BYTES if ranks else 0)


def available_bytes(spec: WorkerSpec, device: torch.device) -> int:
    """What this process may still allocate there."""
    if device.type == "cpu":
        return kv_cache.available_host_bytes()
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(device)[0])
    if not spec.memory_bytes:
        return free
    return max(0, min(free, tensors_bytes(spec) - torch.cuda.memory_reserved(device)))
