"""The process group of a replica's ranks.

The ranks meet in an unnamed file in memory that rank 0 shares with its children: no port is used,
two replicas never meet, and nothing is left after their end.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from servekit.protocol.messages import WorkerSpec

#: Defaults of environment variables that the libraries read when a group is created. All ranks are
#: on this host. NVLink multicast takes extra memory, and helps only sums larger than a step's.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}
#: Long, as loading takes long; a rank's death is noticed at once by other means.
_TIMEOUT = timedelta(hours=2)


def device_of(spec: WorkerSpec, rank: int) -> torch.device:
    """Return the device of a rank's part of the model."""
    return torch.device("cuda", rank) if spec.device == "cuda" else torch.device("cpu")


def join_group(device: torch.device, rank: int, size: int, store: str) -> None:
    """Join the group; from here on this process uses only its own GPU."""
    os.environ["LOCAL_RANK"] = str(rank)  # tells transformers its GPU
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cuda = device.type == "cuda"
    library: Any = dist  # untyped exports
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=library.FileStore(store, size),
        rank=rank,
        world_size=size,
        device_id=device if cuda else None,
        timeout=_TIMEOUT,
    )


def leave_group() -> None:
    """Leave the group; NCCL's regular way would wait for ranks that are gone."""
    library: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        library._abort_process_group()
    else:
        dist.destroy_process_group()


def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's content to all other ranks."""
    if len(tensor):
        dist.broadcast(tensor, src=0)
    return tensor
