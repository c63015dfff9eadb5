"""What is read of a model before it runs, and how often a cache that does not fit is tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servekit.engines.transformers import runner_factory as factory
from servekit.errors import LoadError
from tests.unit.engines.contract.subjects import spec


def make_model(rows: int = 10, head: int | None = 10, **config: Any) -> Any:
    """A model with so many rows in its embedding and its head."""
    text = SimpleNamespace(**config)
    return SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=[2, 3]),
        config=SimpleNamespace(get_text_config=lambda: text, is_encoder_decoder=False),
        get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(rows, 2)),
        get_output_embeddings=lambda: None if head is None else SimpleNamespace(out_features=head),
        device=torch.device("cpu"),
        _supports_attention_backend=True,
    )


class Tokenizer:
    """The part of a tokenizer that says what ends a text."""

    eos_token_id = 5
    chat_template = None

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def test_the_head_may_be_smaller_than_the_embedding_and_not_larger() -> None:
    assert factory.vocab_size(make_model(10)) == 10
    for head, size in ((8, 8), (12, 10), (None, 10)):
        assert factory.head_size(make_model(10, head)) == size


def test_all_that_ends_a_completion_is_found_where_it_can_be_generated() -> None:
    model = make_model(10, 9, eos_token_id=4)
    assert factory.eos_ids(model, Tokenizer()) == {2, 3, 4, 5}
    model.generation_config.eos_token_id = None
    model.config.get_text_config().eos_token_id = 9
    assert factory.eos_ids(model, Tokenizer()) == {5}, "9 is only read"


def test_sampling_values_are_those_that_the_model_states() -> None:
    model = make_model()
    stated = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 100}
    model.generation_config = SimpleNamespace(to_diff_dict=lambda: stated)
    assert factory.sampling_defaults(model) == {"temperature": 0.6, "top_k": 20}
    model.generation_config = None
    assert factory.sampling_defaults(model) == {}


def test_a_cache_that_does_not_fit_is_tried_with_half_and_a_quarter() -> None:
    asked: list[int] = []

    def make(halvings: int) -> Any:
        asked.append(halvings)
        if halvings < 2:
            raise MemoryError("too large")
        return "runner"

    assert factory._with_less_on_failure(make) == "runner"  # type: ignore[comparison-overlap]
    assert asked == [0, 1, 2]

    def never(halvings: int) -> Any:
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(LoadError, match="no room for the KV cache") as error:
        factory._with_less_on_failure(never)
    assert not error.value.permanent


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"_is_stateful": True}, "it is recurrent"),
        ({"_supports_attention_backend": False}, "its attention cannot be replaced by a paged one"),
    ],
)
def test_a_model_that_cannot_share_a_batch_is_told_why(change: dict[str, Any], why: str) -> None:
    model = make_model()
    vars(model).update(change)
    assert factory._find_obstacle(model, spec("transformers", "m")) == why
    model.config.is_encoder_decoder = True
    assert factory._find_obstacle(model, spec("transformers", "m")) == "it is an encoder-decoder"


def test_the_context_is_the_models_unless_less_is_asked_for() -> None:
    model = make_model(max_position_embeddings=100)
    assert factory._find_context(model, spec("transformers", "m")) == 100
    assert factory._find_context(model, spec("transformers", "m", max_context=60)) == 60
    assert factory._find_context(model, spec("transformers", "m", max_context=600)) == 100


def describe(context: int, capacity: int) -> Any:
    runner: Any = SimpleNamespace(capacity=capacity)
    model = make_model()
    model.dtype = torch.float32
    model.parameters = lambda: iter([torch.zeros(2, 3), torch.zeros(4)])
    given = spec("transformers", "m")
    return factory._describe_model(model, given, True, runner, 3, 7, "continuous", context)


def test_a_model_is_described_with_the_context_that_there_is_memory_for() -> None:
    info = describe(100, 1000)
    assert (info.max_context, info.slots, info.kv_cache_bytes, info.parameters) == (100, 3, 7, 10)
    assert (info.dtype, info.device, info.detail) == ("float32", "cpu", "continuous")
    assert describe(1000, factory.LEAST_CONTEXT).max_context == factory.LEAST_CONTEXT
    with pytest.raises(
        LoadError, match=r"^Memory is enough for a context of \d+ tokens only\.$"
    ) as it:
        describe(1000, factory.LEAST_CONTEXT - 1)
    assert not it.value.permanent
