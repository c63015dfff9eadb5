"""The endpoints of rerankers and classifiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import UNSET

from servekit.errors import RequestError
from servekit.gateway.api.endpoint import EndpointFactory
from servekit.gateway.api.openai.embeddings import list_inputs, numbers, pooled_calls
from servekit.gateway.api.openai.response import new_id
from servekit.gateway.api.openai.response_types import EmbeddingUsage
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.scoring.calls import (
    SCORING,
    Pairing,
    PooledCalls,
    find_model,
)
from servekit.gateway.api.scoring.request_types import (
    MAX_TEXTS,
    ClassifyRequest,
    Paired,
    Pooled,
    RerankRequest,
    ScoreRequest,
    Text,
    Texts,
)
from servekit.gateway.api.scoring.response_types import (
    Classes,
    Classified,
    MetaTokens,
    Ranked,
    RankedDocument,
    Reranked,
    RerankMeta,
    Score,
    Scores,
)
from servekit.gateway.http.asgi import encode_error
from servekit.gateway.http.response import Endpoint
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.task_check import known_info
from servekit.protocol.messages import Delta, PoolingParams, SamplingParams
from servekit.protocol.types import Task

_encode = msgspec.json.Encoder().encode
Parsed = tuple[PooledCalls, Callable[[list[Delta]], bytes]]
#: The tasks of the endpoints, one of which its model has to serve.
TASKS: dict[str, tuple[Task, ...]] = {
    "/v1/rerank": SCORING,
    "/v2/rerank": SCORING,
    "/rerank": SCORING,
    "/v1/score": SCORING,
    "/score": SCORING,
    "/v1/classify": ("classify",),
    "/classify": ("classify",),
}
_QUERIES = ("text_1", "queries", "data_1")
_DOCUMENTS = ("text_2", "documents", "items", "data_2")


class Scoring:
    """The endpoints, as ASGI routes by path."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        calls = EndpointFactory(max_body_bytes, encode_error).calls
        rerank, score, classify = calls(self._rerank), calls(self._score), calls(self._classify)
        self.routes: dict[str, Endpoint] = {
            "/v1/rerank": rerank,
            "/v2/rerank": calls(partial(self._rerank, returns=False)),
            "/rerank": rerank,
            "/v1/score": score,
            "/score": score,
            "/v1/classify": classify,
            "/classify": classify,
        }

    def _rerank(self, body: bytes, key: str, *, returns: bool = True) -> Parsed:
        request = decode(RerankRequest, body)
        documents = _list_texts(request.documents, "documents")
        pairing = _pair(request, [request.query], documents, ("query", "documents"))
        route = find_model(self._router, request.model, SCORING)
        if request.return_documents is not None:
            returns = request.return_documents

        def encode_ranking(answers: list[Delta]) -> bytes:
            ranked = sorted(enumerate(pairing.scores(answers)), key=lambda one: -one[1])
            results = [
                Ranked(at, score, RankedDocument(documents[at]) if returns else UNSET)
                for at, score in ranked[: request.top_n or len(ranked)]
            ]
            usage = _count_usage(answers)
            meta = RerankMeta(MetaTokens(usage.total_tokens))
            name = route.status.name
            return _encode(Reranked(new_id("rerank-"), "list", name, results, usage, meta))

        make = pairing.make_calls(route, self._router, key)
        return PooledCalls(self._router, route, make, request.timeout_s), encode_ranking

    def _score(self, body: bytes, key: str) -> Parsed:
        request = decode(ScoreRequest, body)
        first, queries = _read_texts(request, _QUERIES)
        second, documents = _read_texts(request, _DOCUMENTS)
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                f"{first}: {len(queries)} texts for {len(documents)}; give one, or as many",
                param=first,
            )
        pairing = _pair(request, queries, documents, (first, second))
        route = find_model(self._router, request.model, SCORING)

        def encode_scores(answers: list[Delta]) -> bytes:
            data = [Score(at, "score", one) for at, one in enumerate(pairing.scores(answers))]
            id, usage = new_id("score-"), _count_usage(answers)
            return _encode(Scores(id, "list", int(time.time()), route.status.name, data, usage))

        make = pairing.make_calls(route, self._router, key)
        return PooledCalls(self._router, route, make, request.timeout_s), encode_scores

    def _classify(self, body: bytes, key: str) -> Parsed:
        request = decode(ClassifyRequest, body)
        inputs = list_inputs(request.input)
        route = find_model(self._router, request.model, ("classify",))
        asked = PoolingParams(raw=request.use_activation is False)
        model = route.status.name
        calls = pooled_calls(model, key, "classify", _params(request), inputs, asked)

        def encode_labels(answers: list[Delta]) -> bytes:
            info = known_info(route)
            labels = () if info is None else info.labels
            vectors = [numbers(one) for answer in answers for one in answer.vectors]
            data = [_classify_one(at, scores, labels) for at, scores in enumerate(vectors)]
            id, usage = new_id("classify-"), _count_usage(answers)
            return _encode(Classes(id, "list", int(time.time()), model, data, usage))

        return PooledCalls(self._router, route, lambda _: calls, request.timeout_s), encode_labels


def _params(request: Pooled) -> SamplingParams:
    return SamplingParams(truncate_prompt=request.truncate_prompt_tokens or 0)


def _pair(
    request: Paired, queries: list[str], documents: list[str], names: tuple[str, str]
) -> Pairing:
    raw, most = request.use_activation is False, request.max_tokens_per_doc or 0
    told = request.instruction or ""
    return Pairing(queries, documents, _params(request), raw, most, names, told)


def _read_texts(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the name that the client uses, and the texts. Raises RequestError."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        param = given[1] if given else names[0]
        raise RequestError(f"{param}: give exactly one of {', '.join(names)}", param=param)
    return given[0], _list_texts(getattr(request, given[0]), given[0])


def _list_texts(given: Texts, name: str) -> list[str]:
    texts: list[Text] = given if isinstance(given, list) else [given]
    if len(texts) > MAX_TEXTS:
        raise RequestError(
            f"{name}: {len(texts)} are over the limit of {MAX_TEXTS} in one request", param=name
        )
    return [one if isinstance(one, str) else one.text for one in texts]


def _classify_one(at: int, scores: list[float], labels: tuple[str, ...]) -> Classified:
    best = max(range(len(scores)), key=scores.__getitem__)
    return Classified(at, labels[best] if best < len(labels) else None, scores, len(scores))


def _count_usage(answers: list[Delta]) -> EmbeddingUsage:
    used = sum(answer.prompt_tokens for answer in answers)
    return EmbeddingUsage(used, used)


_operation = partial(Operation, tag="scoring")
_RERANK = "Documents in the order of their relevance to a query"
OPERATIONS = (
    _operation("/v1/rerank", _RERANK, RerankRequest, Reranked),
    _operation("/v2/rerank", f"{_RERANK}, without the texts", RerankRequest, Reranked),
    _operation("/rerank", "Another path of /v1/rerank", RerankRequest, Reranked),
    _operation("/v1/score", "The relevance of pairs of texts", ScoreRequest, Scores),
    _operation("/score", "Another path of /v1/score", ScoreRequest, Scores),
    _operation("/v1/classify", "The classes of texts", ClassifyRequest, Classes),
    _operation("/classify", "Another path of /v1/classify", ClassifyRequest, Classes),
)
