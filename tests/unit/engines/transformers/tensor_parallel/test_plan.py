"""Which models several devices can share, and how a configuration says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from servekit.engines.transformers.tensor_parallel import plan
from servekit.errors import LoadError
from tests.unit.engines.contract.subjects import spec


def make_spec(gpus: int, parallel: Any, device: str = "cuda") -> Any:
    return spec("transformers", "m", gpus=gpus, parallel=parallel, device=device)


@pytest.mark.parametrize(
    ("given", "spread", "ranks", "layers"),
    [
        (make_spec(2, "tensor"), True, True, False),
        (make_spec(2, "tensor", "cpu"), True, True, False),
        (make_spec(2, "device_map"), True, False, True),
        (make_spec(2, "device_map", "cpu"), True, False, False),
        (make_spec(1, "tensor"), False, False, False),
        (make_spec(1, "device_map"), False, False, False),
    ],
)
def test_how_a_model_is_spread(given: Any, spread: bool, ranks: bool, layers: bool) -> None:
    assert plan.is_spread(given) is spread
    assert plan.over_ranks(given) is ranks
    assert plan.over_layers(given) is layers


def make_model(heads: int = 8, kv_heads: int | None = 4, **changes: Any) -> Any:
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = SimpleNamespace(get_text_config=lambda: text, is_encoder_decoder=False)
    vars(config).update(changes.pop("config", {}))
    return SimpleNamespace(tp_plan={"layers.*": "colwise"}, config=config, **changes)


def test_heads_are_shared_evenly() -> None:
    plan.check_spread(make_model(), make_spec(4, "tensor"))
    plan.check_spread(make_model(kv_heads=None), make_spec(8, "tensor"))
    for model, gpus in ((make_model(), 8), (make_model(6, 4), 4), (make_model(), 3)):
        with pytest.raises(LoadError, match=rf"which {gpus} devices cannot share evenly; choose"):
            plan.check_spread(model, make_spec(gpus, "tensor"))


def test_a_model_without_a_plan_is_refused_with_the_other_way() -> None:
    without = make_model()
    without.tp_plan = {}
    for model in (without, make_model(config={"is_encoder_decoder": True})):
        with pytest.raises(LoadError, match=r"no plan for tensor parallelism of .*device_map` for"):
            plan.check_spread(model, make_spec(2, "tensor"))


class Seeing(nn.Module):
    """A model with a part for images, of which the ranks share the rest."""

    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.vision = nn.ModuleList([nn.Linear(2, 2)])
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.embedding, self.tp_plan = nn.Embedding(2, 2), tp_plan

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_decoder(self) -> nn.Module:
        return self.layers

    def get_output_embeddings(self) -> None:
        return None


def test_rank_0_reads_media_if_their_part_is_not_divided() -> None:
    model = Seeing({"layers.*": "colwise"})
    assert list(plan.shared_parts(model)) == ["embedding", "decoder"]
    assert plan.find_media_obstacle(model) == ""
    divided = Seeing({"layers.*": "colwise", "vision.*": "colwise"})
    told = "its plan for tensor parallelism also divides vision.0"
    assert plan.find_media_obstacle(divided) == told
    assert torch.distributed.is_available()
