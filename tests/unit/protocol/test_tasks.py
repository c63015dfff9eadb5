"""The sentences for a model that cannot do what was asked."""

from __future__ import annotations

from typing import get_args

import pytest

from servekit.protocol.tasks import (
    NOUNS,
    explain_no_instruction,
    explain_no_media,
    explain_refusal,
)
from servekit.protocol.types import MODALITIES, Capability, Task

NO_TASK: tuple[Capability, ...] = ("logprobs",)


def hint(task: Task, serves: tuple[Capability, ...]) -> str:
    """What a refusal tells of the model."""
    said = explain_refusal(task, "e", "m", serves)
    before, _, about = said.partition("; ")
    assert before.startswith("model: the e engine of 'm' does not ")
    return about


@pytest.mark.parametrize("task", get_args(Task))
def test_every_task_has_a_sentence_that_names_engine_and_model(task: Task) -> None:
    said = explain_refusal(task, "echo", "tiny", NO_TASK, "'other'")
    assert said.startswith("model: the echo engine of 'tiny' does not ")
    assert said.endswith("; models that do: 'other'")


def test_no_other_model_is_named_where_none_is_known() -> None:
    said = explain_refusal("embed", "echo", "tiny", ())
    assert said == "model: the echo engine of 'tiny' does not make embeddings"


@pytest.mark.parametrize(
    ("task", "serves", "told"),
    [
        ("generate", ("forward",), "it serves its own endpoints only"),
        ("tokenize", ("forward",), "it serves its own endpoints only"),
        ("tokenize", ("embed",), ""),
        ("forward", ("generate",), ""),
        ("transcribe", ("generate", "embed"), "it is a language model"),
        ("embed", ("generate",), "it is a language model without a pooling of its own"),
        ("score", ("generate",), "it is a language model without a pooling of its own"),
        ("score", ("generate", "embed"), "it is an embedding model, for /v1/embeddings"),
        ("generate", ("transcribe",), "it is a speech model, for /v1/audio/transcriptions"),
        ("generate", ("score", "classify"), "it is a reranker, for /v1/rerank and /v1/score"),
        ("embed", ("classify",), "it is a classifier, for /v1/classify"),
        ("generate", ("embed",), "it is an embedding model, for /v1/embeddings"),
        ("transcribe", ("embed",), "it is an embedding model, for /v1/embeddings"),
        ("generate", ("logprobs",), ""),
    ],
)
def test_a_refusal_says_what_the_model_is_for(
    task: Task, serves: tuple[Capability, ...], told: str
) -> None:
    assert hint(task, serves) == told


def test_a_model_that_takes_no_images_or_recordings() -> None:
    assert explain_no_media("audio", "echo", "tiny") == (
        "messages: the echo engine of 'tiny' takes no recordings"
    )
    assert explain_no_media("images", "echo", "tiny", "'eyes'") == (
        "messages: the echo engine of 'tiny' takes no images; models that do: 'eyes'"
    )
    assert set(NOUNS) == set(MODALITIES)


def test_a_model_that_takes_no_instruction() -> None:
    assert explain_no_instruction("tiny") == (
        "instruction: the prompt of 'tiny' has no place for one; leave it out"
    )
