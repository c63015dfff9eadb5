"""Ollama's embeddings: texts that are cut to the context, and the answer's vectors and times."""

from __future__ import annotations

import array
import json
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import ContextLengthExceeded
from servekit.gateway.api.ollama.embeddings import Embedding, write_one
from servekit.gateway.api.openai.embeddings import GROUP
from servekit.protocol.messages import Delta, Topology
from tests.unit.gateway.conftest import Service

CONTEXT = 16


async def embedding(service: Service, *inputs: str, truncate: bool = True) -> Embedding:
    if not service.workers:
        [worker] = await service.up(max_context=CONTEXT)
        status = replace(service.router.routes["m"].status, info=worker.runner.info)
        service.router.apply_topology(Topology((status,)))
    return Embedding(service.router, service.router.find("m"), "k", inputs, truncate=truncate)


async def vectors(service: Service, *inputs: str) -> list[Any]:
    asked = await embedding(service, *inputs)
    encoded = asked.encode_answer("m", 0, await asked.answers())
    return list(json.loads(encoded)["embeddings"])


async def test_a_text_that_fits_exactly_is_not_cut(service: Service) -> None:
    whole = "abcdefghijklmnop"
    assert len(whole) == CONTEXT
    asked = await embedding(service, whole, truncate=False)
    [answer] = await asked.answers()
    assert answer.prompt_tokens == CONTEXT


async def test_a_text_that_is_too_long_is_cut_before_its_last_token(service: Service) -> None:
    """The last token may mark the end of a text."""
    long = "abcdefghijklmnopqrstuvwxyz"
    cut, same, other = await vectors(service, long, "abcdefghijklmnoz", "abcdefghijklmnop")
    assert cut == same != other


async def test_texts_that_fit_are_left_alone_beside_one_that_does_not(service: Service) -> None:
    # sixteen bytes, and more than may be without a look at its tokens
    near = "abcdefghijklmnop"
    _, first, second = await vectors(service, "x" * 30, near, "c")
    assert [first, second] == await vectors(service, near, "c")


async def test_a_text_that_is_too_long_is_refused_if_it_may_not_be_cut(service: Service) -> None:
    asked = await embedding(service, "x" * 30, truncate=False)
    with pytest.raises(ContextLengthExceeded):
        await asked.answers()
    assert service.router.in_flight == 0


async def test_many_texts_are_several_calls_that_are_cancelled_together(service: Service) -> None:
    asked = await embedding(service, *["a"] * (GROUP + 1))
    assert service.router.in_flight == 2
    asked.cancel()
    assert service.router.in_flight == 0


async def test_an_answer_has_its_counts_and_times(service: Service) -> None:
    asked = await embedding(service, "ab", "c")
    answers = await asked.answers()
    told = json.loads(asked.encode_answer("as asked", 3, answers))
    assert (told["model"], told["prompt_eval_count"]) == ("as asked", 3)
    assert [len(vector) for vector in told["embeddings"]] == [3, 3]
    assert 0 <= told["load_duration"] <= told["total_duration"] < 60e9
    empty = await embedding(service)
    told = json.loads(empty.encode_answer("m", 0, await empty.answers()))
    assert (told["embeddings"], told["load_duration"], told["prompt_eval_count"]) == ([], 0, 0)


def test_the_older_answer_has_one_vector_as_the_model_made_it() -> None:
    vector = array.array("f", [3.0, 4.0]).tobytes()
    assert json.loads(write_one([Delta(1, "", vectors=[vector])])) == {"embedding": [3.0, 4.0]}
    assert json.loads(write_one([])) == {"embedding": []}
