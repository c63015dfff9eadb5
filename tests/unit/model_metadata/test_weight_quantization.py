"""Sizes of weights that are quantised while they are loaded."""

from __future__ import annotations

import pytest

from servekit.model_metadata.weight_quantization import size_bytes

CONFIG = {"vocab_size": 100, "hidden_size": 10}


@pytest.mark.parametrize(
    ("method", "config", "due"),
    [
        ("int8", CONFIG, 1000 * 2 + 4000),
        ("fp8", CONFIG | {"tie_word_embeddings": False}, 2000 * 2 + 3000),
        ("int4", {"text_config": CONFIG}, 1000 * 2 + 4000 * 0.5625),
        ("int8", {}, 5000),
    ],
)
def test_the_table_of_embeddings_stays_as_it_is(
    method: str, config: dict[str, object], due: float
) -> None:
    assert size_bytes(method, 5000, config, 2) == due
