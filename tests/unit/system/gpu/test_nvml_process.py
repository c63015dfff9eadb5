"""What the process that reads NVML says of GPUs of many kinds, with a stand-in for the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from servekit.system.gpu import nvml_process as module


class NVMLError(Exception):
    """As the library raises for whatever it does not support."""


@dataclass
class Memory:
    total: int
    free: int
    reserved: int = 0


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None


@dataclass
class Use:
    gpu: int


@dataclass
class Device:
    """A GPU; None: it does not support the question."""

    uuid: str
    lost: bool = False
    memory: Memory = field(default_factory=lambda: Memory(100, 60, 3))
    linked: tuple[str, ...] | None = ()
    computing: list[Process] | None = field(default_factory=list)
    drawing: list[Process] | None = field(default_factory=list)
    utilisation: int | None = 42
    mode: int | None = 0
    mig: list[int] | None = None
    persistence: int | None = 1


def supported(value: Any) -> Any:
    if value is None:
        raise NVMLError("Not Supported")
    return value


class Nvml:
    """The library on a machine with these GPUs."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, *devices: Device) -> None:
        self.devices = devices

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        if self.devices[index].lost:
            raise NVMLError("GPU is lost")
        return self.devices[index]

    def nvmlDeviceGetMemoryInfo(self, one: Device, version: int | None = None) -> Memory:
        if version is None:  # the driver's own reserve counts as used
            return Memory(one.memory.total, one.memory.free)
        return one.memory

    def nvmlDeviceGetUUID(self, one: Device) -> str:
        return one.uuid

    def nvmlDeviceGetName(self, one: Device) -> str:
        return "H200"

    def nvmlDeviceGetP2PStatus(self, one: Device, other: Device, what: int) -> int:
        assert what == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if other.uuid in supported(one.linked) else 5

    def nvmlDeviceGetComputeRunningProcesses(self, one: Device) -> Any:
        return supported(one.computing)

    def nvmlDeviceGetGraphicsRunningProcesses(self, one: Device) -> Any:
        return supported(one.drawing)

    def nvmlDeviceGetUtilizationRates(self, one: Device) -> Use:
        return Use(supported(one.utilisation))

    def nvmlDeviceGetComputeMode(self, one: Device) -> Any:
        return supported(one.mode)

    def nvmlDeviceGetMigMode(self, one: Device) -> Any:
        return supported(one.mig)

    def nvmlDeviceGetPersistenceMode(self, one: Device) -> Any:
        return supported(one.persistence)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010


class OldNvml(Nvml):
    """Of an old driver: without the second version of the memory, and without links."""

    def nvmlDeviceGetMemoryInfo(self, one: Device, version: int | None = None) -> Memory:
        supported(None if version else one)
        return super().nvmlDeviceGetMemoryInfo(one)

    def nvmlDeviceGetP2PStatus(self, one: Device, other: Device, what: int) -> int:
        raise NVMLError("Function Not Found")


def test_a_gpu_is_told_with_its_memory_but_for_the_drivers_reserve() -> None:
    [found] = module._list_gpus(Nvml(Device("GPU-a")))
    assert found == {
        "index": 0,
        "uuid": "GPU-a",
        "name": "H200",
        "total_bytes": 97,
        "free_bytes": 60,
        "linked": [],
    }


def test_an_old_driver_tells_the_memory_with_its_reserve_and_no_links() -> None:
    nvml = OldNvml(Device("GPU-a", linked=("GPU-b",)), Device("GPU-b"))
    assert [(gpu["total_bytes"], gpu["linked"]) for gpu in module._list_gpus(nvml)] == [
        (100, []),
        (100, []),
    ]


def test_links_are_told_by_each_gpu_of_the_others() -> None:
    nvml = Nvml(
        Device("GPU-a", linked=("GPU-a", "GPU-c")),  # itself does not count
        Device("GPU-b", linked=None),
        Device("GPU-c", linked=("GPU-a",)),
    )
    assert [gpu["linked"] for gpu in module._list_gpus(nvml)] == [["GPU-c"], [], ["GPU-a"]]


def test_a_gpu_that_fell_off_the_bus_is_left_out_and_the_others_keep_their_index() -> None:
    nvml = Nvml(Device("GPU-a"), Device("GPU-b", lost=True), Device("GPU-c"))
    assert [(gpu["index"], gpu["uuid"]) for gpu in module._list_gpus(nvml)] == [
        (0, "GPU-a"),
        (2, "GPU-c"),
    ]
    assert module._free_memory(nvml) == {"GPU-a": 60, "GPU-c": 60}
    assert [gpu["index"] for gpu in module._gpu_use(nvml)] == [0, 2]
    assert [gpu["index"] for gpu in module._gpu_details(nvml)["gpus"]] == [0, 2]


def test_what_processes_hold_is_told_by_process_and_gpu() -> None:
    nvml = Nvml(
        Device("GPU-a", computing=[Process(7, 30), Process(8, None)]),
        Device("GPU-b", computing=[Process(7, 5)], drawing=None),
        Device("GPU-c", computing=None, drawing=[Process(9, 1)]),
    )
    assert module._memory_by_process(nvml) == {
        7: {"GPU-a": 30, "GPU-b": 5},
        8: {"GPU-a": 0},
        9: {"GPU-c": 1},
    }


def test_a_process_that_also_draws_is_counted_once_with_the_larger_figure() -> None:
    both = Device(
        "GPU-a",
        computing=[Process(7, 30), Process(8, 1)],
        drawing=[Process(7, 10), Process(8, 2)],
    )
    assert module._memory_by_process(Nvml(both)) == {7: {"GPU-a": 30}, 8: {"GPU-a": 2}}


def test_parts_of_one_gpu_that_have_its_uuid_are_summed() -> None:
    nvml = Nvml(*(Device("GPU-a", computing=[Process(7, size)]) for size in (3, 4)))
    assert module._memory_by_process(nvml) == {7: {"GPU-a": 7}}


def test_use_is_what_is_not_free_and_never_less_than_nothing() -> None:
    nvml = Nvml(
        Device("GPU-a"),
        Device("GPU-b", memory=Memory(100, 99, 3), utilisation=None),
        Device("GPU-c", utilisation=0),
    )
    found = module._gpu_use(nvml)
    assert [(gpu["used_bytes"], gpu["utilisation"]) for gpu in found] == [
        (37, 0.42),
        (0, None),
        (37, 0.0),
    ]
    assert found[0].keys() == {
        "index", "uuid", "name", "total_bytes", "used_bytes", "utilisation",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (0, "default"),
        (1, "exclusive"),
        (2, "prohibited"),
        (3, "exclusive"),
        (9, "9"),
        (None, None),
    ],
)
def test_the_compute_mode_is_told_in_words(mode: int | None, told: str | None) -> None:
    [found] = module._gpu_details(Nvml(Device("GPU-a", mode=mode)))["gpus"]
    assert found["compute_mode"] == told


def test_details_tell_the_driver_and_what_a_gpu_supports() -> None:
    nvml = Nvml(
        Device("GPU-a", mig=[1, 0], persistence=0, computing=[Process(9, 1), Process(7, 2)]),
        Device("GPU-b", mig=[0, 1], persistence=None),
        Device("GPU-c"),
    )
    found = module._gpu_details(nvml)
    assert (found["error"], found["driver"], found["cuda"]) == ("", "580.95.05", "13.1")
    assert [(gpu["mig"], gpu["persistence"]) for gpu in found["gpus"]] == [
        (True, False),
        (False, None),
        (None, True),
    ]
    assert found["gpus"][0]["processes"] == [(7, 2), (9, 1)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (module._list_gpus, []),
        (module._free_memory, {}),
        (module._memory_by_process, {}),
        (module._gpu_use, []),
    ],
)
def test_without_nvml_there_is_no_gpu(question: Callable[[Any], Any], answer: object) -> None:
    assert question(None) == answer


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("raise OSError('no libnvidia-ml.so.1')", "no libnvidia-ml.so.1"),
        ("def nvmlInit(): raise KeyError()", "KeyError()"),
        ("def nvmlInit(): pass", "it did not answer at first, and does now"),
    ],
)
def test_why_there_is_no_nvml_is_told(
    library: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(library)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    try:
        assert module._gpu_details(None) == {"error": why}
    finally:
        sys.modules.pop("pynvml", None)


def test_it_outlives_a_terminals_signals_and_ends_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('none here')")
    paths = [str(tmp_path), *filter(None, sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", module.__name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.stdin.write("gpus\n")  # once it has answered, it is ready
            process.stdin.flush()
            assert process.stdout.readline() == "[]\n"
            process.send_signal(number)
        out, err = process.communicate("free\nmemory\n", timeout=30)
    assert (process.returncode, out, err) == (0, "{}\n{}\n", "no NVML: none here\n")


def test_one_whose_supervisor_is_gone_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", module.__name__, str(os.getppid())],  # not its parent
        input="gpus\n",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stdout) == (1, "")
