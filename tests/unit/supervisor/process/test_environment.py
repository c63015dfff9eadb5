from __future__ import annotations

import os

import pytest

from servekit.config.engines.options import KINDS
from servekit.supervisor.process.environment import (
    THREADS,
    for_gateway,
    for_remote_worker,
    for_worker,
)
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.system.gpu.gpus import Gpu

BASE = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "7"}
KIND = KINDS["transformers"]
ON_GPU = Assignment("m", 0, (Gpu(1, "GPU-aa", "H200", 1, 1),), None)
ON_CPU = Assignment("m", 0, (), 3)


def test_a_gpu_worker_is_pinned_by_uuid() -> None:
    env = for_worker(BASE, ON_GPU, {}, "x", KIND)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-aa"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["NCCL_DEBUG"] == "INFO"


def test_one_on_several_gpus_is_pinned_to_all_of_them() -> None:
    gpus = tuple(Gpu(index, f"GPU-{index}", "H200", 1, 1) for index in (1, 3))
    env = for_worker(BASE, Assignment("m", 0, gpus, None), {}, "x", KIND)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-3"


def test_an_engine_may_need_indexes_and_has_variables_of_its_own() -> None:
    env = for_worker(BASE, ON_GPU, {"VLLM_NO_USAGE_STATS": "0"}, "x", KINDS["vllm"])
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert env["VLLM_NO_USAGE_STATS"] == "0"  # the file's own win


def test_a_cpu_worker_sees_no_gpu_and_has_its_share_of_threads() -> None:
    env = for_worker(BASE, ON_CPU, {}, "x", KIND)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "3"


def test_the_model_s_own_variables_win_but_never_over_the_pin() -> None:
    extra = {"OMP_NUM_THREADS": "1", "HF_HOME": "/m", "CUDA_VISIBLE_DEVICES": "5"}
    env = for_worker(BASE, ON_CPU, extra, "x", KIND)
    assert (env["OMP_NUM_THREADS"], env["HF_HOME"]) == ("1", "/m")
    assert env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("base", "place", "extra", "threads"),
    [
        ({}, ON_GPU, {}, {}),
        ({}, ON_CPU, {}, dict.fromkeys(THREADS, "3")),
        ({"OMP_NUM_THREADS": "7"}, ON_GPU, {}, {"OMP_NUM_THREADS": "7"}),
        # a share of MKL's would outrank what was said of OpenMP's
        ({"OMP_NUM_THREADS": "7"}, ON_CPU, {}, {"OMP_NUM_THREADS": "7"}),
        ({"OMP_NUM_THREADS": "7"}, ON_CPU, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_a_worker_on_another_node_has_our_threads_and_nothing_else_of_ours(
    base: dict[str, str], place: Assignment, extra: dict[str, str], threads: dict[str, str]
) -> None:
    env = for_remote_worker({**base, "PATH": "/bin", "NCCL_DEBUG": "INFO"}, place, extra, KIND)
    assert {name: env[name] for name in THREADS if name in env} == threads
    assert not {"PATH", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} & env.keys()
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_children_read_files_as_utf_8_in_any_locale() -> None:
    base = {**BASE, "LC_ALL": "zh_CN.GB18030", "PYTHONUTF8": "0"}
    for env in (for_gateway(base, "x"), for_worker(base, ON_CPU, {}, "x", KIND)):
        assert env["PYTHONUTF8"] == "1"
    assert for_worker(base, ON_CPU, {"PYTHONUTF8": "0"}, "x", KIND)["PYTHONUTF8"] == "0"


def test_a_gateway_sees_no_gpu() -> None:
    env = for_gateway(BASE, "x")
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_nothing_given_is_edited() -> None:
    base, before = dict(BASE), dict(os.environ)
    for_worker(base, ON_GPU, {"A": "b"}, "x", KIND)
    for_gateway(base, "x")
    assert base == BASE
    assert dict(os.environ) == before
