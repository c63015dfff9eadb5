"""Sizes of weights that are quantised while they are loaded."""

from __future__ import annotations

import pytest

from servekit.model_metadata.weight_quantization import count_quantized_bytes

TENSORS = {
    "model.embed_tokens.weight": (100, 64),
    "model.layers.0.mlp.up_proj.weight": (256, 64),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 16),
    "model.layers.0.mlp.experts.1.up_proj.weight": (8, 16),
    "model.norm.weight": (64,),
    "lm_head.weight": (100, 64),
}
KEPT = 2 * (6400 + 512 + 128 + 64 + 6400)


@pytest.mark.parametrize(
    ("method", "due"),
    [("int8", 256 * (64 + 5)), ("fp8", 256 * (64 + 4)), ("int4", 256 * 64 * 0.5625)],
)
def test_embeddings_the_head_and_experts_stay_as_they_are(method: str, due: float) -> None:
    assert count_quantized_bytes(method, TENSORS, 2) == KEPT + due
