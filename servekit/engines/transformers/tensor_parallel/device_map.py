"""One model over several GPUs of one process, layer after layer (accelerate's device map)."""

from __future__ import annotations

from typing import Any

import torch

from servekit.engines.transformers.sleep import device_memory
from servekit.protocol.messages import WorkerSpec

#: Of what is free on each GPU, for the weights; caches and activations need the rest.
_WEIGHTS_FRACTION = 0.9


def placing(spec: WorkerSpec) -> dict[str, Any]:
    """What tells the library to spread the layers evenly."""
    devices = [torch.device("cuda", index) for index in range(spec.gpus)]
    room = {
        device.index: int(device_memory.available_bytes(spec, device) * _WEIGHTS_FRACTION)
        for device in devices
    }
    # On no other device: a part on the CPU or on disk would be served a hundred times slower.
    return {"device_map": "balanced", "max_memory": room | {"cpu": 0}}
