"""The gate: turns, claims and memory, with NVML's figures made up and processes of our own."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from servekit.supervisor.scheduling.gpu_admission import GpuAdmission, LoadQueue, NvmlReading
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import CONTEXT_BYTES, Assignment
from servekit.system.gpu.gpus import Gpu, Slot
from tests.polling import poll_async

GIB = 2**30
GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100 * GIB, 100 * GIB) for i in range(2))


class Nvml:
    """Two GPUs, and who holds how many GiB of which."""

    def __init__(self) -> None:
        self.held: dict[int, dict[str, int]] = {}
        self.answers = True

    def read(self) -> NvmlReading:
        if not self.answers:
            return NvmlReading({}, {})
        holdings = {
            pid: {uuid: size * GIB for uuid, size in held.items()}
            for pid, held in self.held.items()
        }
        taken = {g.uuid: sum(h.get(g.uuid, 0) for h in holdings.values()) for g in GPUS}
        return NvmlReading({g.uuid: g.total_bytes - taken[g.uuid] for g in GPUS}, holdings)


@dataclass
class Worker:
    name: str
    place: Assignment
    pid: int = 0
    told: list[str] = field(default_factory=list)
    lacked: list[Mapping[str, int]] = field(default_factory=list)

    @property
    def need_bytes(self) -> Mapping[str, int]:
        return {g.uuid: c for g, c in zip(self.place.gpus, self.place.claims, strict=True)}

    def waits(self, what: str, lacking: Mapping[str, int] | None = None) -> None:
        self.told.append(what)
        self.lacked.append(lacking or {})


def worker(name: str, slot: Slot, *claims: int) -> Worker:
    return Worker(f"{name}/0", Assignment(name, 0, slot, None, tuple(c * GIB for c in claims)))


@pytest.fixture
def nvml() -> Nvml:
    return Nvml()


@pytest.fixture
def gate(nvml: Nvml) -> GpuAdmission:
    return GpuAdmission(GpuReservations(GPUS), nvml.read, patience_s=0.5)


@pytest.fixture
def process() -> Iterator[int]:
    """One that leads a group of its own, as workers do."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield child.pid
    child.kill()
    child.wait()


async def test_loads_that_share_a_gpu_take_turns(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    first, second = worker("a", GPUS[:1], 40), worker("b", GPUS, 40, 40)
    elsewhere = worker("c", GPUS[1:], 40)
    assert await gate.await_admission(first) == ""
    entering = asyncio.create_task(gate.await_admission(second))
    await poll_async("the gate says so", lambda: bool(second.told))
    assert second.told == ["waits for a/0 on GPU 0 (H200)"]
    assert await gate.await_admission(elsewhere) == "", "it waits for nobody who loads elsewhere"
    gate.loaded("c/0")
    first.pid, nvml.held[process] = process, {"GPU-0": 40}
    assert not entering.done()
    gate.loaded("a/0")
    assert await entering == ""
    assert second.told[-1] == ""
    assert gate.ledger.holders("GPU-0") == {"a/0": 40 * GIB, "b/0": 40 * GIB}


async def test_one_that_fetches_lets_others_load_but_not_into_what_it_was_promised(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    first, second = worker("a", GPUS[:1], 60), worker("b", GPUS[:1], 40)
    third = worker("c", GPUS[:1], 1)
    assert await gate.await_admission(first) == ""
    first.pid = process
    gate.track_load("a/0", from_files=False)
    gate.track_load("a/0", from_files=False)
    nvml.held[1] = {"GPU-0": 20}
    assert "80.0 GiB free, less 60.0 GiB that others were promised" in await gate.await_admission(
        second
    )
    nvml.held[1] = {}
    assert await gate.await_admission(second) == ""
    gate.track_load("a/0", from_files=True)
    gate.left("b/0", ())
    entering = asyncio.create_task(gate.await_admission(third))
    await poll_async("the gate says so", lambda: third.told == ["waits for a/0 on GPU 0 (H200)"])
    gate.track_load("a/0", from_files=True)
    gate.loaded("a/0")
    assert await entering == ""


async def test_memory_promised_to_another_is_not_free(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    first, second = worker("a", GPUS[:1], 60), worker("b", GPUS[:1], 40)
    assert await gate.await_admission(first) == ""
    gate.loaded("a/0")
    first.pid, nvml.held[process] = process, {"GPU-0": 10}
    nvml.held[1] = {"GPU-0": 20}
    reason = await gate.await_admission(second)
    assert "70.0 GiB free, less 50.0 GiB that others were promised" in reason
    assert "20.0 GiB too few; pid 1 (" in reason
    assert gate.ledger.holders("GPU-0") == {"a/0": 60 * GIB}
    nvml.held[process] = {"GPU-0": 30}
    del nvml.held[1]
    assert await gate.await_admission(second) == ""


async def test_it_waits_for_memory_and_says_so(gate: GpuAdmission, nvml: Nvml) -> None:
    nvml.held[1] = {"GPU-0": 70}
    one = worker("a", GPUS[:1], 40)
    entering = asyncio.create_task(gate.await_admission(one))
    await poll_async("the gate says so", lambda: bool(one.told))
    assert one.told[0].startswith("waits for memory: GPU 0 (H200) has 30.0 GiB free")
    assert one.lacked[0] == {"GPU-0": 10 * GIB}
    assert gate.ledger.room("GPU-0") == 60 * GIB, "it has its claim while it waits"
    nvml.held[1] = {"GPU-0": 60}
    assert await entering == ""
    assert one.lacked[-1] == {}


async def test_what_does_not_fit_the_ledger_is_refused_with_the_arithmetic(
    gate: GpuAdmission,
) -> None:
    assert await gate.await_admission(worker("a", GPUS[:1], 60)) == ""
    gate.loaded("a/0")
    reason = await gate.await_admission(worker("b", GPUS[:1], 41))
    assert reason.endswith("60.0 GiB a/0's, and it claims 41.0 GiB, 1.0 GiB too much")
    assert await gate.await_admission(worker("c", GPUS[:1], 40)) == "", "and has left no trace"


async def test_a_claim_stands_until_the_memory_is_gone(gate: GpuAdmission, nvml: Nvml) -> None:
    first, second = worker("a", GPUS[:1], 60), worker("b", GPUS[:1], 60)
    assert await gate.await_admission(first) == ""
    nvml.held[7] = {"GPU-0": 50}
    gate.left("a/0", {7})
    assert gate.ledger.holders("GPU-0") == {"a/0": 60 * GIB}
    entering = asyncio.create_task(gate.await_admission(second))
    await poll_async(
        "the gate says so", lambda: any("60.0 GiB a/0's" in told for told in second.told)
    )
    del nvml.held[7]
    assert await entering == ""
    assert gate.ledger.holders("GPU-0") == {"b/0": 60 * GIB}


async def test_the_pid_of_one_that_has_ended_may_be_that_of_the_next(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    first, second = worker("a", GPUS[:1], 40), worker("b", GPUS[:1], 40)
    assert await gate.await_admission(first) == ""
    nvml.held[process] = {"GPU-0": 40}
    gate.left("a/0", {process})
    again = asyncio.create_task(gate.await_admission(first))
    await poll_async("the gate says so", lambda: any("has ended" in told for told in first.told))
    del nvml.held[process]
    assert await again == ""
    first.pid, nvml.held[process] = process, {"GPU-0": 40}
    gate.loaded("a/0")
    assert await gate.await_admission(second) == ""


async def test_a_claim_is_given_back_also_where_no_thread_could_be_started_for_a_while(
    gate: GpuAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worker("a", GPUS[:1], 60)
    assert await gate.await_admission(first) == ""
    tries: list[None] = []

    async def to_thread(*work: object) -> bool:
        tries.append(None)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", to_thread)
        gate.left("a/0", {7})
        await poll_async("it has looked", lambda: len(tries) > 1)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 60 * GIB}
    await poll_async("it is given back", lambda: not gate.ledger.claim_of("a/0"))


async def test_its_next_life_waits_for_the_memory_of_its_last(
    gate: GpuAdmission, nvml: Nvml
) -> None:
    one = worker("a", GPUS[:1], 40)
    assert await gate.await_admission(one) == ""
    nvml.held[7] = {"GPU-0": 40}
    gate.left("a/0", {7})
    entering = asyncio.create_task(gate.await_admission(one))
    await poll_async(
        "the gate says so",
        lambda: any("still held by a worker of ours" in told for told in one.told),
    )
    del nvml.held[7]
    assert await entering == ""
    assert gate.ledger.holders("GPU-0") == {"a/0": 40 * GIB}


async def test_one_that_is_told_to_end_while_it_waits_leaves_nothing(gate: GpuAdmission) -> None:
    first, second = worker("a", GPUS[:1], 40), worker("b", GPUS[:1], 40)
    assert await gate.await_admission(first) == ""
    entering = asyncio.create_task(gate.await_admission(second))
    await poll_async("the gate says so", lambda: bool(second.told))
    entering.cancel()
    await asyncio.wait((entering,))
    gate.left("b/0", ())
    gate.left("a/0", ())
    assert gate.ledger.holders("GPU-0") == {}
    assert await gate.await_admission(worker("c", GPUS[:1], 100)) == ""


async def test_asleep_it_claims_what_it_still_holds(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    one, other = worker("a", GPUS[:1], 60), worker("b", GPUS[:1], 60)
    assert await gate.await_admission(one) == ""
    gate.loaded("a/0")
    one.pid, nvml.held[process] = process, {"GPU-0": 2}
    await gate.fell_asleep(one)
    assert gate.ledger.holders("GPU-0") == {"a/0": 2 * GIB}
    assert await gate.await_admission(other) == ""
    gate.loaded("b/0")
    assert (await gate.await_admission(one)).endswith(
        "60.0 GiB b/0's, and it claims 60.0 GiB, 20.0 GiB too much"
    )
    assert gate.ledger.holders("GPU-0") == {"a/0": 2 * GIB, "b/0": 60 * GIB}, "it sleeps on"
    gate.left("b/0", ())
    nvml.held[1] = {"GPU-0": 40}
    assert await gate.await_admission(one) == "", "58 more are free"
    assert gate.ledger.holders("GPU-0") == {"a/0": 60 * GIB}


async def test_asleep_it_claims_what_is_used_where_its_processes_cannot_be_seen(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    """As in a container. Others hold no more than they claim: the rest is its own."""
    one, other = worker("a", GPUS[:1], 60), worker("b", GPUS[:1], 20)
    for guest in (one, other):
        assert await gate.await_admission(guest) == ""
        gate.loaded(guest.name)
    one.pid, nvml.held[1] = process, {"GPU-0": 30}
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 10 * GIB}
    nvml.held[1] = {"GPU-0": 5}
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": CONTEXT_BYTES}, "a context there is in any case"
    nvml.held[1] = {"GPU-0": 99}
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 60 * GIB}
    gate.ledger.measured("a/0", {"GPU-0": 50 * GIB})  # it could be seen, and has nothing now
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 0}


async def test_one_that_is_not_seen_by_a_silent_driver_sleeps_with_its_claim(
    gate: GpuAdmission, nvml: Nvml, process: int
) -> None:
    one = worker("a", GPUS[:1], 60)
    assert await gate.await_admission(one) == ""
    one.pid, nvml.answers = process, False
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 60 * GIB}


async def test_one_that_has_died_meanwhile_did_not_fall_asleep(nvml: Nvml, process: int) -> None:
    one = worker("a", GPUS[:1], 60)

    def read() -> NvmlReading:
        found = nvml.read()
        one.pid = two if is_asleep else process
        return found

    is_asleep, two = False, process + 1
    gate = GpuAdmission(GpuReservations(GPUS), read)
    assert await gate.await_admission(one) == ""
    gate.loaded("a/0")
    is_asleep, nvml.held[process] = True, {"GPU-0": 2}
    await gate.fell_asleep(one)
    assert gate.ledger.claim_of("a/0") == {"GPU-0": 60 * GIB}, "it is its next life's"


async def test_a_driver_that_does_not_answer_holds_nobody_up(
    gate: GpuAdmission, nvml: Nvml
) -> None:
    nvml.answers = False
    assert await gate.await_admission(worker("a", GPUS[:1], 40)) == ""


async def test_on_the_cpu_there_is_no_gate(gate: GpuAdmission) -> None:
    assert await gate.await_admission(worker("a", ())) == ""
    gate.left("a/0", {1})
    assert not gate.ledger.claim_of("a/0")


async def test_one_that_ends_while_it_stands_aside_takes_no_gpu_any_more() -> None:
    queue = LoadQueue()
    await queue.lock_gpus("a/0", GPUS)
    queue.step_aside("a/0", GPUS)
    queue.release_gpus("a/0")
    queue.step_back("a/0")  # a report that comes too late
    await asyncio.sleep(0)
    told: list[str] = []
    await asyncio.wait_for(queue.lock_gpus("b/0", GPUS, told.append), 30)
    assert told == []
    queue.release_gpus("b/0")
    await queue.lock_gpus("a/0", GPUS)  # its next life
    queue.step_aside("a/0", GPUS)
    await asyncio.wait_for(queue.lock_gpus("b/0", GPUS, told.append), 30)
    assert told == []
