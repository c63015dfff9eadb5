"""A row of the batch: what it has to read, with whom it may run, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.request_row import Row
from servekit.protocol.messages import PromptToken, SamplingParams

CPU = torch.device("cpu")


class MadeUpAdapter:
    """An adapter with virtual tokens."""

    virtual_tokens, group, uid = 2, 7, 5


def make(prompt: list[int] | None = None, sampling: Sampling | None = None, **params: Any) -> Row:
    job = Job(1, prompt or [3, 4], SamplingParams(**params))
    return Row("k", job, sampling or Sampling(0.0), frozenset(), 9)


def with_adapter(row: Row) -> Row:
    adapter: Any = MadeUpAdapter()
    row.adapter = adapter
    return row


def test_virtual_tokens_come_before_the_prompt() -> None:
    row = make()
    row.completion = [9]
    assert (row.context, row.length, row.virtual_tokens) == ([3, 4, 9], 3, 0)
    adapted = with_adapter(make())
    assert (adapted.context, adapted.length) == ([0, 0, 3, 4], 4)


def test_rows_share_a_step_by_adapter_unless_one_is_alone() -> None:
    assert (make().group, make().adapter_uid) == (0, 0)
    adapted = with_adapter(make())
    assert (adapted.group, adapted.adapter_uid) == (7, 5)
    adapted.alone = 3
    assert adapted.group == -3


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (Sampling(0.0), True),
        (Sampling(1.0), False),
        (Sampling(0.0, logprobs=0), False),
        (Sampling(0.0, repetition_penalty=1.1), False),
        (Sampling(0.0, logit_bias=((1, 2.0),)), False),
    ],
)
def test_plain_is_the_best_of_unchanged_logits(sampling: Sampling, plain: bool) -> None:
    row = make(sampling=sampling)
    assert row.plain is plain
    row.noted = []
    assert not row.plain


def test_a_row_ends_itself_by_nan_or_its_grammar() -> None:
    class Grammar:
        is_complete, failure = False, ""

    row, grammar = make(), Grammar()
    assert not row.ends_itself
    row.broken = True
    assert row.ends_itself
    row = make()
    constraint: Any = grammar
    row.constraint = constraint
    assert not row.ends_itself
    grammar.is_complete = True
    assert row.ends_itself
    grammar.is_complete, grammar.failure = False, "no token fits"
    assert row.ends_itself


def test_a_row_that_is_to_run_alone_forgets_the_last_step() -> None:
    row = make(prompt_logprobs=1)
    assert row.unscored and len(row.prompt_scores) == 1
    row.note_prompt(4, float("nan"), 1, ())
    assert row.broken and not row.unscored
    row.noted = [torch.zeros(1), torch.ones(1)]
    row.run_alone(5, StepOutput(1, []))
    assert (row.alone, row.broken, row.scores) == (5, False, None)
    assert row.unscored and len(row.prompt_scores) == 1, "the prompt is scored again"
    assert len(row.noted) == 1
    told = make(prompt_logprobs=1)
    told.prompt_scores, told.unscored = [], False
    told.run_alone(6, StepOutput(1, [], prompt=[PromptToken(3, b"")]))
    assert told.unscored, "the output that had the scores is not emitted"
    plain = make()
    plain.run_alone(7, StepOutput(1, []))
    assert not plain.unscored and plain.prompt_scores == []


def test_biases_are_made_once() -> None:
    row = make(sampling=Sampling(0.0, logit_bias=((5, 1.5), (7, -2.0))))
    ids, values = row.bias(CPU)
    assert ids.tolist() == [5, 7] and values.tolist() == [1.5, -2.0]
    assert row.bias(CPU)[0] is ids
