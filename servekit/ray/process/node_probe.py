"""What a node of the cluster finds of itself, asked before anything is started there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from servekit.config.engines.installed import lacking
from servekit.config.engines.options import KINDS
from servekit.protocol.ray_messages import Node, RemoteGpu, Want
from servekit.system.gpus import Gpu, find_gpus

_ANSWER_S = 60.0
_ASK = "import servekit; print(servekit.__version__)"


def look(wants: bytes) -> bytes:
    """As a task of Ray's on that node; `wants` is a list of Want, the answer a Node."""
    import ray

    context = ray.get_runtime_context()
    found = Node(
        node=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
        python=platform.python_version(),
        ray=ray.__version__,
        servekit=_version(),
        lacks=_lacks(msgspec.msgpack.decode(wants, type=list[Want])),
    )
    return msgspec.msgpack.encode(found)


def _version() -> str:
    """servekit's, as a worker's interpreter will find it; "" if it does not."""
    command = [sys.executable, "-P", "-c", _ASK]  # as the shim starts one
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def _lacks(wants: list[Want]) -> dict[str, str]:
    found: dict[str, str] = {}
    for want in wants:
        if want.path and not Path(want.path).exists():
            found[want.model] = f"there is no {want.path} there"
        elif want.engine not in KINDS:
            found[want.model] = f"the engine {want.engine} is not installed there"
        elif remedy := lacking(KINDS[want.engine]):
            found[want.model] = f"the engine {want.engine} is not installed there; {remedy}"
    return found


def own_gpus() -> tuple[Gpu, ...]:
    """Those that Ray has given to this process, by NVML's word."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return find_gpus(visible) if visible else ()


def as_remote(gpus: tuple[Gpu, ...]) -> tuple[RemoteGpu, ...]:
    return tuple(RemoteGpu(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes) for gpu in gpus)
