"""The answers of rerank, score and classify."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import Answering, Index, UnixTime, doc
from servekit.gateway.api.openai.response_types import EmbeddingUsage


class RankedDocument(Struct):
    """A document that was ranked."""

    text: Annotated[str, doc("The text", "Paris is the capital of France.")]


class Ranked(Struct):
    """The relevance of a document."""

    index: Annotated[int, doc("The place of the document in the request")]
    relevance_score: Annotated[float, doc("The score; the highest is the first", 0.98)]
    document: RankedDocument | UnsetType = UNSET
    """The document, unless `return_documents` is false."""


class MetaTokens(Struct):
    """Tokens, as Cohere names them."""

    input_tokens: Annotated[int, doc("Tokens that were read", 24)]


class RerankMeta(Struct):
    """The token counts, as Cohere has them."""

    tokens: Annotated[MetaTokens, doc("Token counts")]


class Reranked(Struct):
    """The answer of /v1/rerank."""

    id: Annotated[str, doc("The id of the answer", "rerank-7b35f4db8396fb0f9c5bde0e")]
    object: Literal["list"]
    model: Answering
    results: Annotated[list[Ranked], doc("The documents, the most relevant first")]
    usage: Annotated[EmbeddingUsage, doc("Token counts")]
    meta: Annotated[RerankMeta, doc("The same, as Cohere has it")]


class Score(Struct):
    """The score of a pair of texts."""

    index: Index
    object: Literal["score"]
    score: Annotated[float, doc("The score", 0.98)]


class Scores(Struct):
    """The answer of /v1/score."""

    id: Annotated[str, doc("The id of the answer", "score-7b35f4db8396fb0f9c5bde0e")]
    object: Literal["list"]
    created: UnixTime
    model: Answering
    data: Annotated[list[Score], doc("The scores, in the order of the pairs")]
    usage: Annotated[EmbeddingUsage, doc("Token counts")]


class Classified(Struct):
    """The class of one input."""

    index: Index
    label: Annotated[str | None, doc("The label with the highest score", "POSITIVE")]
    probs: Annotated[list[float], doc("The scores of all labels", [0.03, 0.97])]
    num_classes: Annotated[int, doc("The number of labels", 2)]


class Classes(Struct):
    """The answer of /v1/classify."""

    id: Annotated[str, doc("The id of the answer", "classify-7b35f4db8396fb0f9c5bde0e")]
    object: Literal["list"]
    created: UnixTime
    model: Answering
    data: Annotated[list[Classified], doc("The classes, in the order of the inputs")]
    usage: Annotated[EmbeddingUsage, doc("Token counts")]
