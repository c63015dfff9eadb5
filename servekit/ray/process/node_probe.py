"""Check that a node runs on itself before any process is started there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from servekit.config.engines.installed import install_command
from servekit.config.engines.options import KINDS
from servekit.protocol.control.ray_messages import Node, NodeRequirements, RemoteGpu
from servekit.system.gpu.gpus import Gpu, find_gpus

_ANSWER_S = 60.0
_ASK = "import servekit; print(servekit.__version__)"


def probe_node(wants: bytes) -> bytes:
    """Check a node, as a Ray task: `wants` is an encoded list; the answer is an encoded Node."""
    import ray

    context = ray.get_runtime_context()
    found = Node(
        node=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
        python=platform.python_version(),
        ray=ray.__version__,
        servekit=_installed_version(),
        lacks=describe_lacks(msgspec.msgpack.decode(wants, type=list[NodeRequirements])),
    )
    return msgspec.msgpack.encode(found)


def _installed_version() -> str:
    """Return servekit's version in a worker's interpreter; "" if it is not found."""
    command = [sys.executable, "-P", "-c", _ASK]  # as the actor starts one
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def describe_lacks(wants: list[NodeRequirements]) -> dict[str, str]:
    found: dict[str, str] = {}
    for want in wants:
        if want.path and not Path(want.path).exists():
            found[want.model] = f"there is no {want.path} there"
        elif want.engine not in KINDS:
            found[want.model] = f"the engine {want.engine} is not installed there"
        elif remedy := install_command(KINDS[want.engine]):
            found[want.model] = f"the engine {want.engine} is not installed there; {remedy}"
    return found


def own_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that Ray has given to this process, as NVML reports them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return find_gpus(visible) if visible else ()


def as_remote(gpus: tuple[Gpu, ...]) -> tuple[RemoteGpu, ...]:
    return tuple(RemoteGpu(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes) for gpu in gpus)
