"""The facts in bytes: what models hold awake and asleep, and what is free."""

from __future__ import annotations

import pytest

from servekit.supervisor.model_swap import memory_accounting
from servekit.supervisor.model_swap.memory_accounting import CPU, RAM
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu
from tests.unit.supervisor.made_up_deployment import GIB, MadeUp, config, info

GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100 * GIB, 100 * GIB) for i in range(2))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "total_memory_bytes", lambda: 50 * GIB)
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: 30 * GIB)


def test_a_claim_is_what_the_file_says_or_all_of_it() -> None:
    both = (GPUS[:1], GPUS[1:])
    assert memory_accounting.claims(config(memory="10GiB"), both, None) == {
        "GPU-0": 10 * GIB,
        "GPU-1": 10 * GIB,
    }
    assert memory_accounting.claims(config(), both[:1], "20GiB") == {"GPU-0": 80 * GIB}
    assert memory_accounting.claims(config(memory="10GiB"), (GPUS[:1],) * 2, None) == {
        "GPU-0": 20 * GIB
    }
    assert memory_accounting.claims(config(memory="40%"), ((), ()), None) == {CPU: 40 * GIB}
    assert memory_accounting.claims(config(), ((),), None) == {}


def test_asleep_its_weights_are_in_the_hosts_memory() -> None:
    claim = {"GPU-0": 40 * GIB}
    deployment = MadeUp(config(), planned=(GPUS[:1],))
    deployment.info = info(parameters=7 * 2**30, dtype="bfloat16")
    kept = {"GPU-0": GIB}
    assert memory_accounting.asleep(deployment.real, claim, kept) == {"GPU-0": GIB, RAM: 14 * GIB}
    deployment.planned *= 2
    assert memory_accounting.asleep(deployment.real, claim, {})[RAM] == 28 * GIB
    deployment.info = info(parameters=2**30, dtype="float32")
    assert memory_accounting.asleep(deployment.real, claim, {})[RAM] == 8 * GIB
    deployment.info = info(weights_bytes=3 * GIB)  # a server's: its files are measured
    assert memory_accounting.asleep(deployment.real, claim, {})[RAM] == 6 * GIB
    deployment.info = None  # it was never here: what it would take at most
    assert memory_accounting.asleep(deployment.real, claim, {})[RAM] == 40 * GIB


def test_asleep_on_the_cpu_it_holds_what_is_resident() -> None:
    deployment = MadeUp(config())
    deployment.have("asleep", "asleep")
    for replica in deployment.replicas:
        replica.rss_bytes = GIB
    assert memory_accounting.asleep(deployment.real, {CPU: 10 * GIB}, {}) == {CPU: 2 * GIB}
    assert memory_accounting.asleep(deployment.real, {CPU: GIB}, {}) == {CPU: GIB}
    assert memory_accounting.asleep(deployment.real, {}, {}) == {}


def test_what_its_workers_keep_is_what_the_ledger_has() -> None:
    ledger, deployment = GpuReservations(GPUS), MadeUp(config())
    deployment.have("asleep", "asleep")
    ledger.reserve("a/0", {"GPU-0": GIB, "GPU-1": GIB})
    ledger.reserve("a/1", {"GPU-0": 2 * GIB})
    ledger.reserve("b/0", {"GPU-0": 5 * GIB})
    assert memory_accounting.kept(deployment.real, ledger) == {"GPU-0": 3 * GIB, "GPU-1": GIB}


def test_free_is_what_nobody_holds_and_nobody_was_promised() -> None:
    ledger = GpuReservations(GPUS, "10GiB")
    held = [{"GPU-0": 40 * GIB}, {CPU: 20 * GIB, RAM: 99 * GIB}, {"GPU-0": 10 * GIB}]
    free = memory_accounting.free(GPUS, "10GiB", held, ledger)
    assert free == {"GPU-0": 40 * GIB, "GPU-1": 90 * GIB, CPU: 30 * GIB, RAM: 29 * GIB}
    ledger.reserve("gone/0", {"GPU-1": 60 * GIB})  # its memory is not free yet
    assert memory_accounting.free(GPUS, "10GiB", held, ledger)["GPU-1"] == 30 * GIB
    over = [{"GPU-0": 95 * GIB}]
    assert memory_accounting.free(GPUS, "10GiB", over, ledger)["GPU-0"] == -5 * GIB


def test_what_workers_that_wait_do_not_find() -> None:
    deployment = MadeUp(config())
    deployment.have("starting", "starting", "ready")
    assert memory_accounting.missing_for_loading(deployment.real) == {}
    for replica in deployment.replicas[:2]:
        replica.gpu.lacking = {"GPU-0": GIB}
    assert memory_accounting.missing_for_loading(deployment.real) == {"GPU-0": 2 * GIB}
