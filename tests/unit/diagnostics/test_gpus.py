"""What is said of GPUs, of answers as NVML and torch give them; no GPU is needed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from servekit.diagnostics.finding import Finding
from servekit.diagnostics.gpus import against_torch, check_gpu, check_gpus, describe_process

GIB = 2**30
GPU: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-aa-01",
    "name": "NVIDIA H100",
    "total_bytes": 80 * GIB,
    "free_bytes": 80 * GIB,
    "compute_mode": "default",
    "mig": False,
    "persistence": True,
    "processes": [],
}
SECOND = {**GPU, "index": 1, "uuid": "GPU-bb-02"}
DETAILS = {"error": "", "driver": "580.95", "cuda": "13.0", "gpus": [GPU, SECOND]}
TORCH = {"error": "", "cuda": "13.0", "reason": "", "gpus": ["aa-01", "bb-02"]}


def worst(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def of(**changes: Any) -> Finding:
    [found] = worst(list(check_gpu({**GPU, **changes}, lambda pid: "python train.py")))
    return found


def test_a_healthy_machine_is_ok() -> None:
    found = list(check_gpus(True, DETAILS, TORCH, None))
    assert not worst(found)
    assert found[0].said == "driver 580.95, for CUDA up to 13.0"
    assert found[-1].said == "torch finds and uses the same 2 as NVML"


def test_no_driver_is_no_error() -> None:
    [found] = check_gpus(False, None, TORCH, None)
    assert found.level == "ok"


@pytest.mark.parametrize("details", [None, {"error": "Driver/library version mismatch"}])
def test_a_driver_that_does_not_answer_is_an_error(details: Any) -> None:
    [found] = check_gpus(True, details, TORCH, None)
    assert found.level == "error" and "nvidia-smi" in found.said


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"compute_mode": "exclusive"}, "warning", "exclusive mode"),
        ({"compute_mode": "prohibited"}, "error", "nvidia-smi -i 0 -c DEFAULT"),
        ({"mig": True}, "warning", "MIG"),
        ({"persistence": False}, "warning", "nvidia-smi -i 0 -pm 1"),
        (
            {"free_bytes": 70 * GIB, "processes": [[7, 10 * GIB]]},
            "warning",
            "pid 7 (python train.py",
        ),
        ({"free_bytes": 70 * GIB}, "warning", "10.0 GiB are held by processes that cannot be seen"),
    ],
)
def test_what_is_in_the_way_is_said(changes: dict[str, Any], level: str, said: str) -> None:
    found = of(**changes)
    assert found.level == level and said in found.said


def test_what_this_gpu_does_not_know_is_no_warning() -> None:
    unknown = {**GPU, "mig": None, "persistence": None, "compute_mode": None}
    assert not worst(list(check_gpu(unknown)))


def test_an_instances_own_worker_is_no_stranger() -> None:
    gpu = {**GPU, "free_bytes": 70 * GIB, "processes": [[7, 10 * GIB]]}
    assert not worst(list(check_gpu(gpu, lambda pid: "servekit, python -m servekit.worker")))


def test_whose_a_process_is() -> None:
    assert "pytest" in describe_process(os.getpid()) or "python" in describe_process(os.getpid())
    assert describe_process(2**22 + 1) == "another user's or container's"


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"cuda": None, "gpus": []}, "warning", "built for the CPU only"),
        ({"cuda": "14.1", "gpus": []}, "error", "update the driver, or install an older torch"),
        ({"reason": "CUDA error: device busy", "gpus": []}, "error", "device busy"),
        ({"gpus": ["aa-01"]}, "error", "1 of 2 GPUs; not GPU 1 (NVIDIA H100)"),
        ({"error": "ImportError: x"}, "error", "cannot be imported"),
    ],
)
def test_torch_against_nvml(changes: dict[str, Any], level: str, said: str) -> None:
    found = against_torch(DETAILS, {**TORCH, **changes})
    assert found.level == level and said in found.said


def test_gpus_that_the_environment_hides_are_not_missed() -> None:
    assert against_torch(DETAILS, {**TORCH, "gpus": ["bb-02"]}, "1").level == "ok"
