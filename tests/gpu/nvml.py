"""What NVML says of the GPUs, asked by the script itself rather than by way of servekit.

Without a GPU NVML is made up (`tests.integration.made_up_gpus`), so that a script can be tried.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servekit.system.procfs import all_processes
from tests.integration.made_up_gpus import MadeUpGpus


@dataclass(frozen=True, slots=True)
class Seen:
    """One GPU now. Bytes; what the driver keeps for itself is in none of them. `held` is by PID."""

    index: int
    uuid: str
    total: int
    used: int
    free: int
    busy: float  # 0 to 1
    held: dict[int, int]


class Gpus:
    """Those of this machine, or two that are made up."""

    def __init__(self, made_up: MadeUpGpus | None) -> None:
        self.made_up = made_up
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()

    def look(self) -> list[Seen]:
        return [self._seen(index) for index in range(self._nvml.nvmlDeviceGetCount())]

    def _seen(self, index: int) -> Seen:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        held = {one.pid: int(one.usedGpuMemory or 0) for one in running}
        uuid = nvml.nvmlDeviceGetUUID(handle)
        total = memory.total - memory.reserved
        return Seen(index, uuid, total, total - memory.free, memory.free, busy, held)

    def of_group(self, pid: int) -> dict[str, int]:
        """Bytes by UUID, of a worker and of all in its process group; nothing where it has none."""
        group = {pid, *(one.pid for one in all_processes() if one.group == pid)}
        found = {gpu.uuid: sum(gpu.held.get(one, 0) for one in group) for gpu in self.look()}
        return {uuid: size for uuid, size in found.items() if size}

    def holders(self) -> set[int]:
        """PIDs of all that hold something anywhere."""
        return {pid for gpu in self.look() for pid in gpu.held}


@contextlib.contextmanager
def gpus(device: str, folder: Path) -> Iterator[Gpus]:
    """The real ones for `cuda`; for `cpu` two of 100 GiB, of this process and of its children."""
    if device == "cuda":
        yield Gpus(None)
        return
    made_up = MadeUpGpus(folder, 2)
    before = dict(os.environ)
    os.environ.update(made_up.env)
    sys.path.insert(0, made_up.env["MADE_UP_GPUS"])
    try:
        yield Gpus(made_up)
    finally:
        os.environ.clear()
        os.environ.update(before)


_STRANGER = """
import sys
if sys.argv[1] == "cuda":
    import torch
    kept = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(found: Gpus, size: int) -> Iterator[int]:
    """A program of somebody else's with `size` bytes on GPU 0, and a context; its PID.

    What is made up it holds on each GPU.
    """
    device = "cpu" if found.made_up else "cuda"
    # its messages must not be taken for the script's, and no pin of ours is its own
    process = subprocess.Popen(
        [sys.executable, "-c", _STRANGER, device, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != b"holds\n":
            raise AssertionError("the other program has got no memory of GPU 0")
        if found.made_up:
            found.made_up.hold({process.pid: (size + 2**29) / 2**30})
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
        if found.made_up:
            found.made_up.hold({})


class Table:
    """Prints each row as soon as it is known; `failed` once one was not as it should be."""

    def __init__(self) -> None:
        self.failed = False

    def row(self, what: str, measured: object, ok: bool | None = None) -> None:
        mark = {True: "yes", False: "NO", None: ""}[ok]
        print(f"| {what:<64} | {measured!s:<60} | {mark:<3} |", flush=True)
        self.failed |= ok is False

    @contextlib.contextmanager
    def section(self, what: str, *logs: Path) -> Iterator[None]:
        """What cannot be measured is a row that failed, with the ends of the logs beneath it."""
        try:
            yield
        except Exception as error:
            # an Instance's own errors bring its whole log along: the end is shown below
            self.row(what, f"{type(error).__name__}: {str(error)[:300]}", ok=False)
            for log in logs:
                show_tails(log)
            if not isinstance(error, AssertionError):
                traceback.print_exc(file=sys.stdout)


def show_tails(place: Path, lines: int = 30) -> None:
    """The last lines of a log, or of each in a folder."""
    files = sorted(place.glob("*.log")) if place.is_dir() else [place]
    for file in files:
        with contextlib.suppress(OSError):
            tail = file.read_text(errors="replace").splitlines()[-lines:]
            print(f"--- {file.name}\n" + "\n".join(line[:400] for line in tail), flush=True)
