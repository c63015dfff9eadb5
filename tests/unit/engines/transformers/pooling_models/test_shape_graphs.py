"""Forward passes of rounded shapes: the outputs of texts are those of the texts alone.

Without a GPU nothing is recorded, and a shape's memory is filled, computed and read all the same;
`python -m tests.gpu.reranking` compares the scores of recorded passes with the library's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from servekit.engines.transformers.pooling_models import shape_graphs
from servekit.engines.transformers.pooling_models.shape_graphs import ShapeGraphs, round_up

CPU = torch.device("cpu")
Pass = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def encoder() -> Pass:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,
        max_position_embeddings=128,
        num_labels=3,
    )
    model: Any = BertForSequenceClassification(config)
    model.eval()

    def forward(ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        logits = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
        return logits, logits.sum(1)

    return torch.no_grad()(forward)


def make_batch(texts: int, tokens: int, *, typed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = random.Random(texts * 1000 + tokens)
    lengths = torch.tensor([[draw.randint(1, tokens)] for _ in range(texts)])
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths).long()
    ids = torch.randint(1, 50, (texts, tokens)) * mask
    return ids, mask, (torch.arange(tokens) % 2 * mask) if typed else None


@pytest.mark.parametrize("typed", [True, False])
def test_outputs_are_those_of_the_plain_pass(encoder: Pass, typed: bool) -> None:
    graphs = ShapeGraphs(encoder, CPU, 0, 8192)
    for texts, tokens in ((1, 1), (9, 33), (10, 40), (9, 48), (1, 16), (17, 100), (9, 33)):
        for _ in range(3):  # without a graph, with a new one, again
            batch = make_batch(texts, tokens, typed=typed)
            found, due = graphs.run_shape(*batch), encoder(*batch)
            for one, other in zip(found, due, strict=True):
                assert one.shape == other.shape
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not graphs.failure


def test_nothing_of_the_last_batch_is_left(encoder: Pass) -> None:
    graphs = ShapeGraphs(encoder, CPU, 0, 8192)
    for texts, tokens in ((10, 48), (10, 48), (10, 48), (9, 35)):
        batch = make_batch(texts, tokens, typed=True)
        found = graphs.run_shape(*batch)
    torch.testing.assert_close(found[0], encoder(*batch)[0], rtol=1e-4, atol=1e-4)


def test_shapes_are_rounded_to_few(encoder: Pass) -> None:
    shapes: list[torch.Size] = []

    def forward(ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        shapes.append(ids.shape)
        return encoder(ids, mask, types)

    graphs = ShapeGraphs(forward, CPU, 0, 8192)
    for tokens in range(97, 113):
        graphs.run_shape(*make_batch(9, tokens, typed=False))
    assert {tuple(shape) for shape in shapes} == {(12, 112)}


def test_a_large_batch_keeps_its_shape() -> None:
    seen: list[torch.Size] = []

    def forward(ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        seen.append(ids.shape)
        return (mask.sum(1),)

    graphs = ShapeGraphs(forward, CPU, 0, 8192)
    for _ in range(3):
        graphs.run_shape(*make_batch(99, 99, typed=False))
    assert {tuple(shape) for shape in seen} == {(99, 99)}


def test_shapes_beyond_the_most_graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_graphs, "_MOST_GRAPHS", 1)
    made: list[tuple[int, ...]] = []

    def forward(ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        made.append(tuple(ids.shape))
        return (mask.sum(1),)

    graphs = ShapeGraphs(forward, CPU, 0, 8192)
    for tokens in (15, 31, 14, 31):
        graphs.run_shape(*make_batch(1, tokens, typed=False))
    assert made == [(1, 16), (1, 31), (1, 16), (1, 31)]


@pytest.mark.parametrize(("finer", "least", "most"), [(1, 1, 1.5), (2, 1, 1.25), (2, 16, 1.25)])
def test_rounding_up_is_bounded(finer: int, least: int, most: float) -> None:
    for count in range(1, 3000):
        rounded = round_up(count, finer, least)
        assert count <= rounded < max(count * most, count + least)
        assert round_up(rounded, finer, least) == rounded
    assert len({round_up(count, finer, least) for count in range(1, 513)}) < 35
