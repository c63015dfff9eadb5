"""The memory of a device that this process may use, and its enforcement."""

from __future__ import annotations

import torch

from servekit.protocol.messages import WorkerSpec
from servekit.system import cgroup

#: GPU memory of a process besides torch's tensors: its context, loaded kernels, and the workspaces
#: of libraries.
CONTEXT_BYTES = 640 * 2**20
#: The same for NCCL's buffers, if several processes share a model.
NCCL_BYTES = 512 * 2**20


def limit_memory(spec: WorkerSpec, device: torch.device) -> None:
    """Make torch enforce `spec.memory_bytes`, if set."""
    if not spec.memory_bytes or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = tensors_bytes(spec) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)


def tensors_bytes(spec: WorkerSpec) -> int:
    """Return the part of `spec.memory_bytes` for tensors."""
    ranks = spec.parallel == "tensor" and spec.gpus > 1
    return spec.memory_bytes - CONTEXT_BYTES - (NCCL_BYTES if ranks else 0)


def available_bytes(spec: WorkerSpec, device: torch.device) -> int:
    """Return the bytes that this process may still allocate on the device."""
    if device.type == "cpu":
        return cgroup.available_memory_bytes()
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(device)[0])
    if not spec.memory_bytes:
        return free
    return max(0, min(free, tensors_bytes(spec) - torch.cuda.memory_reserved(device)))
