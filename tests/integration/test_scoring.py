"""Rerankers and classifiers through the whole of servekit, with workers that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.integration.instance import Instance, echo
from tests.unit.engines.transformers.pooling_models import test_classification as made
from tests.unit.engines.transformers.pooling_models import test_embedding as embedders
from tests.unit.engines.transformers.pooling_models import test_logit_score as causal

pytestmark = pytest.mark.timeout(300)
SERVER = [sys.executable, str(Path(__file__).parents[1] / "media_server.py"), "--port", "{port}"]
DOCUMENTS = [document for document in made.DOCUMENTS if document] * 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made_by = {"reranker": made.bert, "classifier": made.three_labels, "embedder": embedders.bert}
    folders = {name: tmp_path_factory.mktemp(name) / "bert" for name in made_by}
    for name, folder in folders.items():
        folder.mkdir()
        made_by[name](folder)
    asks = tmp_path_factory.mktemp("asks") / "Qwen3-Reranker-tiny"
    return folders | {"asks": causal.make_reranker(asks)}


@pytest.fixture(scope="module")
def instance(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]
) -> Iterator[Instance]:
    options = {"threads": 1, "max_batch_tokens": 64}  # many steps, so that deaths are between them
    models: list[dict[str, Any]] = [
        {"name": name, "path": str(folder), "device": "cpu", "options": options}
        for name, folder in folders.items()
    ]
    models[0]["replicas"] = 2
    forwards = {"command": SERVER, "task": "forward"}
    server = {"name": "server", "engine": "command", "path": "media", "options": forwards}
    folder = tmp_path_factory.mktemp("instance")
    with Instance.up(folder, [*models, server, echo("echo")]) as running:
        running.until_settled(180)
        yield running


def post(instance: Instance, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{instance.url}{path}", json=body, timeout=120)


def expected(folder: Path, query: str, document: str) -> float:
    [logit] = made.plain(folder, query, document)
    return float(torch.sigmoid(torch.tensor(logit)))


def test_the_scores_are_those_of_the_library(instance: Instance, folders: dict[str, Path]) -> None:
    documents = DOCUMENTS[:6]
    scores = [expected(folders["reranker"], made.QUERY, one) for one in documents]
    body = {"model": "reranker", "query": made.QUERY, "documents": documents}
    results = post(instance, "/v1/rerank", **body).json()["results"]
    assert [one["relevance_score"] for one in results] == pytest.approx(
        sorted(scores, reverse=True), abs=2e-5
    )
    assert all(documents[one["index"]] == one["document"]["text"] for one in results)
    pairs = {"model": "reranker", "text_1": made.QUERY, "text_2": documents}
    data = post(instance, "/v1/score", **pairs).json()["data"]
    assert [one["score"] for one in data] == pytest.approx(scores, abs=2e-5)


def test_a_causal_reranker_has_the_scores_of_its_card(
    instance: Instance, folders: dict[str, Path]
) -> None:
    documents = DOCUMENTS[:6]
    pairs = [(causal.QUERY, document) for document in documents]
    for told in (None, causal.INSTRUCTION):
        body = {"model": "asks", "queries": causal.QUERY, "documents": documents}
        answer = post(instance, "/v1/score", **body, instruction=told).json()
        expected = causal.score_as_the_card(folders["asks"], pairs, told)
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=2e-5)
        assert answer["usage"]["prompt_tokens"] > 100 * len(documents)  # the prompt counts
    for model in ("reranker", "embedder"):
        body = {"model": model, "query": "a", "documents": ["b"], "instruction": "c"}
        refused = post(instance, "/v1/rerank", **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            f"instruction: the prompt of '{model}' has no place for one; leave it out"
        )
    long = {"model": "asks", "query": "a", "documents": ["lazy dog " * 5000]}
    assert post(instance, "/v1/rerank", **long).json()["error"]["code"] == "context_length_exceeded"
    assert post(instance, "/v1/rerank", **long, truncate_prompt_tokens=-1).status_code == 200


def test_classes_are_those_of_the_library(instance: Instance, folders: dict[str, Path]) -> None:
    texts = DOCUMENTS[:5]
    data = post(instance, "/v1/classify", model="classifier", input=texts).json()["data"]
    for text, one in zip(texts, data, strict=True):
        probs = torch.softmax(torch.tensor(made.plain(folders["classifier"], text)), 0)
        assert one["probs"] == pytest.approx(probs.tolist(), abs=2e-5)
        assert (one["label"], one["num_classes"]) == (f"name-{int(probs.argmax())}", 3)


def test_an_embedding_model_reranks_by_similarity(
    instance: Instance, folders: dict[str, Path]
) -> None:
    body = {"model": "embedder", "query": "the dog", "documents": ["a fox", "the dog"]}
    first, second = post(instance, "/v2/rerank", **body).json()["results"]
    assert (first["index"], first["relevance_score"]) == (1, pytest.approx(1.0))
    assert second["relevance_score"] < 0.999 and "document" not in first


def test_what_a_model_cannot_do_names_what_can(instance: Instance) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for model, path, body, able in (
        ("classifier", "/v1/rerank", {"query": "a", "documents": ["b"]}, "'reranker', 'embedder'"),
        ("embedder", "/v1/classify", {"input": "a"}, "'reranker', 'classifier', 'echo'"),
        ("reranker", "/v1/embeddings", {"input": "a"}, "'embedder', 'echo'"),
        ("reranker", "/v1/chat/completions", chat, "'echo'"),
    ):
        refused = post(instance, path, model=model, **body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "unsupported_parameter"), error
        assert f"models that do: {able}" in error["message"]


def test_a_servers_own_endpoint_gets_its_requests(instance: Instance) -> None:
    body = {"query": "a", "documents": ["b", "c"]}
    forwarded = post(instance, "/v1/rerank", model="server", **body)
    assert forwarded.json() == {
        "results": [{"index": 0, "relevance_score": 0.5}],
        "usage": {"total_tokens": 7},
    }
    # without a name it is for the default model, which can
    assert post(instance, "/v1/rerank", **body).json()["model"] == "reranker"


def test_all_of_it_is_documented_and_counted(instance: Instance) -> None:
    document = httpx.get(f"{instance.url}/openapi.json", timeout=60).json()
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify"):
        operation = document["paths"][path]["post"]
        assert operation["tags"] == ["scoring"] and "429" in operation["responses"]
    post(instance, "/v1/rerank", model="echo", query="a", documents=["b"])
    metrics = httpx.get(f"{instance.url}/metrics", timeout=60).text
    assert 'servekit_http_requests_total{path="/v1/rerank"' in metrics.replace("route=", "path=")
    tasks = {one["id"]: one["tasks"] for one in _models(instance)}
    assert tasks["reranker"] == ["classify", "score", "tokenize", "detokenize"]
    assert tasks["server"] == ["forward"]


def _models(instance: Instance) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{instance.url}/v1/models", timeout=60).json()["data"]
    return listed


@pytest.mark.lane("long")
def test_deaths_in_the_midst_lose_nothing(instance: Instance) -> None:
    body = {"model": "reranker", "query": made.QUERY, "documents": DOCUMENTS}
    whole = post(instance, "/v1/rerank", **body).json()["results"]
    assert len(whole) == len(DOCUMENTS)
    pids = [instance.replica(name).pid for name in ("reranker/0", "reranker/1")]
    url = f"{instance.url}/v1/rerank"

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120) as client:
            asked = [asyncio.create_task(client.post(url, json=body)) for _ in range(12)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert not all(one.done() for one in asked)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*asked)

    for answer in asyncio.run(ask()):
        assert answer.status_code == 200, answer.text
        for one, other in zip(whole, answer.json()["results"], strict=True):
            assert one["relevance_score"] == pytest.approx(other["relevance_score"], abs=2e-5)
    instance.until_settled(120)
