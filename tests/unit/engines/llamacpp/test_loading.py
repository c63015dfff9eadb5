"""What a configuration and a file's header mean for a load, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.llamacpp import loading
from servekit.engines.llamacpp.library.bindings import POOLINGS
from servekit.errors import LoadError
from servekit.model_metadata.gguf import Header
from servekit.protocol.messages import WorkerSpec
from tests.unit.engines.contract.subjects import spec


def make_spec(device: str = "cpu", **options: Any) -> WorkerSpec:
    return spec("llamacpp", "m", device=device, options=options)


def make_header(
    pooling: int | None = None, *, causal: bool | None = None, head: bool = False
) -> Header:
    stated = {"bert.pooling_type": pooling, "bert.attention.causal": causal}
    metadata = {key: value for key, value in stated.items() if value is not None}
    return Header("bert", 1, 1, {}, metadata, {"cls.weight": 4} if head else {"token_embd": 4})


@pytest.mark.parametrize(
    ("header", "asked", "found"),
    [
        (make_header(), "auto", None),
        (make_header(POOLINGS["mean"]), "auto", POOLINGS["mean"]),
        (make_header(POOLINGS["none"]), "auto", None),
        (make_header(77), "auto", None),
        (make_header(POOLINGS["rank"], head=True), "auto", POOLINGS["rank"]),
        (make_header(POOLINGS["rank"]), "auto", None),
        (make_header(head=True), "rank", POOLINGS["rank"]),
        (make_header(POOLINGS["mean"]), "none", None),
        (make_header(POOLINGS["mean"]), "last", POOLINGS["last"]),
        (make_header(), "cls", POOLINGS["cls"]),
        (make_header(POOLINGS["none"], causal=True), "auto", None),
    ],
)
def test_the_pooling_is_the_configurations_or_the_files(
    header: Header, asked: str, found: int | None
) -> None:
    assert loading._choose_pooling(header, make_spec(pooling=asked)) == found


def test_a_file_that_can_do_neither_is_refused() -> None:
    with pytest.raises(LoadError, match=r"has no head to rank with; leave options\.pooling out"):
        loading._choose_pooling(make_header(), make_spec(pooling="rank"))
    with pytest.raises(LoadError, match="neither generates nor says how to make embeddings"):
        loading._choose_pooling(make_header(POOLINGS["none"], causal=False), make_spec())


def test_each_slot_has_a_token_in_every_pass() -> None:
    assert loading._count_slots(make_spec(), None) == loading.SLOTS
    assert loading._count_slots(make_spec(), 1) == loading.EMBEDDING_SLOTS
    assert loading._count_slots(make_spec(slots=3), 1) == 3
    assert loading._count_batch_tokens(make_spec(), None) == loading.CPU_BATCH_TOKENS
    assert loading._count_batch_tokens(make_spec("cuda"), None) == loading.CUDA_BATCH_TOKENS
    assert loading._count_batch_tokens(make_spec(batch_tokens=64), None) == 64
    assert loading._count_batch_tokens(make_spec(batch_tokens=64, slots=100), None) == 100


def test_a_projector_takes_its_memory_from_the_first_gpu() -> None:
    assert loading.reserve_bytes((100, 100), 30) == (70, 100)
    assert loading.reserve_bytes((20, 100), 30) == (0, 100)
    assert loading.reserve_bytes((), 30) == ()
