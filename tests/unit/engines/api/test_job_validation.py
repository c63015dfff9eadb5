"""What no job may have when it enters an engine's loop, and the limits that are just allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from structlog.testing import capture_logs

from servekit.engines.api.base import EmbedJob, Job
from servekit.engines.api.job_validation import (
    Limits,
    check_inputs,
    check_job,
    usable_defaults,
)
from servekit.errors import ContextLengthExceeded, RequestError
from servekit.protocol.messages import Grammar, SamplingParams

LIMITS = Limits(vocab_size=100, max_context=10, head_size=90)


def make_job(
    prompt: list[int] | None = None, emitted: list[int] | None = None, **params: Any
) -> Job:
    given = SamplingParams(**{"max_tokens": 4} | params)
    return Job(1, [1, 2, 3] if prompt is None else prompt, given, emitted or [])


@pytest.mark.parametrize(
    "job",
    [
        make_job(),
        make_job([0, 99]),
        make_job(emitted=[0, 89]),
        make_job([1] * 6),
        make_job([1] * 9, max_tokens=1),
        make_job(temperature=0.0, top_p=1.0, min_p=0.0, top_k=0),
        make_job(temperature=1e6, top_p=0.0, min_p=1.0),
        make_job(presence_penalty=-100.0, frequency_penalty=100.0, repetition_penalty=1e-6),
        make_job(logprobs=1000, min_tokens=0),
        make_job(logit_bias=((0, -100.0), (89, 100.0))),
        make_job(stop_token_ids=(0, 99)),
    ],
)
def test_the_limits_themselves_are_allowed(job: Job) -> None:
    check_job(job, LIMITS)


@pytest.mark.parametrize(
    ("job", "param", "said"),
    [
        (make_job([]), "prompt", "The prompt is empty; the model needs at least one token."),
        (make_job([5, 100]), "prompt", "Token id 100 is not in the model's vocabulary (0 to 99)."),
        (make_job([-1]), "prompt", "Token id -1 is not in the model's vocabulary (0 to 99)."),
        (
            make_job(emitted=[90]),
            "prompt",
            "Token id 90 is not in the model's vocabulary (0 to 89).",
        ),
        (make_job(max_tokens=0), "max_tokens", "max_tokens must be at least 1."),
        (make_job(max_tokens=None), "max_tokens", "max_tokens must be at least 1."),
        (make_job(temperature=math.nan), "temperature", "temperature must be between 0 and 1e+06."),
        (make_job(temperature=-0.1), "temperature", "temperature must be between 0 and 1e+06."),
        (make_job(top_p=1.1), "top_p", "top_p must be between 0 and 1."),
        (make_job(top_k=-1), "top_k", "top_k must be between 0 and inf."),
        (make_job(min_p=-0.1), "min_p", "min_p must be between 0 and 1."),
        (
            make_job(repetition_penalty=0.0),
            "repetition_penalty",
            "repetition_penalty must be between 1e-06 and 1e+06.",
        ),
        (
            make_job(presence_penalty=100.5),
            "presence_penalty",
            "presence_penalty must be between -100 and 100.",
        ),
        (make_job(logprobs=1001), "logprobs", "logprobs must be between 0 and 1000."),
        (
            make_job(logit_bias=((1, 0.0), (90, 0.0))),
            "logit_bias",
            "logit_bias names token 90, which the model can read but not generate (0 to 89).",
        ),
        (
            make_job(logit_bias=((100, 0.0),)),
            "logit_bias",
            "logit_bias names token 100, not in its vocabulary (0 to 89).",
        ),
        (
            make_job(logit_bias=((-1, 0.0),)),
            "logit_bias",
            "logit_bias names token -1, not in its vocabulary (0 to 89).",
        ),
        (
            make_job(logit_bias=((1, math.nan),)),
            "logit_bias",
            "logit_bias must be between -100 and 100.",
        ),
        (
            make_job(logit_bias=((1, 100.1),)),
            "logit_bias",
            "logit_bias must be between -100 and 100.",
        ),
        (
            make_job(stop_token_ids=(1, 100)),
            "stop_token_ids",
            "stop_token_ids names token 100, which is not in the model's vocabulary (0 to 99).",
        ),
    ],
)
def test_what_would_end_the_loop_for_all_is_refused(job: Job, param: str, said: str) -> None:
    with pytest.raises(RequestError) as error:
        check_job(job, LIMITS)
    assert (error.value.param, error.value.message) == (param, said)


def test_prompt_and_answer_fit_the_context_together() -> None:
    with pytest.raises(ContextLengthExceeded) as error:
        check_job(make_job([1] * 7), LIMITS)
    said = "7 prompt tokens and max_tokens 4 exceed this model's context of 10 tokens."
    assert (error.value.param, error.value.message) == ("max_tokens", said)
    for length in (10, 11):
        with pytest.raises(ContextLengthExceeded) as error:
            check_job(make_job([1] * length, max_tokens=1), LIMITS)
        assert error.value.param == "prompt"
        assert error.value.message.startswith(f"The prompt has {length} tokens, and this model's")


def test_an_engine_that_fills_its_context_takes_a_prompt_of_that_length_for_one_token() -> None:
    fills = Limits(100, 10, fills=True)
    check_job(make_job([1] * 10, max_tokens=1), fills)
    for length, tokens in ((10, 2), (11, 1)):
        with pytest.raises(ContextLengthExceeded):
            check_job(make_job([1] * length, max_tokens=tokens), fills)


def test_virtual_tokens_of_an_adapter_take_room() -> None:
    check_job(make_job([1] * 5), LIMITS, virtual_tokens=1)
    with pytest.raises(ContextLengthExceeded, match="context of 9 tokens"):
        check_job(make_job([1] * 6), LIMITS, virtual_tokens=1)


def test_without_a_head_of_its_own_size_the_whole_vocabulary_is_generated() -> None:
    check_job(make_job(emitted=[99], logit_bias=((99, 1.0),)), Limits(100, 10))


def test_a_grammar_comes_compiled() -> None:
    job = make_job(grammar=Grammar("json_schema", "{}"))
    with pytest.raises(ValueError, match="constrain"):
        check_job(job, LIMITS)
    job.constraint = object()
    check_job(job, LIMITS)
    plain = make_job()
    plain.constraint = object()
    with pytest.raises(ValueError, match="constrain"):
        check_job(plain, LIMITS)


def test_texts_to_embed_have_tokens_of_the_vocabulary_and_fit() -> None:
    check_inputs(EmbedJob(1, [[99], [1] * 10]), LIMITS)
    for length in (0, 11):
        with pytest.raises(ContextLengthExceeded) as error:
            check_inputs(EmbedJob(1, [[1], [1] * length]), LIMITS)
        said = f"An input has {length} tokens; it must have 1 to 10."
        assert (error.value.param, error.value.message) == ("input", said)
    with pytest.raises(RequestError, match="Token id 100"):
        check_inputs(EmbedJob(1, [[100]]), LIMITS)


def test_defaults_that_no_request_might_have_are_left_out() -> None:
    usable = {"temperature": 0.7, "top_k": 20, "top_p": 1, "min_p": 0.1, "repetition_penalty": 1.1}
    assert usable_defaults(usable) == usable
    assert usable_defaults({"temperature": -0.1, "top_k": -1}) == {"temperature": 0, "top_k": 0}
    with capture_logs() as events:
        unusable = {"temperature": "hot", "top_k": math.nan, "top_p": -0.1, "min_p": 2.0}
        assert usable_defaults(unusable | {"repetition_penalty": 0.0}) == {}
    assert [event["name"] for event in events] == [*unusable, "repetition_penalty"]
