"""What a worker holds of its GPUs against what it claims."""

from __future__ import annotations

import os

import structlog

from servekit.protocol.control.ray_messages import Measured, RemoteGpu
from servekit.protocol.messages import GpuStatus
from servekit.supervisor.scheduling.gpu_admission import GpuAdmission, NvmlReading
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers import gpu_memory
from servekit.supervisor.workers.gpu_memory import Entry, GpuMemory, RemoteGpus
from servekit.system.gpu.gpus import Gpu
from tests.polling import poll_async

GIB = 2**30
GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100 * GIB, 100 * GIB) for i in range(3))


def of_two() -> tuple[GpuMemory, GpuReservations]:
    ledger = GpuReservations(GPUS)
    place = Assignment("a", 0, GPUS[:2], None, (40 * GIB, 40 * GIB))
    gpu = GpuMemory(place, GPUS, Entry(GpuAdmission(ledger), (1, 2)), lambda what: None)
    gpu.set_pid(os.getpid())
    ledger.reserve("a/0", {"GPU-0": 40 * GIB, "GPU-1": 40 * GIB})
    return gpu, ledger


def test_within_its_claim_there_is_nothing_to_say() -> None:
    gpu, ledger = of_two()
    assert gpu.need_bytes == {"GPU-0": 1, "GPU-1": 2}
    gpu.update_figures({os.getpid(): {"GPU-0": 40 * GIB + 2**20, "GPU-1": 3 * GIB}})
    assert (gpu.alert, gpu.held_bytes) == ("", 43 * GIB + 2**20)
    assert ledger.held_bytes("a/0") == {"GPU-0": 40 * GIB + 2**20, "GPU-1": 3 * GIB}


def test_excess_and_strays_are_told_apart() -> None:
    gpu, _ = of_two()
    gpu.update_figures({os.getpid(): {"GPU-0": 50 * GIB, "GPU-1": 42 * GIB, "GPU-2": 2**30}})
    assert gpu.excess == (
        "holds 50.0 GiB of GPU 0 (H200), where it claims 40.0 GiB and 42.0 GiB of GPU 1 (H200), "
        "where it claims 40.0 GiB"
    )
    assert gpu.stray == "holds 1.0 GiB on GPU 2 (H200), which is not its own"
    assert gpu.alert == f"{gpu.stray}; {gpu.excess}"
    gpu.reset_figures()
    assert (gpu.pid, gpu.alert, gpu.by_gpu) == (0, "", {})


def test_excess_is_logged_once_as_long_as_it_lasts() -> None:
    gpu, _ = of_two()
    too_much, enough = ({os.getpid(): {"GPU-0": size * GIB}} for size in (50, 40))
    with structlog.testing.capture_logs() as logs:
        for told in (too_much, too_much, enough, too_much):
            gpu.update_figures(told)
    assert [entry["event"] for entry in logs] == ["gpu_memory_over_claim"] * 2
    assert logs[0]["child"] == "a/0"


async def test_what_was_a_pid_of_its_last_life_may_be_anybodys_in_its_next() -> None:
    ledger, held = GpuReservations(GPUS), {os.getpid(): {"GPU-0": 5 * GIB}}
    free = {gpu.uuid: gpu.total_bytes for gpu in GPUS}
    gate = GpuAdmission(ledger, lambda: NvmlReading(free, held))
    place = Assignment("a", 0, GPUS[:1], None, (40 * GIB,))
    gpu = GpuMemory(place, GPUS, Entry(gate, (1,)), lambda what: None)
    for pid, reused in ((os.getpid(), False), (2**22 + 1, True)):
        held.clear()  # the last one's memory is gone
        assert await gpu.await_admission() == ""
        gpu.set_pid(pid)
        if reused:
            held[os.getpid()] = {"GPU-0": 5 * GIB}
        gpu.reset_figures()
        gpu.end_admission()
        await poll_async("the claim is given up", lambda: not ledger.claim_of("a/0"))


# ---------------------------------------------------------------- on another node

NODE = "10.0.0.5"
THERE = tuple(GpuStatus(i, f"GPU-{i}", "H200", 100 * GIB, 30 * GIB, 0.5) for i in range(2))
OWN = gpu_memory.make_slot((RemoteGpu(1, "GPU-1", "H200", 100 * GIB),), NODE)


def away() -> GpuMemory:
    gpu = GpuMemory(Assignment("a", 0, (), None, elsewhere=1), (), None, lambda what: None)
    gpu.set_pid(7)
    return gpu


def told(pid: int, held: dict[str, int], gpus: tuple[GpuStatus, ...] = THERE) -> RemoteGpus:
    return gpu_memory.read_measurements(OWN, NODE, Measured("a/0", gpus, pid, held))


def test_what_a_worker_holds_on_another_node_is_told_by_that_node() -> None:
    gpu = away()
    gpu.update_figures(told(7, {"GPU-1": 30 * GIB, "GPU-0": GIB}))
    assert (gpu.by_gpu, gpu.held_bytes) == ({"GPU-1": 30 * GIB}, 31 * GIB)
    assert gpu.alert == "holds 1.0 GiB on GPU 0 (H200) on 10.0.0.5, which is not its own"
    assert [(one.uuid, one.node, one.used_bytes) for one in gpu.in_use] == [
        ("GPU-1", NODE, 30 * GIB)
    ]
    gpu.update_figures(told(7, {"GPU-1": 30 * GIB}))
    assert gpu.alert == ""


def test_what_is_told_of_a_process_that_has_died_is_not_its_successors() -> None:
    gpu = away()
    gpu.update_figures(told(6, {"GPU-1": 30 * GIB, "GPU-0": GIB}))
    assert (gpu.by_gpu, gpu.held_bytes, gpu.alert) == ({"GPU-1": 0}, 0, "")
    assert [gpu.uuid for gpu in gpu.own] == ["GPU-1"]


def test_a_node_whose_nvml_is_silent_shows_no_gpu_and_a_place_that_is_lost_neither() -> None:
    gpu = away()
    gpu.update_figures(told(7, {}, gpus=()))
    assert (gpu.in_use, gpu.held_bytes, gpu.alert) == ((), 0, "")
    assert [str(gpu) for gpu in gpu.own] == ["GPU 1 (H200) on 10.0.0.5"]
    gpu.update_figures(RemoteGpus())
    assert (gpu.own, gpu.claims, gpu.by_gpu) == ((), {}, {})
