"""A model that reads more tokens than it says: ids between the two end no step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers.runner_factory import head_size, vocab_size
from servekit.errors import RequestError
from servekit.protocol.messages import Grammar
from tests.unit.engines.harness import Harness, assert_alive, make_spec, write_tiny_mllama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mllama(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(
    scope="module",
    params=[{"batching": "continuous"}, {"batching": "static"}, {"decode": "graph"}],
    ids=["continuous", "static", "graph"],
)
def wide(request: pytest.FixtureRequest, folder: Path) -> Iterator[Harness]:
    engine = Harness(make_spec(folder, options=request.param))
    yield engine
    engine.close()


def sizes(harness: Harness) -> tuple[int, int]:
    model = harness.engine._runner._model
    return head_size(model), vocab_size(model)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "temperature": 1.0, "seed": 1},
        {"logprobs": 5},
        {"temperature": 1.0, "top_k": 395, "seed": 1},
        {"min_tokens": 3, "logit_bias": ((5, 3.0),)},
        {"grammar": Grammar("regex", "[a-z]{8}")},
    ],
    ids=str,
)
def test_such_ids_in_a_prompt_are_read(wide: Harness, params: dict[str, Any]) -> None:
    head, whole = sizes(wide)
    assert whole == head + 8
    prompt = [5, whole - 1, 6, head, 7]
    tokens = wide.generate(prompt, max_tokens=4, ignore_eos="grammar" not in params, **params)
    assert tokens and max(tokens) < head
    assert_alive(wide)


def test_such_ids_are_neither_wished_for_nor_gone_on_from(wide: Harness) -> None:
    head, whole = sizes(wide)
    for token in (head, whole - 1):
        with pytest.raises(RequestError, match="can read but not generate") as caught:
            wide.submit([5, 6], max_tokens=2, logit_bias=((token, 1.0),))
        assert (caught.value.status, caught.value.param) == (400, "logit_bias")
        with pytest.raises(RequestError, match="Token id"):
            wide.submit([5, 6], [token], max_tokens=4, presence_penalty=1.0)
    with pytest.raises(RequestError, match="not in its vocabulary"):
        wide.submit([5, 6], max_tokens=2, logit_bias=((whole, 1.0),))
    with pytest.raises(RequestError, match="Token id"):
        wide.submit([5, whole], max_tokens=2)
    assert_alive(wide)
