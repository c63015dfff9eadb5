"""Rerank, score and classify over a real router, an echo worker, and ASGI as uvicorn speaks it."""

from __future__ import annotations

import array
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.gateway.api.openai.embeddings import GROUP
from servekit.gateway.api.scoring.calls import compute_cosine
from servekit.gateway.api.scoring.endpoints import TASKS, Scoring
from servekit.gateway.api.scoring.request_types import MAX_TEXTS
from servekit.protocol.messages import Capability, Topology
from tests.unit.gateway.conftest import Service, until

DOCUMENTS = ["xyz", "abc", "abx"]
RERANK = {"query": "abc", "documents": DOCUMENTS}


async def post(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    route = Scoring(service.router, 10**7).routes[path]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=route)) as client:
        return await client.post(f"http://servekit{path}", json=body)


def serve_only(service: Service, *tasks: Capability) -> None:
    """Let the model be known to serve these tasks only."""
    worker = service.workers[0]
    status = service.router.routes["m"].status
    [info] = [one.info for one in service.router.routes["m"].replicas.values()]
    assert info is not None
    told = replace(status, info=replace(info, serves=tasks), replicas=(worker.status(),))
    other = replace(told, name="n", info=info, replicas=(), aliases=())
    service.router.apply_topology(Topology((told, other)))


def test_each_path_has_its_tasks(service: Service) -> None:
    assert Scoring(service.router, 1).routes.keys() == TASKS.keys()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_the_most_relevant_document_is_the_first(service: Service, path: str) -> None:
    await service.up()
    answer = (await post(service, path, {"model": "m", **RERANK})).json()
    ranked = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert ranked == [(1, 1.0), (2, pytest.approx(2 / 3)), (0, 0.0)]
    texts = [one.get("document", {}).get("text") for one in answer["results"]]
    assert texts == ([None] * 3 if path == "/v2/rerank" else ["abc", "abx", "xyz"])
    assert answer["model"] == "m" and answer["id"].startswith("rerank-")
    assert answer["usage"] == {"prompt_tokens": 21, "total_tokens": 21}
    assert answer["meta"] == {"tokens": {"input_tokens": 21}}


async def test_the_best_few_and_objects_as_documents(service: Service) -> None:
    await service.up()
    documents = ["xyz", {"text": "abc", "title": "-"}, {"text": "abx"}]
    body = {**RERANK, "documents": documents, "top_n": 2, "return_documents": False}
    results = (await post(service, "/v1/rerank", body)).json()["results"]
    assert [one["index"] for one in results] == [1, 2]
    assert all("document" not in one for one in results)


async def test_many_documents_keep_their_places(service: Service) -> None:
    await service.up(2)
    documents = ["x" * at for at in range(3 * GROUP + 1)]
    documents[2 * GROUP + 3] = "abc"
    body = {"query": "abc", "documents": documents, "top_n": 1}
    [best] = (await post(service, "/v1/rerank", body)).json()["results"]
    assert (best["index"], best["document"]) == (2 * GROUP + 3, {"text": "abc"})
    assert service.router.in_flight == 0


@pytest.mark.parametrize(
    ("names", "queries", "documents", "expected"),
    [
        (("text_1", "text_2"), "abc", "abc", [1.0]),
        (("queries", "documents"), "abc", ["abc", "x"], [1.0, 0.0]),
        (("queries", "items"), ["abc", "x"], ["x", "xy"], [0.0, 1.0]),
        (("data_1", "data_2"), ["abc"], [{"text": "x"}, "ab"], [0.0, 2 / 3]),
    ],
)
async def test_scores_in_each_of_vllms_forms(
    service: Service, names: tuple[str, str], queries: Any, documents: Any, expected: list[float]
) -> None:
    await service.up()
    body = dict(zip(names, (queries, documents), strict=True))
    answer = (await post(service, "/v1/score", body)).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (at, "score") for at in range(len(expected))
    ]
    assert answer["object"] == "list" and answer["usage"]["total_tokens"] > 0


async def test_as_many_queries_as_documents_over_several_requests(service: Service) -> None:
    await service.up()
    texts = [chr(97 + at % 26) for at in range(2 * GROUP + 5)]
    body = {"text_1": texts, "text_2": [*texts[:-1], "-"]}
    data = (await post(service, "/score", body)).json()["data"]
    assert [one["score"] for one in data] == [1.0] * (len(texts) - 1) + [0.0]


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes_have_labels(service: Service, path: str) -> None:
    await service.up()
    answer = (await post(service, path, {"input": ["abc", "a12", "12"]})).json()
    data = answer["data"]
    assert [one["label"] for one in data] == ["letters", "others", "others"]
    assert data[1]["probs"] == pytest.approx([1 / 3, 2 / 3])
    assert [(one["index"], one["num_classes"]) for one in data] == [(0, 2), (1, 2), (2, 2)]
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


async def test_an_embedding_model_scores_by_the_cosine(service: Service) -> None:
    await service.up()
    serve_only(service, "embed")
    await until(lambda: service.router.routes["m"].ready)
    body = {"model": "m", "query": "abc", "documents": ["xyz", "abc"]}
    answer = (await post(service, "/v1/rerank", body)).json()
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert answer["results"][1]["relevance_score"] < 0.99
    assert answer["usage"]["total_tokens"] == 9
    pairs = {"model": "m", "text_1": ["a", "b"], "text_2": ["a", "b"]}
    data = (await post(service, "/v1/score", pairs)).json()["data"]
    assert [one["score"] for one in data] == pytest.approx([1.0, 1.0])


def test_the_cosine_needs_no_unit_vectors() -> None:
    one, other = array.array("f", [3.0, 4.0]), array.array("f", [8.0, 6.0])
    assert compute_cosine(one, other) == pytest.approx(48 / 50)
    assert compute_cosine(one, array.array("f", [0.0, 0.0])) == 0.0


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/rerank", RERANK, "does not score or rerank documents; it is a classifier"),
        ("/score", {"text_1": "a", "text_2": "b"}, "does not score or rerank documents"),
    ],
)
async def test_what_a_model_cannot_do_names_what_can(
    service: Service, path: str, body: dict[str, Any], sentence: str
) -> None:
    await service.up()
    serve_only(service, "classify")
    refused = await post(service, path, {"model": "m", **body})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "model")
    assert sentence in error["message"] and error["message"].endswith("models that do: 'n'")
    assert service.router.in_flight == 0


async def test_without_a_name_the_first_that_can_is_asked(service: Service) -> None:
    await service.up()
    serve_only(service, "classify")
    assert (await post(service, "/v1/classify", {"input": "a"})).json()["model"] == "m"
    refused = (await post(service, "/v1/rerank", RERANK)).json()["error"]
    assert "'n'" in refused["message"]  # it has no worker


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * (MAX_TEXTS + 1)}, "documents"),
        ("/v1/rerank", {**RERANK, "top_n": -1}, "top_n"),
        ("/v1/rerank", {**RERANK, "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {**RERANK, "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {**RERANK, "documents": ["a"] * 20 + ["b" * 9000]}, "documents"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "a"}, "queries"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1"),
        ("/v1/score", {"queries": "a", "items": "b" * 9000}, "items"),
        ("/v1/classify", {}, "input"),
        ("/v1/classify", {"input": [""]}, "input"),
        ("/v1/classify", {"input": "a", "messages": []}, "messages"),
    ],
)
async def test_refusals_name_the_field(
    service: Service, path: str, body: dict[str, Any], param: str
) -> None:
    await service.up()
    answer = await post(service, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.router.in_flight == 0


async def test_a_text_that_is_too_long_is_named_by_its_place(service: Service) -> None:
    await service.up(max_context=10)
    body = {"query": "abc", "documents": ["a"] * 20 + ["b" * 7]}
    message = (await post(service, "/v1/rerank", body)).json()["error"]["message"]
    assert message.startswith("documents[20] with its query has 11 tokens")
    assert "reads at most 10" in message and "truncate_prompt_tokens: -1" in message


@pytest.mark.parametrize("cut", [{"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 6}])
async def test_it_is_cut_only_when_asked(service: Service, cut: dict[str, Any]) -> None:
    await service.up(max_context=10)
    body = {"query": "abc", "documents": ["aabbbbbcccc", "x"], **cut}
    answer = (await post(service, "/v1/rerank", body)).json()
    assert answer["results"][0]["relevance_score"] == pytest.approx(2 / 3)  # without the c
    assert answer["results"][0]["document"] == {"text": "aabbbbbcccc"}
    assert answer["usage"]["total_tokens"] == 10 + 5


async def test_texts_to_embed_and_to_classify_are_cut_when_asked(service: Service) -> None:
    await service.up(max_context=4)
    for input, share in (("ab12345", 2 / 3), ([97] * 3 + [49] * 9, 1.0)):
        body: dict[str, Any] = {"input": input, "truncate_prompt_tokens": 3}
        [one] = (await post(service, "/v1/classify", body)).json()["data"]
        assert one["probs"][0] == pytest.approx(share)
    serve_only(service, "embed")
    await until(lambda: service.router.routes["m"].ready)
    body = {"model": "m", "query": "abcdef", "documents": ["abcdxyz"]}
    refused = await post(service, "/v1/rerank", body)
    assert refused.json()["error"]["param"] == "query"
    cut = (await post(service, "/v1/rerank", {**body, "truncate_prompt_tokens": -1})).json()
    assert cut["results"][0]["relevance_score"] == pytest.approx(1.0)
