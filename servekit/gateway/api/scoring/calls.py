"""The calls of one request for scores or classes.

A reranker reads each document together with its query. An embedding model reads them apart, and
the score is the cosine similarity of their vectors, which is computed here.
"""

from __future__ import annotations

import array
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from servekit.errors import ClientClosed, Unsupported
from servekit.gateway.api.openai.embeddings import EmbeddingCalls, pooled_calls, split_groups
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.task_check import known_info, serves_any, unable
from servekit.protocol.messages import Delta, ModelInfo, PoolingParams, SamplingParams
from servekit.protocol.tasks import explain_no_instruction
from servekit.protocol.types import Task

#: The tasks by which a model can score documents.
SCORING: tuple[Task, ...] = ("score", "embed")
MakeCalls = Callable[[ModelInfo | None], list[InflightRequest]]


class PooledCalls:
    """The calls of one HTTP request, made once the model's tasks are known.

    They are not known before the first load of a model that is loaded on demand. Raises the errors
    of `Router.queue_call`.
    """

    def __init__(
        self, router: Router, route: ModelQueue, make: MakeCalls, timeout_s: float | None
    ) -> None:
        self._router = router
        self._route = route
        self._make = make
        self._timeout_s = timeout_s
        self._cancelled = False
        self._opened: EmbeddingCalls | None = None
        if known_info(route) is not None or route.status.residence is None:
            self._opened = self._open()

    def _open(self) -> EmbeddingCalls:
        calls = self._make(known_info(self._route))
        return EmbeddingCalls(self._router, calls, self._timeout_s)

    def cancel(self) -> None:
        self._cancelled = True
        if self._opened is not None:
            self._opened.cancel()

    async def answers(self) -> list[Delta]:
        """Return the last delta of each call, in order. Raises RequestError."""
        if self._opened is None:
            status = self._route.status
            self._router.access.require_model(status.name, base_of(self._route))
            await self._router.demand.until_known(self._route, self._timeout_s)
            if self._cancelled:
                raise ClientClosed("the request was cancelled")
            self._opened = self._open()
        return await self._opened.answers()


def find_model(router: Router, model: str, wanted: tuple[Task, ...]) -> ModelQueue:
    """Return the queue of a model; without a name, of the first that serves one of the tasks."""
    route = router.find(model)
    if model or serves_any(route, wanted):
        return route
    return next((one for one in router.models() if serves_any(one, wanted)), route)


@dataclass(frozen=True)
class Pairing:
    """Documents to be scored, with one query for all or one for each, and how they are read."""

    queries: list[str]
    documents: list[str]
    params: SamplingParams
    raw: bool
    most_tokens: int  # of a document; 0: all
    names: tuple[str, str]  # the client's names of queries and documents
    instruction: str = ""

    def make_calls(self, route: ModelQueue, router: Router, key: str) -> MakeCalls:
        def make(info: ModelInfo | None) -> list[InflightRequest]:
            serves = (*SCORING, "instruction") if info is None else info.serves
            if self.instruction and "instruction" not in serves:
                said = explain_no_instruction(route.status.name)
                router.access.require_model(route.status.name, base_of(route))
                raise Unsupported(said, param="instruction")
            if "score" in serves:
                return self._score(route.status.name, key)
            if info is not None and "embed" not in serves:
                router.access.require_model(route.status.name, base_of(route))
                raise unable(route, info, SCORING, router.models())
            name, document = self.names
            embed = partial(pooled_calls, route.status.name, key, "embed", self.params)
            asked = PoolingParams(name=document, input_tokens=self.most_tokens)
            queries = embed(self.queries, PoolingParams(name=name))
            return [*queries, *embed(self.documents, asked)]

        return make

    def _score(self, model: str, key: str) -> list[InflightRequest]:
        asked = PoolingParams(
            self.raw, self.most_tokens, self.names[1], instruction=self.instruction
        )
        calls = pooled_calls(model, key, "score", self.params, self.documents, asked)
        for call, (_, queries) in zip(calls, self._split_queries(len(calls)), strict=True):
            call.more["queries"] = [*queries]
        return calls

    def _split_queries(self, count: int) -> Iterable[tuple[int, Sequence[str]]]:
        """Return the queries of each of `count` calls."""
        return split_groups(self.queries) if len(self.queries) > 1 else [(0, self.queries)] * count

    def scores(self, answers: Sequence[Delta]) -> list[float]:
        """Return the scores of the documents, from the answers of the calls."""
        vectors = [array.array("f", one) for answer in answers for one in answer.vectors]
        if len(vectors) == len(self.documents):  # not so with vectors of queries among them
            return [vector[0] for vector in vectors]
        count = len(self.queries)
        queries, documents = vectors[:count], vectors[count:]
        if count == 1:
            queries *= len(documents)
        return list(map(compute_cosine, queries, documents))


def compute_cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors; 0 if one of them is zero."""
    length = math.sqrt(_dot(one, one) * _dot(other, other))
    return _dot(one, other) / length if length else 0.0


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, one, other))
