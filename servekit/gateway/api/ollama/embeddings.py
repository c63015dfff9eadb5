"""Ollama's embeddings: unit vectors of texts, cut to the model's context unless told otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from servekit.errors import ContextLengthExceeded
from servekit.gateway.api.ollama.response_types import OllamaEmbedding, OllamaEmbeddings
from servekit.gateway.api.openai.embeddings import GROUP, EmbeddingCalls, Input, numbers, shortened
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import Delta, SamplingParams

_encode = msgspec.json.Encoder().encode
#: The most tokens that a tokenizer adds to a text.
_ADDED = 8


class Embedding:
    """The calls of one embedding request. Raises the errors of `Router.queue_call`."""

    def __init__(
        self, router: Router, route: ModelQueue, key: str, inputs: Sequence[str], *, truncate: bool
    ) -> None:
        self._router = router
        self._route = route
        self._key = key
        self._inputs = inputs
        self._truncate = truncate
        self.began_s = time.monotonic()
        self._calls: list[InflightRequest] = []
        self._asked = self._make_calls(inputs)

    def cancel(self) -> None:
        """Cancel the calls: the client has disconnected."""
        self._asked.cancel()

    async def answers(self) -> list[Delta]:
        """Return the last delta of each call, in order. Raises RequestError."""
        try:
            return await self._asked.answers()
        except ContextLengthExceeded:
            if not self._truncate:
                raise
        self._asked = self._make_calls(await self._cut())
        return await self._asked.answers()

    def _make_calls(self, inputs: Sequence[Input]) -> EmbeddingCalls:
        groups = [inputs[at : at + GROUP] for at in range(0, len(inputs), GROUP)]
        self._calls = [self._call("embed", inputs=list(group)) for group in groups]
        return EmbeddingCalls(self._router, self._calls, None)

    def _call(self, task: str, text: str | None = None, **more: object) -> InflightRequest:
        return InflightRequest(
            self._route.status.name,
            SamplingParams(),
            prompt=text,
            stream=False,
            key=self._key,
            more={"task": task, **more},
        )

    async def _cut(self) -> list[Input]:
        """Return the inputs, with long ones as token ids that fit into the context.

        A cut keeps the last token: it may mark the end of the text.
        """
        info = self._route.status.info
        limit = 0 if info is None else info.max_context
        found: list[Input] = []
        for text in self._inputs:
            if len(text.encode()) + _ADDED <= limit:  # each token has at least one byte
                found.append(text)
                continue
            self._asked = EmbeddingCalls(self._router, [self._call("tokenize", text)], None)
            [answer] = await self._asked.answers()
            ids = answer.token_ids
            found.append(ids if len(ids) <= limit else ids[: limit - 1] + ids[-1:])
        return found

    # ---- the answer

    def encode_answer(self, model: str, dimensions: int, answers: list[Delta]) -> bytes:
        """Return the body of /api/embed, with the first `dimensions` numbers of each vector; 0:
        all.
        """
        started_s = min((call.started_s for call in self._calls), default=self.began_s)
        vectors = [vector for answer in answers for vector in answer.vectors]
        size = dimensions or 2**20
        return _encode(
            OllamaEmbeddings(
                model=model,
                embeddings=[numbers(shortened(vector, size)) for vector in vectors],
                total_duration=round((time.monotonic() - self.began_s) * 1e9),
                load_duration=round((started_s - self.began_s) * 1e9),
                prompt_eval_count=sum(answer.prompt_tokens for answer in answers),
            )
        )


def write_one(answers: list[Delta]) -> bytes:
    """Return the body of /api/embeddings, with the engine's vector; empty for an empty text."""
    vectors = [vector for answer in answers for vector in answer.vectors]
    return _encode(OllamaEmbedding(numbers(vectors[0]) if vectors else []))
