"""One model over several GPUs in one process, layer by layer (accelerate's device map)."""

from __future__ import annotations

from typing import Any

import torch

from servekit.engines.transformers.sleep import device_memory
from servekit.protocol.messages import WorkerSpec

#: Share of each GPU's free memory for weights; caches and activations need the rest.
_WEIGHTS_FRACTION = 0.9


def placing(spec: WorkerSpec) -> dict[str, Any]:
    """Return the arguments that make the library spread the layers evenly."""
    devices = [torch.device("cuda", index) for index in range(spec.gpus)]
    room = {
        device.index: int(device_memory.available_bytes(spec, device) * _WEIGHTS_FRACTION)
        for device in devices
    }
    # No other device: a part on the CPU or on disk would be a hundred times slower.
    return {"device_map": "balanced", "max_memory": room | {"cpu": 0}}
