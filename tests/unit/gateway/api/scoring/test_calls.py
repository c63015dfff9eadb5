"""The calls of a request for scores, also where it is not known yet what the model can do."""

from __future__ import annotations

import array
import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import ClientClosed, DeadlineExceeded, RequestError, Unsupported
from servekit.gateway.api.openai.embeddings import GROUP
from servekit.gateway.api.scoring.calls import Pairing, PooledCalls, find_model
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import (
    AccessRules,
    Delta,
    KeyRule,
    ModelInfo,
    ModelStatus,
    SamplingParams,
    Topology,
)
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import Capability
from tests.polling import poll_async
from tests.unit.gateway.conftest import Service

INFO = ModelInfo(100, 4, True, "a", "float32", "cpu")
NAMES = ("query", "documents")


def pairing(queries: list[str], documents: list[str], **fields: Any) -> Pairing:
    known: dict[str, Any] = {"params": SamplingParams(), "raw": True, "most_tokens": 7}
    return Pairing(queries, documents, names=NAMES, **(known | fields))


def make(service: Service, asked: Pairing, *serves: Capability) -> list[InflightRequest]:
    """The calls for a model that serves these tasks, or that is not known."""
    service.router.apply_topology(Topology((ModelStatus("m", "echo", "-", 0, ()),)))
    info = replace(INFO, serves=serves) if serves else None
    return asked.make_calls(service.router.find("m"), service.router, "k")(info)


def fields(call: InflightRequest) -> dict[str, Any]:
    assert call.more is not None
    pooling = call.more["pooling"]
    return {name: call.more.get(name) for name in ("task", "inputs", "queries")} | {
        "name": pooling.name, "raw": pooling.raw, "tokens": pooling.input_tokens,
        "first": pooling.first,
    }  # fmt: skip


async def test_a_reranker_reads_each_document_with_the_query(service: Service) -> None:
    documents = [str(number) for number in range(GROUP + 1)]
    calls = make(service, pairing(["q"], documents), "score", "embed")
    shared = {"task": "score", "queries": ["q"], "name": "documents", "raw": True, "tokens": 7}
    assert list(map(fields, calls)) == [
        shared | {"inputs": documents[:GROUP], "first": 0},
        shared | {"inputs": documents[GROUP:], "first": GROUP},
    ]
    assert {call.key for call in calls} == {"k"}


async def test_each_document_may_have_a_query_of_its_own(service: Service) -> None:
    texts = [str(number) for number in range(GROUP + 1)]
    first, second = make(service, pairing(texts, texts), "score")
    assert fields(first)["queries"] == texts[:GROUP]
    assert fields(second)["queries"] == texts[GROUP:]


async def test_an_embedding_model_reads_queries_and_documents_apart(service: Service) -> None:
    query, documents = make(service, pairing(["q"], ["a", "b"]), "embed")
    assert fields(query) | {"raw": None} == {
        "task": "embed", "inputs": ["q"], "queries": None, "name": "query", "raw": None,
        "tokens": 0, "first": 0,
    }  # fmt: skip
    assert (fields(documents)["inputs"], fields(documents)["name"]) == (["a", "b"], "documents")
    assert fields(documents)["tokens"] == 7, "only documents are cut"


async def test_a_model_that_is_not_known_is_taken_for_a_reranker(service: Service) -> None:
    [call] = make(service, pairing(["q"], ["a"], instruction="be strict"))
    assert fields(call)["task"] == "score"
    assert call.more is not None and call.more["pooling"].instruction == "be strict"


@pytest.mark.parametrize(
    ("serves", "instruction", "param", "said"),
    [
        (("generate",), "", "model", "does not score or rerank documents"),
        (("score",), "be strict", "instruction", "has no place for one; leave it out"),
    ],
)
async def test_what_the_model_cannot_do_is_refused(
    service: Service, serves: tuple[Capability, ...], instruction: str, param: str, said: str
) -> None:
    asked = pairing(["q"], ["a"], instruction=instruction)
    with pytest.raises(Unsupported) as refused:
        make(service, asked, *serves)
    assert refused.value.param == param and said in refused.value.message
    # a key that may not use the model is not told what it can do
    keys = (KeyRule("k", digest=b"d", models=("other",)),)
    service.router.access.apply_rules(AccessRules(keys=keys))
    ACTING.set(service.router.access.callers["k"])
    with pytest.raises(RequestError) as forbidden:
        make_again(service, asked, *serves)
    assert forbidden.value.status == 403


def make_again(service: Service, asked: Pairing, *serves: Capability) -> None:
    route = service.router.find("m")
    asked.make_calls(route, service.router, "k")(replace(INFO, serves=serves))


async def test_an_instruction_is_for_a_model_with_a_place_for_it(service: Service) -> None:
    asked = pairing(["q"], ["a"], instruction="be strict")
    [call] = make(service, asked, "score", "instruction")
    assert call.more is not None and call.more["pooling"].instruction == "be strict"


def answer(*vectors: list[float]) -> Delta:
    return Delta(1, "", vectors=[array.array("f", one).tobytes() for one in vectors])


def test_scores_are_the_first_numbers_or_the_cosines() -> None:
    asked = pairing(["q"], ["a", "b"])
    assert asked.scores([answer([0.5, 9.0]), answer([0.25, 9.0])]) == [0.5, 0.25]
    with_query = [answer([1.0, 0.0]), answer([3.0, 4.0], [0.0, 2.0])]
    assert asked.scores(with_query) == pytest.approx([0.6, 0.0])
    pairs = pairing(["q", "r"], ["a", "b"])
    apart = [answer([1.0, 0.0], [0.0, 1.0]), answer([3.0, 4.0], [3.0, 4.0])]
    assert pairs.scores(apart) == pytest.approx([0.6, 0.8])


# ---------------------------------------------------------------- a model that is not loaded


async def lazy(service: Service) -> ModelStatus:
    """A model that was never loaded, and whose worker is about to come."""
    worker = await service.worker()
    status = ModelStatus("m", "echo", "-", 0, (worker.status("loading"),), timeout_s=30.0)
    status = replace(status, residence=ResidencyStatus("on_demand", "coming"))
    service.router.apply_topology(Topology((status,)))
    return status


def open_calls(service: Service, timeout_s: float | None = None) -> PooledCalls:
    route, asked = service.router.find("m"), pairing(["abc"], ["abc", "x"])
    return PooledCalls(
        service.router, route, asked.make_calls(route, service.router, "k"), timeout_s
    )


async def test_calls_of_a_known_model_are_queued_at_once(service: Service) -> None:
    await service.up()
    calls = open_calls(service)
    assert service.router.in_flight == 1
    [scored] = await calls.answers()
    assert len(scored.vectors) == 2
    calls.cancel()


async def test_a_model_is_loaded_before_its_calls_are_made(service: Service) -> None:
    status = await lazy(service)
    calls = open_calls(service)
    assert service.router.in_flight == 0
    asking = asyncio.create_task(calls.answers())
    await poll_async("it is asked for", lambda: service.router.find("m").expected)
    worker = service.workers[0]
    ready = replace(status, replicas=(worker.status(),), info=worker.runner.info)
    service.router.apply_topology(Topology((ready,)))
    async with asyncio.timeout(30):
        [scored] = await asking
    assert len(scored.vectors) == 2


async def test_a_request_that_was_cancelled_meanwhile_makes_no_calls(service: Service) -> None:
    status = await lazy(service)
    calls = open_calls(service)
    asking = asyncio.create_task(calls.answers())
    await poll_async("it is asked for", lambda: service.router.find("m").expected)
    calls.cancel()
    info = service.workers[0].runner.info
    service.router.apply_topology(Topology((replace(status, info=info),)))
    with pytest.raises(ClientClosed):
        await asking
    assert service.router.in_flight == 0


async def test_a_model_is_waited_for_no_longer_than_the_client_says(service: Service) -> None:
    await lazy(service)
    with pytest.raises(DeadlineExceeded, match=r"not done within 0\.01 s"):
        await open_calls(service, 0.01).answers()


async def test_a_model_that_the_key_may_not_use_is_not_loaded(service: Service) -> None:
    await lazy(service)
    keys = (KeyRule("k", digest=b"d", models=("other",)),)
    service.router.access.apply_rules(AccessRules(keys=keys))
    ACTING.set(service.router.access.callers["k"])
    with pytest.raises(RequestError) as refused:
        await open_calls(service).answers()
    assert refused.value.status == 403
    assert service.router.find("m").expected == 0


async def test_without_a_name_it_is_the_first_model_that_can(service: Service) -> None:
    def model(name: str, *serves: Capability) -> ModelStatus:
        return ModelStatus(name, "echo", "-", 0, (), replace(INFO, serves=serves))

    models = model("talks", "generate"), model("maps", "embed"), model("ranks", "score")
    service.router.apply_topology(Topology(models))
    wanted: tuple[Any, ...] = ("score", "embed")
    assert find_model(service.router, "", wanted).status.name == "maps"
    assert find_model(service.router, "talks", wanted).status.name == "talks"
    assert find_model(service.router, "", ("classify",)).status.name == "talks"
    assert find_model(service.router, "", ("generate",)).status.name == "talks"
