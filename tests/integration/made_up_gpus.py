"""GPUs on a machine that has none: NVML is made up, the processes and all that they do are not.

A worker holds as much of its GPUs as its variable MADE_UP_GIB says, from the beginning of its load
to its last moment. Others may be said to hold something, by PID: `hold`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.integration.instance import echo

GIB = 2**30

PYNVML = """
import json, os, pathlib
FOLDER = pathlib.Path(os.environ["MADE_UP_GPUS"])
GIB = 2**30
nvmlMemory_v2 = 2
NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
class NVMLError(Exception): pass
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return int((FOLDER / "count").read_text())
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{(FOLDER / 'machine').read_text()}{handle}"
def nvmlDeviceGetName(handle): return "made up"
def nvmlDeviceGetMemoryInfo(handle, version=None):
    used = sum(process.usedGpuMemory for process in nvmlDeviceGetComputeRunningProcesses(handle))
    size = int((FOLDER / "size").read_text()) * GIB
    return Thing(total=size + GIB, reserved=GIB, free=size - used, used=used)
def nvmlDeviceGetComputeRunningProcesses(handle):
    held = {int(pid): size for pid, size in json.loads((FOLDER / "held").read_text()).items()}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal() and (size := worker(entry, nvmlDeviceGetUUID(handle))):
            held[int(entry.name)] = size
    return [Thing(pid=pid, usedGpuMemory=int(size * GIB)) for pid, size in held.items()]
def nvmlDeviceGetGraphicsRunningProcesses(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetP2PStatus(one, other, kind): raise NVMLError("Not Supported")
def nvmlDeviceGetUtilizationRates(handle): raise NVMLError("Not Supported")
def nvmlSystemGetDriverVersion(): return "580.95"
def nvmlSystemGetCudaDriverVersion(): return 13000
def nvmlDeviceGetUtilizationRates(handle): return Thing(gpu=42)
def nvmlDeviceGetComputeMode(handle): return 0
def nvmlDeviceGetPersistenceMode(handle): return 1
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
def worker(entry, uuid):
    try:
        if not (FOLDER / f"loads-{entry.name}").exists(): return 0
        pairs = (entry / "environ").read_bytes().decode().split("\\0")
    except OSError: return 0
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    here = env.get("MADE_UP_GPUS") == str(FOLDER)
    return float(env.get("MADE_UP_GIB", 0)) if here and uuid in env["CUDA_VISIBLE_DEVICES"] else 0
"""
#: Only whether a driver is there is asked of the file system. A worker leaves a file when it loads.
SITECUSTOMIZE = """
import os, pathlib
_exists = pathlib.Path.exists
def exists(self, **keywords): return str(self) == "/dev/nvidiactl" or _exists(self, **keywords)
pathlib.Path.exists = exists
if b"servekit.worker" in pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\\0"):
    from servekit.worker.worker import Worker
    _load = Worker._load_in_thread
    def load(self, engine):
        (pathlib.Path(os.environ["MADE_UP_GPUS"]) / f"loads-{os.getpid()}").touch()
        return _load(self, engine)
    Worker._load_in_thread = load
"""


class MadeUpGpus:
    """So many GPUs of 100 GiB each, and the environment of an instance that sees them.

    Where there are several machines, the UUIDs of each begin with its name.
    """

    def __init__(self, folder: Path, count: int = 1, machine: str = "") -> None:
        self._folder = folder / "gpus"
        self._folder.mkdir()
        (self._folder / "pynvml.py").write_text(PYNVML)
        (self._folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        (self._folder / "count").write_text(str(count))
        (self._folder / "machine").write_text(machine)
        self.grow(100)
        self.hold({})

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder), os.environ.get("PYTHONPATH", "")])
        return {
            "MADE_UP_GPUS": str(self._folder),
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": "0,1",
        }

    def grow(self, size: int) -> None:
        """Have each GPU so many GiB, before an instance looks."""
        (self._folder / "size").write_text(str(size))

    def hold(self, held: dict[int, float]) -> None:
        """Have these PIDs hold so many GiB of each GPU, and no others."""
        fresh = self._folder / "held.new"
        fresh.write_text(json.dumps(held))
        fresh.rename(self._folder / "held")


def on_gpu(name: str, memory: str | None, held: float, **options: Any) -> dict[str, Any]:
    """An echo model with a claim, whose worker holds `held` GiB."""
    entry = {**echo(name, **options), "device": "cuda", "env": {"MADE_UP_GIB": str(held)}}
    return entry if memory is None else {**entry, "memory": memory}
