"""Adding adapters to a layer: run by run and stacked are the same, and a step knows its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from servekit.engines.transformers.lora import batched_lora
from servekit.engines.transformers.lora.adapter import Adapter, Factors
from servekit.engines.transformers.lora.batched_lora import BatchedLora, BatchLayout, Part
from tests.unit.engines.transformers.interpreting import interpret

SIZES = {1: 4, 2: 2, 3: 8}
COUNTS = [(None, 3), (1, 2), (1, 5), (2, 1), (None, 1), (3, 4), (1, 1)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.linear = nn.Linear(16, 24)
        self.other = nn.Linear(16, 24)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def adapter(uid: int, rank: int) -> Adapter:
    torch.manual_seed(uid)
    factors = Factors(torch.randn(rank, 16), torch.randn(rank, 24))
    return Adapter(f"a{uid}", uid, factors={"linear": factors})


def expected(model: Model, x: Tensor, adapters: dict[int, Adapter]) -> Tensor:
    """Token by token."""
    plain = nn.functional.linear(x, model.linear.weight, model.linear.bias)
    at = 0
    for uid, count in COUNTS:
        if uid in adapters:
            one = adapters[uid].factors["linear"]
            plain[0, at : at + count] += x[0, at : at + count] @ one.down.T @ one.up
        at += count
    return plain


@pytest.mark.parametrize("worth", [0.0, 1e12], ids=["run by run", "stacked"])
@torch.no_grad()
def test_each_token_gets_its_own_adapters_share(
    monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    monkeypatch.setattr(batched_lora, "_LAUNCH_WORTH", {"cpu": worth, "cuda": worth})
    model, adapters = Model(), {uid: adapter(uid, rank) for uid, rank in SIZES.items()}
    mixed = BatchedLora(model)
    for one in adapters.values():
        mixed.install_adapter(one)
    x = torch.randn(1, sum(count for _, count in COUNTS), 16)
    for gone in (None, 2, 1, 3):
        if gone is not None:
            mixed.uninstall_adapter(adapters.pop(gone))
        mixed.lay_out([Part(adapters.get(uid or 0), 0, count) for uid, count in COUNTS])
        assert torch.allclose(model.linear(x), expected(model, x, adapters), atol=1e-5)
    assert "forward" not in model.linear.__dict__


@pytest.mark.parametrize("worth", [0.0, 1e12], ids=["run by run", "stacked"])
@torch.no_grad()
def test_what_overflows_in_one_adapter_is_its_own(
    monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    """float16 ends at 65,504: another adapter's infinity, times zero, was every token's NaN."""
    monkeypatch.setattr(batched_lora, "_LAUNCH_WORTH", {"cpu": worth, "cuda": worth})
    model = Model().half()
    quiet = {uid: adapter(uid, rank) for uid, rank in SIZES.items()}
    for one in quiet.values():
        was = one.factors["linear"]
        one.factors["linear"] = Factors(was.down.half(), was.up.half())
    loud = Adapter(
        "loud",
        4,
        factors={"linear": Factors(torch.full((2, 16), 6e4).half(), torch.ones(2, 24).half())},
    )
    x = torch.rand(1, sum(count for _, count in COUNTS) + 1, 16).half()
    parts = [Part(quiet.get(uid or 0), 0, count) for uid, count in COUNTS]
    seen = []
    for installed in ([*quiet.values()], [*quiet.values(), loud]):
        mixed = BatchedLora(model)
        for one in installed:
            mixed.install_adapter(one)
        mixed.lay_out([*parts, Part(installed[-1] if len(installed) > 3 else None, 0, 1)])
        seen.append(model.linear(x)[0, :-1])
        for one in installed:
            mixed.uninstall_adapter(one)
    assert torch.isfinite(seen[1]).all()
    assert torch.allclose(seen[0], seen[1], atol=2e-2)


@torch.no_grad()
def test_a_step_without_adapters_is_the_layers_own() -> None:
    model, x = Model(), torch.randn(1, 5, 16)
    mixed, plain = BatchedLora(model), model.linear(x)
    mixed.install_adapter(adapter(1, 4))
    mixed.lay_out([Part(None, 0, 5)])
    assert mixed.step is None
    assert torch.equal(model.linear(x), plain)


def test_runs_of_one_adapter_are_one() -> None:
    one, two = adapter(1, 2), adapter(2, 2)
    step = BatchLayout.build([Part(None, 7, 1), Part(one, 3, 2), Part(one, 0, 4), Part(two, 9, 1)])
    assert step is not None
    assert (step.tokens, step.runs) == (8, [(1, 1, 7), (2, 7, 8)])


@pytest.mark.parametrize(("past", "count", "rows"), [(0, 9, 5), (0, 3, 3), (3, 4, 2), (5, 1, 0)])
@torch.no_grad()
def test_virtual_tokens_are_read_where_they_stand(past: int, count: int, rows: int) -> None:
    model = Model()
    mixed, table = BatchedLora(model), torch.randn(5, 16)
    mixed.install_adapter(Adapter("p", 1, prompt=table))
    mixed.lay_out([Part(None, 0, 2), Part(Adapter("p", 1, prompt=table), past, count)])
    ids = torch.zeros(1, 2 + count, dtype=torch.int64)
    found = model.embed(ids)[0]
    assert torch.equal(found[2 : 2 + rows], table[past : past + rows])
    rest = torch.cat([found[:2], found[2 + rows :]])
    assert torch.equal(rest, model.embed.weight[0].expand_as(rest))


def test_what_cannot_be_installed_leaves_nothing() -> None:
    model, mixed = Model(), BatchedLora(Model())
    mixed = BatchedLora(model)
    bad = adapter(1, 4)
    bad.factors["nowhere"] = bad.factors["linear"]
    with pytest.raises(AttributeError):
        mixed.install_adapter(bad)
    assert not mixed._layers and "forward" not in model.linear.__dict__


@torch.no_grad()
def test_nothing_is_kept_of_adapters_that_come_and_go() -> None:
    model = Model()
    mixed, stays = BatchedLora(model), adapter(1, 2)
    mixed.install_adapter(stays)
    keys = set()
    for uid in range(2, 40):
        one = adapter(uid, 2)
        mixed.install_adapter(one)
        keys.add(mixed._keys[1, 1, uid, uid])
        mixed.uninstall_adapter(one)
    assert set(mixed._keys) == {(1, 1)}
    assert len(keys) == 38  # a key means one layout only, whatever was forgotten meanwhile
    mixed.uninstall_adapter(stays)
    assert not mixed._keys


NUMBERED = """
import torch
from servekit.engines.transformers.lora.batched_lora import BatchedLora
from servekit.engines.transformers.lora.lora_triton import check_products
from tests.unit.engines.transformers.lora.test_batched_lora import COUNTS, SIZES
from tests.unit.engines.transformers.lora.test_batched_lora import Model, adapter, expected

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    check_products(torch.device("cpu"), dtype)
with torch.no_grad():
    model, adapters = Model(), {}
    mixed = BatchedLora(model)
    generations = []
    for change in (1, 2, 3, -1, 1, -2, 50):
        if change < 0:
            mixed.uninstall_adapter(adapters.pop(-change))
        else:
            adapters[change] = adapter(change, SIZES.get(change, 20))
            mixed.install_adapter(adapters[change])
        owners = [adapters.get(uid or 0) for uid, count in COUNTS for _ in range(count)]
        numbers = torch.tensor([[0 if one is None else one.number, 7] for one in owners])
        x = torch.randn(1, len(owners), 16)
        mixed.table.send()
        mixed.step, mixed.numbers = None, numbers[:, 0]  # as on a GPU
        assert torch.allclose(model.linear(x), expected(model, x, adapters), atol=1e-4)
        generations.append(mixed.table.generation)
    first = generations[0]
    assert generations == [*[first] * 6, first + 1], generations
    mixed.clear_layout()
    mixed.table.send()
    assert mixed.table.generation == first + 2
"""


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_slots_find_their_adapters_by_number(tmp_path: Path) -> None:
    """Whatever comes and goes; a larger rank or another address needs other graphs."""
    interpret(NUMBERED, tmp_path)
