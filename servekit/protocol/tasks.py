"""Tasks in words, and the refusal of a request whose task its model does not serve."""

from __future__ import annotations

from collections.abc import Collection

from servekit.protocol.types import Capability, Modality, Task

_VERBS: dict[Task, str] = {
    "generate": "generate text",
    "embed": "make embeddings",
    "tokenize": "tokenise",
    "detokenize": "detokenise",
    "forward": "forward requests",
    "classify": "classify texts",
    "score": "score or rerank documents",
    "transcribe": "transcribe recordings",
}
#: Modalities in words.
NOUNS: dict[Modality, str] = {"images": "images", "audio": "recordings"}
#: Tasks of models that answer no texts with text.
_OTHER = ("embed", "classify", "score", "transcribe")


def explain_refusal(
    task: Task, engine: str, model: str, serves: Collection[Capability], able: str = ""
) -> str:
    """Return the sentence for a task that is not in `serves`; `able` names models that have it."""
    hint = _describe_model(task, serves)
    others = f"; models that do: {able}" if able else ""
    return f"model: the {engine} engine of '{model}' does not {_VERBS[task]}{hint}{others}"


def explain_no_media(modality: Modality, engine: str, model: str, able: str = "") -> str:
    """Return the sentence for a model that takes no images, or no recordings, in messages.

    `able` names models that do.
    """
    others = f"; models that do: {able}" if able else ""
    return f"messages: the {engine} engine of '{model}' takes no {NOUNS[modality]}{others}"


def explain_no_instruction(model: str) -> str:
    """Return the sentence for a model whose prompt has no place for an instruction."""
    return f"instruction: the prompt of '{model}' has no place for one; leave it out"


def _describe_model(task: Task, serves: Collection[Capability]) -> str:
    if tuple(serves) == ("forward",):
        return "; it serves its own endpoints only"
    if task not in ("generate", *_OTHER):
        return ""
    if task == "transcribe" and "generate" in serves:
        return "; it is a language model"
    if "generate" in serves and "embed" not in serves:
        return "; it is a language model without a pooling of its own"
    if "transcribe" in serves:
        return "; it is a speech model, for /v1/audio/transcriptions"
    if "score" in serves:
        return "; it is a reranker, for /v1/rerank and /v1/score"
    if "classify" in serves:
        return "; it is a classifier, for /v1/classify"
    return "; it is an embedding model, for /v1/embeddings" if "embed" in serves else ""
