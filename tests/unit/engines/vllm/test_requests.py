"""What vLLM is asked for, and what is made of its answers; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import resolve_sampling
from servekit.engines.vllm import requests
from servekit.errors import RequestError
from servekit.protocol.messages import SamplingParams

EOS = frozenset({2, 3})


def asked(emitted: list[int] | None = None, **params: Any) -> dict[str, Any]:
    given = SamplingParams(**{"max_tokens": 16, "temperature": 0.7} | params)
    job = Job(1, [5, 6], given, emitted or [])
    return requests.sampling_arguments(job, resolve_sampling(given, {}, 1000), EOS, 2)


def piece(token: int) -> bytes:
    return b"<%d>" % token


def output(ids: list[int], reason: int | None = None, logprobs: Any = None, cached: int = 0) -> Any:
    stats = SimpleNamespace(num_cached_tokens=cached) if cached else None
    return SimpleNamespace(
        new_token_ids=ids,
        finish_reason=reason,
        stop_reason=None,
        new_logprobs=logprobs,
        prefill_stats=stats,
    )


def test_a_plain_request_draws_by_no_seed_of_its_own() -> None:
    found = asked()
    assert "seed" not in found and "logit_bias" not in found and "extra_args" not in found
    assert (found["temperature"], found["max_tokens"], found["detokenize"]) == (0.7, 16, False)


def test_what_is_cold_enough_is_greedy() -> None:
    assert asked(temperature=1e-7)["temperature"] == 0.0


def test_a_top_p_of_zero_leaves_the_best_token() -> None:
    """vLLM refuses it, and takes what is above."""
    assert 0 < asked(top_p=0.0)["top_p"] <= 1e-6
    assert (asked(top_p=0.5)["top_p"], asked()["top_p"]) == (0.5, 1.0)


def test_all_ends_but_the_first_are_stop_tokens_and_none_where_they_are_ignored() -> None:
    assert asked()["stop_token_ids"] == [3]
    assert "stop_token_ids" not in asked(ignore_eos=True)


def test_a_continuation_counts_what_there_is() -> None:
    found = asked([7, 7, 8], max_tokens=10, min_tokens=5, logit_bias=((7, 1.0),))
    assert (found["max_tokens"], found["min_tokens"]) == (7, 2)
    assert found["logit_bias"] == {7: 1.0}


def test_no_more_biases_than_there_is_room_for() -> None:
    """One more raises in the core's step, and all requests of the worker are lost."""
    most = requests.MOST_BIASES
    given = tuple((token, 1.0) for token in range(most))
    assert len(asked(logit_bias=given)["logit_bias"]) == most
    with pytest.raises(RequestError, match="at most 1024 tokens, and these are 1025"):
        asked(logit_bias=(*given, (most, 1.0)))


@pytest.mark.parametrize(
    ("stops", "words", "sentence"),
    [
        (128, [[1]] * 128, ""),
        (129, [], "stop_token_ids of at most 128 tokens, and these are 129"),
        (
            1,
            [[1]] * 129,
            r"128 words \(each counts twice, .*\), and these are 129",
        ),
        (1, [[1] * 512] * 2 + [[1]], "bad_words of at most 1024 tokens, and these are 1025"),
    ],
)
def test_no_more_stop_tokens_and_words_than_there_is_room_for(
    stops: int, words: list[list[int]], sentence: str
) -> None:
    params = SimpleNamespace(all_stop_token_ids=set(range(stops)), bad_words_token_ids=words)
    if not sentence:
        requests.check_room(params)
        return
    with pytest.raises(RequestError, match=sentence):
        requests.check_room(params)


def test_a_text_goes_on_after_so_many_tokens() -> None:
    assert "extra_args" not in asked(seed=5)
    later = asked([7, 8], seed=5)
    assert (later["seed"], later["extra_args"]) == (5, {requests.DONE: 2})


def test_each_seed_is_one_to_vllm_too() -> None:
    """Of which -1 means none."""
    given = [asked(seed=seed)["seed"] for seed in (-1, -2, 0, 2**63 - 3)]
    assert len(set(given)) == 4 and min(given) >= 0


@pytest.mark.parametrize(
    ("ids", "reason", "told", "finish"),
    [
        ([7], None, [7], None),
        ([7], 1, [7], "length"),
        ([2], 0, [], "stop"),
        ([7, 3], 0, [7], "stop"),
    ],
)
def test_what_a_step_brings(
    ids: list[int], reason: int | None, told: list[int], finish: str | None
) -> None:
    found = requests.output_of(4, output(ids, reason), EOS, piece)
    assert (found.id, found.token_ids, found.finish, found.error) == (4, told, finish, None)


@pytest.mark.parametrize("reason", [2, 3, 4])
def test_any_other_end_is_an_error(reason: int) -> None:
    found = requests.output_of(4, output([7], reason), EOS, piece)
    assert found.error and found.finish is None and not found.token_ids


def test_what_the_prompt_had_in_the_cache_is_told() -> None:
    assert requests.output_of(4, output([7], cached=48), EOS, piece).cached_tokens == 48
    assert requests.output_of(4, output([7]), EOS, piece).cached_tokens == 0


def test_logprobs_are_of_the_token_and_of_the_best() -> None:
    logprobs = SimpleNamespace(
        logprob_token_ids=np.array([[7, 9, 7], [2, 2, 1]]),
        logprobs=np.array([[-2.0, -1.0, -2.0], [-0.5, -0.5, -np.inf]], np.float32),
    )
    found = requests.output_of(4, output([7, 2], 0, logprobs), EOS, piece)
    assert found.logprobs is not None and len(found.logprobs) == 1  # the end is not told
    assert found.logprobs[0].token == b"<7>"
    assert found.logprobs[0].best == ((b"<9>", -1.0), (b"<7>", -2.0))
    [_, last] = requests.convert_scores(logprobs, 2, piece)
    assert last.best[1] == (b"<1>", -9999.0)


def test_a_failure_is_told_with_vllms_own_words_if_it_has_any() -> None:
    silent = output([], 3)
    assert requests.output_of(1, silent, EOS, piece).error == (
        "vLLM gave the request up; its log says why."
    )
    silent.error = SimpleNamespace(code="paused", message="the engine is paused", retryable=True)
    assert requests.output_of(1, silent, EOS, piece).error == (
        "vLLM gave the request up: the engine is paused"
    )
