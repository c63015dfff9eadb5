from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.protocol.messages import GpuStatus
from servekit.system.gpu.gpu_memory_audit import find_strays, held_bytes, stray_memory
from servekit.system.gpu.gpus import Gpu, find_gpus, match_gpu, restrict_gpus
from tests.integration.made_up_gpus import GIB, MadeUpGpus

GPUS = tuple(
    Gpu(i, uuid, "H200", 10, 10) for i, uuid in enumerate(["GPU-aa01", "GPU-aa02", "GPU-bb03"])
)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        ("GPU-bb", [2]),
        ("GPU-aa02, 0", [1, 0]),
        ("GPU-aa", []),  # ambiguous
        ("1,9,0", [1]),  # CUDA ignores all after the first bad one
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    visible: str | None, indexes: list[int]
) -> None:
    assert [gpu.index for gpu in restrict_gpus(GPUS, visible)] == indexes


def test_match_takes_index_uuid_and_its_unambiguous_start() -> None:
    assert match_gpu(GPUS, 1) is GPUS[1]
    assert match_gpu(GPUS, "gpu-BB03") is GPUS[2]
    assert match_gpu(GPUS, "GPU-b") is GPUS[2]
    assert match_gpu(GPUS, "GPU-a") is None
    assert match_gpu(GPUS, "") is None
    assert match_gpu(GPUS, 3) is None


def test_a_hidden_index_stays_hidden() -> None:
    left = restrict_gpus(GPUS, "2")
    assert match_gpu(left, 2) is GPUS[2]
    assert match_gpu(left, 0) is None


def test_looking_for_gpus_never_imports_torch() -> None:
    code = (
        "import sys; from servekit.system.gpu.gpus import find_gpus, gpu_memory_by_pid;"
        "find_gpus(); gpu_memory_by_pid(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_use_is_told_of_each_gpu_as_far_as_it_is_known(tmp_path: Path) -> None:
    """By the process that reads NVML, on made-up GPUs of which the second tells no utilisation."""
    gpus = MadeUpGpus(tmp_path, 2)
    gpus.hold({1: 25})
    with (tmp_path / "gpus" / "pynvml.py").open("a") as nvml:
        nvml.write(
            "def nvmlDeviceGetUtilizationRates(handle):\n"
            "    if handle: raise NVMLError('Not Supported')\n"
            "    return Thing(gpu=40)\n"
        )
    command = [sys.executable, "-m", "servekit.system.gpu.nvml_process", str(os.getpid())]
    env = {**os.environ, **gpus.env}
    run = subprocess.run(
        command, input="use\n", capture_output=True, text=True, env=env, timeout=30, check=True
    )
    told = [GpuStatus(**gpu) for gpu in json.loads(run.stdout)]
    assert [(one.index, one.uuid, one.utilisation) for one in told] == [
        (0, "GPU-0", 0.4),
        (1, "GPU-1", None),
    ]
    assert [(one.used_bytes, one.total_bytes) for one in told] == [(25 * GIB, 100 * GIB)] * 2


def test_finds_what_nvml_finds() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        count = 0
    found = find_gpus()
    assert len(found) == count
    assert all(gpu.uuid.startswith("GPU-") and gpu.total_bytes > 0 for gpu in found)


HOLDINGS = {10: {"GPU-aa01": 3 * 2**20}, 11: {"GPU-aa02": 2**20}, 12: {"GPU-bb03": 5}}


def test_memory_on_its_own_gpu_is_no_stray() -> None:
    assert stray_memory({10}, {"GPU-aa01"}, HOLDINGS, GPUS) == ""
    assert stray_memory({99}, set(), HOLDINGS, GPUS) == ""


def test_a_stray_gpu_is_named() -> None:
    said = stray_memory({10, 11}, {"GPU-aa02"}, HOLDINGS, GPUS)
    assert said == "holds 3 MiB on GPU 0 (H200), which is not its own"


def test_what_all_processes_of_a_worker_hold_is_summed_by_gpu() -> None:
    holdings = {10: {"GPU-aa01": 3}, 11: {"GPU-aa01": 4, "GPU-aa02": 5}, 12: {"GPU-aa01": 9}}
    assert find_strays({10, 11}, {"GPU-aa02"}, holdings) == {"GPU-aa01": 7}


def test_a_cpu_worker_may_hold_nothing() -> None:
    assert "GPU 1 (H200)" in stray_memory({11}, set(), HOLDINGS, GPUS)


def test_held_bytes_are_summed_over_processes_and_gpus() -> None:
    assert held_bytes({10, 11, 99}, HOLDINGS) == 4 * 2**20
