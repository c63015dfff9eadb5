"""The process that reads NVML: with a stand-in for the driver's library, which no machine without
a GPU has, and with drivers that hang and break. Real GPUs are seen by `python -m tests.gpu`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.system import procfs
from servekit.system.gpu.nvml_client import Driver

#: NVML as it answers on a machine with two GPUs, of which the second has fallen off the bus.
PYNVML = """
class NVMLError(Exception): pass
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError("GPU is lost")
    return index
nvmlMemory_v2 = 2
def nvmlDeviceGetMemoryInfo(handle, version=None): return Thing(total=100, free=60, reserved=0)
def nvmlDeviceGetUUID(handle): return "GPU-aa"
def nvmlDeviceGetName(handle): return "H200"
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [Thing(pid=7, usedGpuMemory=30), Thing(pid=8, usedGpuMemory=None)]
def nvmlDeviceGetGraphicsRunningProcesses(handle):
    return [Thing(pid=7, usedGpuMemory=10)]
def nvmlSystemGetDriverVersion(): return "580.95"
def nvmlSystemGetCudaDriverVersion(): return 12080
def nvmlDeviceGetComputeMode(handle): return 3
def nvmlDeviceGetPersistenceMode(handle): return 0
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
"""


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.close()


def scripted(drivers: list[Driver], code: str, **times: float) -> Driver:
    driver = Driver([sys.executable, "-c", code], **times)
    drivers.append(driver)
    return driver


def test_what_nvml_says_is_passed_on(
    drivers: list[Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    driver = Driver()
    drivers.append(driver)
    gpu = {"index": 0, "uuid": "GPU-aa", "name": "H200", "total_bytes": 100, "free_bytes": 60}
    assert driver.query("gpus") == [{**gpu, "linked": []}]
    assert driver.query("free") == {"GPU-aa": 60}
    assert driver.query("memory") == {"7": {"GPU-aa": 30}, "8": {"GPU-aa": 0}}
    more = {"compute_mode": "exclusive", "mig": None, "persistence": False}
    assert driver.query("details") == {
        "error": "",
        "driver": "580.95",
        "cuda": "12.8",
        "gpus": [{**gpu, **more, "processes": [[7, 30], [8, 0]]}],
    }


def test_without_a_library_there_is_no_gpu(
    drivers: list[Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("raise OSError('no libnvidia-ml.so.1')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    driver = Driver()
    drivers.append(driver)
    assert driver.query("gpus") == []
    assert driver.query("memory") == {}
    assert driver.query("details") == {"error": "no libnvidia-ml.so.1"}


def test_one_process_answers_many_questions(drivers: list[Driver]) -> None:
    driver = scripted(drivers, "import os\nwhile input(): print(os.getpid(), flush=True)")
    pid = driver.query("gpus")
    assert pid == driver.query("memory")
    driver.close()
    assert procfs.read_process(pid) is None
    assert driver.query("gpus") != pid


def test_one_that_died_is_started_again(drivers: list[Driver]) -> None:
    driver = scripted(drivers, "import os\ninput(); print(os.getpid(), flush=True)")
    first = driver.query("gpus")
    procfs_gone = time.monotonic() + 10
    while (found := procfs.read_process(first)) is not None and found.state != "Z":
        assert time.monotonic() < procfs_gone
    assert driver.query("gpus") not in (None, first)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",  # hangs: the test goes on after `answer_s`
        "print('no json', flush=True); input(); input()",
        "raise SystemExit(1)",
        "print('[', end='', flush=True); import time; time.sleep(600)",  # hangs in mid-answer
    ],
)
def test_a_driver_that_hangs_or_breaks_holds_nobody_up(drivers: list[Driver], code: str) -> None:
    driver = scripted(drivers, code, first_s=0.3, answer_s=0.3, rest_s=600)
    before = time.monotonic()
    assert driver.query("gpus") is None
    assert driver.query("gpus") is None, "and it is not asked again at once"
    assert time.monotonic() - before < 10


#: Answers amiss in its first life, and would answer the next question of it in its own time.
AMISS = """
import json, os, pathlib, sys, time
mark = pathlib.Path({mark!r})
first = not mark.exists()
mark.write_text(str(os.getpid())) if first else None
input()
print("no json" if first else os.getpid(), flush=True)
time.sleep(600)
"""


def test_one_that_failed_is_ended_before_another_is_asked(
    drivers: list[Driver], tmp_path: Path
) -> None:
    """Else what it says late would be taken for the answer to the next question."""
    mark = tmp_path / "pid"
    driver = scripted(drivers, AMISS.format(mark=str(mark)), rest_s=0.0)
    assert driver.query("gpus") is None
    first = int(mark.read_text())
    assert procfs.read_process(first) is None
    assert driver.query("gpus") not in (None, first)


#: Four GPUs, joined in pairs 0-2 and 1-3; memory as newer drivers tell it.
LINKED = """
nvmlMemory_v2, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 2, 0
class NVMLError(Exception): pass
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index): return f"handle {index}"
def nvmlDeviceGetUUID(handle): return f"GPU-{handle[-1]}"
def nvmlDeviceGetName(handle): return "A100"
def nvmlDeviceGetMemoryInfo(handle, version=None):
    if version is None: return Thing(total=100, free=60)
    return Thing(total=100, reserved=3, free=60)
def nvmlDeviceGetP2PStatus(one, other, what):
    if one == "handle 3": raise NVMLError("Not Supported")
    return 0 if (int(one[-1]) - int(other[-1])) % 2 == 0 else 5
"""


def test_links_and_what_the_driver_keeps_are_told(
    drivers: list[Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(LINKED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    driver = Driver()
    drivers.append(driver)
    found = driver.query("gpus")
    assert [gpu["linked"] for gpu in found] == [["GPU-2"], ["GPU-3"], ["GPU-0"], []]
    assert {(gpu["total_bytes"], gpu["free_bytes"]) for gpu in found} == {(97, 60)}
    assert driver.query("free") == dict.fromkeys(["GPU-0", "GPU-1", "GPU-2", "GPU-3"], 60)
