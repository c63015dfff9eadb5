"""The book of GPU memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.supervisor.scheduling.gpu_reservations import GpuReservations, InsufficientMemory
from servekit.system.gpu.gpus import Gpu

GIB = 2**30
GPUS = tuple(Gpu(i, f"GPU-{i}", "H200", 100 * GIB, 100 * GIB) for i in range(2))


def test_what_is_promised_is_nobody_elses() -> None:
    ledger = GpuReservations(GPUS, "10%")
    ledger.reserve("a/0", {"GPU-0": 60 * GIB})
    assert (ledger.room("GPU-0"), ledger.room("GPU-1")) == (30 * GIB, 90 * GIB)
    wants = {"GPU-0": 40 * GIB, "GPU-1": 40 * GIB}
    assert ledger.lacking(wants) == {"GPU-0": 10 * GIB}
    with pytest.raises(InsufficientMemory) as caught:
        ledger.reserve("b/0", wants)
    assert caught.value.lacking_bytes == {"GPU-0": 10 * GIB}
    assert caught.value.message == (
        "there is no room for b/0: of GPU 0 (H200)'s 100.0 GiB, 10.0 GiB the reserve's, 60.0 GiB "
        "a/0's, and it claims 40.0 GiB, 10.0 GiB too much"
    )
    assert ledger.holders("GPU-1") == {}
    ledger.release_claim("a/0")
    ledger.reserve("b/0", wants)
    assert ledger.holders("GPU-0") == {"b/0": 40 * GIB}


def test_a_claim_takes_the_place_of_its_holders_last() -> None:
    ledger = GpuReservations(GPUS)
    ledger.reserve("a/0", {"GPU-0": 90 * GIB})
    ledger.reserve("a/0", {"GPU-0": 95 * GIB})
    assert ledger.room("GPU-0") == 5 * GIB
    with pytest.raises(InsufficientMemory):
        ledger.reserve("a/0", {"GPU-0": 101 * GIB})
    assert ledger.claim_of("a/0") == {"GPU-0": 95 * GIB}


def test_an_unknown_gpu_has_no_room() -> None:
    with pytest.raises(InsufficientMemory, match="there is no GPU GPU-9"):
        GpuReservations(GPUS).reserve("a/0", {"GPU-9": 1})


def test_what_is_measured_promises_nothing_and_tells_excess() -> None:
    ledger = GpuReservations(GPUS)
    ledger.measured("a/0", {"GPU-0": 1})
    assert ledger.held_bytes("a/0") == {}
    ledger.reserve("a/0", {"GPU-0": 10 * GIB})
    ledger.measured("a/0", {"GPU-0": 12 * GIB, "GPU-1": GIB})
    assert ledger.excess("a/0") == {"GPU-0": 2 * GIB}, "what strays is told elsewhere"
    assert ledger.room("GPU-0") == 90 * GIB
    ledger.release_claim("a/0")
    assert (ledger.held_bytes("a/0"), ledger.excess("a/0")) == ({}, {})


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.none() | st.dictionaries(st.sampled_from(["GPU-0", "GPU-1"]), st.integers(0, 120)),
        ),
        max_size=30,
    )
)
def test_no_byte_is_promised_twice(deeds: list[tuple[str, dict[str, int] | None]]) -> None:
    ledger = GpuReservations(GPUS, "5%")
    for holder, wants in deeds:
        if wants is None:
            ledger.release_claim(holder)
            continue
        wanted = {uuid: size * GIB for uuid, size in wants.items()}
        try:
            ledger.reserve(holder, wanted)
        except InsufficientMemory as error:
            assert error.lacking_bytes == ledger.lacking(wanted, but=holder) != {}
        for gpu in GPUS:
            promised = sum(ledger.holders(gpu.uuid).values())
            assert promised + ledger.room(gpu.uuid) == 95 * GIB
            assert promised <= 95 * GIB
