"""What each rank has, and what a replica of embeddings says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.unit.engines.harness import Harness, make_spec
from tests.unit.engines.transformers.pooling_models import test_logit_score as causal
from tests.unit.engines.transformers.pooling_models.test_embedding import (
    TEXTS,
    qwen3,
    submit,
)

Opened = Callable[..., AbstractContextManager[Harness]]


@pytest.mark.lane("long")
def test_each_rank_holds_its_part_only(even: Path, two_ranks: Opened) -> None:
    with two_ranks(even, options={"kv_cache_bytes": 2**20}) as engine:
        cache = engine.engine._runner._processor.cache
        allocators = getattr(cache, "cache_allocators", None)
        heads = {a.num_key_value_heads for a in allocators.values()} if allocators else {1}
        assert heads == {1}  # of two
        assert engine.info.kv_cache_bytes == 2**20


@pytest.mark.lane("long")
def test_scores_are_those_of_the_card(tmp_path: Path, two_ranks: Opened) -> None:
    folder = causal.make_reranker(tmp_path / "Qwen3-Reranker-tiny", vocab_size=512)
    with two_ranks(folder) as engine:
        found = causal.scores(engine, causal.submit(engine, causal.PAIRS))
    assert found == pytest.approx(causal.score_as_the_card(folder, causal.PAIRS), abs=2e-5)


@pytest.mark.lane("long")
def test_embeddings_are_as_on_one(tmp_path: Path, two_ranks: Opened) -> None:
    folder = qwen3(tmp_path)
    alone = Harness(make_spec(folder))
    expected = alone.vectors(submit(alone, TEXTS))
    alone.close()
    with two_ranks(folder) as engine:
        found = engine.vectors(submit(engine, TEXTS))
        for vector, other in zip(found, expected, strict=True):
            assert vector == pytest.approx(other, abs=1e-4)
