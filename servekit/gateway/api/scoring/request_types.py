"""The bodies of rerank, score and classify."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from servekit.gateway.api.fields import Ignored, ModelName, doc, unserved
from servekit.gateway.api.openai.schema import INT32, Inputs, Timeout

MAX_TEXTS = 2048
#: The model of the examples.
RerankModel = Annotated[ModelName, Meta(examples=["bge-reranker"])]
ClassifyModel = Annotated[ModelName, Meta(examples=["sentiment"])]
Cut = Annotated[int, Meta(ge=1, le=INT32 - 1)]


class Document(msgspec.Struct):
    """A document as an object; other fields have no effect."""

    text: Annotated[str, doc("The text")]


Text = str | Document
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=1048576)]


class Pooled(msgspec.Struct, kw_only=True):
    """The fields of all endpoints."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32 - 1)] | None = None
    """Cut inputs to this many tokens, with special tokens and, of a reranker, both texts together,
    of which the longer one is cut first; -1: to as many as the model reads; 0: a text that is too
    long is refused, as it is by default. The beginning is kept."""
    use_activation: Annotated[bool, doc("false: the scores are the model's logits")] | None = None
    truncation_side: Annotated[Any, unserved("right", instead="the beginning is kept")] = None
    user: Annotated[str, doc("Has no effect")] | None = None
    priority: Ignored = None
    timeout_s: Timeout | None = None


class Paired(Pooled, kw_only=True):
    """The fields of rerank and score."""

    max_tokens_per_doc: Cut | None = None
    """Cut documents to this many tokens, special tokens not counted; by default all are kept."""
    max_tokens_per_query: Annotated[Any, unserved(0)] = None
    instruction: str | None = None
    """What makes a document relevant to the query, in place of the model's own instruction, for
    rerankers whose prompt has one, such as Qwen3-Reranker; others refuse it."""
    chat_template_kwargs: Annotated[Any, unserved({})] = None


class RerankRequest(Paired, kw_only=True):
    """Body of POST /v1/rerank, in the form of Cohere, Jina and vLLM."""

    query: Annotated[str, doc("The query", "What is the capital of France?", min_length=1)]
    documents: Annotated[
        list[Text],
        Meta(
            min_length=1,
            max_length=1048576,
            examples=[["Paris is the capital of France.", "Cats are small."]],
        ),
    ]
    """Up to 2048 texts, as strings or objects with a `text`."""
    model: RerankModel = ""
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Return only this many documents, the most relevant; by default all."""
    return_documents: bool | None = None
    """Return the texts as well. The default is true, and false for /v2/rerank, as Cohere has it."""
    rank_fields: Annotated[Any, unserved([], ["text"])] = None
    max_chunks_per_doc: Annotated[Any, unserved(instead="use max_tokens_per_doc")] = None


class ScoreRequest(Paired, kw_only=True):
    """Body of POST /v1/score, in vLLM's forms: one text with one, one with many, or as many."""

    text_1: Annotated[Texts | None, Meta(examples=["What is the capital of France?"])] = None
    """The query, or as many queries as documents."""
    text_2: Annotated[Texts | None, Meta(examples=[["Paris is.", "Cats are small."]])] = None
    """The documents, up to 2048."""
    queries: Annotated[Texts | None, doc("Another name of `text_1`")] = None
    documents: Annotated[Texts | None, doc("Another name of `text_2`")] = None
    items: Annotated[Texts | None, doc("Another name of `text_2`")] = None
    data_1: Annotated[Texts | None, doc("Another name of `text_1`")] = None
    data_2: Annotated[Texts | None, doc("Another name of `text_2`")] = None
    model: RerankModel = ""


class ClassifyRequest(Pooled, kw_only=True):
    """Body of POST /v1/classify."""

    input: Annotated[Inputs, Meta(examples=[["I like it.", "I do not."]])]
    """A text or token ids, or up to 2048 of either."""
    model: ClassifyModel = ""
    messages: Annotated[Any, unserved(instead="use input")] = None
    add_special_tokens: Annotated[Any, unserved(True)] = None
