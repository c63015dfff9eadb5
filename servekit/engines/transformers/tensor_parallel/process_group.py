"""The process group of a replica's ranks.

They meet in a file that has no name, in memory that rank 0 has shared with its children: no port is
taken for it, two replicas never meet, and nothing is left when they are gone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from servekit.protocol.messages import WorkerSpec

#: What the libraries read when a group is made, where the environment does not say. All ranks are
#: on this host. NVLink multicast takes memory of its own, and is for sums larger than a step's.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}
#: No rank is waited for in vain: one that dies is noticed otherwise, at once. Loading takes long.
_TIMEOUT = timedelta(hours=2)


def device_of(spec: WorkerSpec, rank: int) -> torch.device:
    """Where a rank's part of the model is."""
    return torch.device("cuda", rank) if spec.device == "cuda" else torch.device("cpu")


def join(device: torch.device, rank: int, size: int, store: str) -> None:
    """Meet the others. From here on nothing of this process is on another GPU than its own."""
    os.environ["LOCAL_RANK"] = str(rank)  # transformers finds its GPU by it
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cuda = device.type == "cuda"
    library: Any = dist  # which does not say what it exports
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


def leave() -> None:
    """Forget the group. Not in NCCL's own way, which would wait for ranks that are gone."""
    library: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        library._abort_process_group()
    else:
        dist.destroy_process_group()


def broadcast(tensor: Tensor) -> Tensor:
    """Rank 0's content, into all others'."""
    if len(tensor):
        dist.broadcast(tensor, src=0)
    return tensor
