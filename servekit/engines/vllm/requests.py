"""Jobs as vLLM's engine core takes them, and what it brings as the worker takes it.

The core knows a request by a text. Of its sampling only what servekit does not do itself is used:
no stop strings and no text, for both are the worker's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from servekit.engines.base import Job, StepOutput
from servekit.engines.choosing import LEAST, Sampling
from servekit.engines.grammar import Constraint, serialized
from servekit.wire.messages import TokenLogprob

#: Under which a request's `extra_args` hold its grammar, the tokens that it goes on after, and for
#: its noise how many they are.
GRAMMAR, EMITTED, DONE = "servekit_grammar", "servekit_emitted", "servekit_done"
#: Of `vllm.v1.engine.FinishReason`; the others are failures.
_STOP, _LENGTH = 0, 1
_MASK = 2**63 - 1


def request(name: str, ids: list[int], lora: Any, **params: Any) -> Any:
    """An `EngineCoreRequest`; one of `sampling_params` and `pooling_params` is given."""
    from vllm.v1.engine import EngineCoreRequest

    fields = {"sampling_params": None, "pooling_params": None} | params
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=ids,
        mm_features=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
        **fields,
    )


def sampling_arguments(
    job: Job, sampling: Sampling, eos: Collection[int], primary_eos: int | None
) -> dict[str, Any]:
    """Keyword arguments of `vllm.SamplingParams`.

    Tokens that another worker has produced are a part of the prompt here. Penalties of the
    completion count them by a bias, exactly until a token occurs again; a seed's noise goes on
    after them (`ranks`).
    """
    done = len(job.emitted)
    made: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": (job.params.max_tokens or 1) - done,
        "min_tokens": max(0, sampling.min_tokens - done),
        "ignore_eos": job.params.ignore_eos and job.constraint is None,
        "logprobs": sampling.logprobs,
        "detokenize": False,
        "skip_clone": True,
    }
    if job.params.seed is not None:
        made["seed"] = job.params.seed & _MASK  # to vLLM -1 is none at all
    if not made["ignore_eos"]:
        made["stop_token_ids"] = sorted(set(eos) - {primary_eos})
    if bias := _bias(job, sampling):
        made["logit_bias"] = bias
    if brought := _brought(job):
        made["extra_args"] = brought
    return made


def _brought(job: Job) -> dict[str, Any]:
    """What is for servekit's own parts in the core."""
    brought: dict[str, Any] = {}
    if isinstance(job.constraint, Constraint):
        brought[GRAMMAR] = serialized(job.constraint.grammar)
        if job.emitted:
            brought[EMITTED] = job.emitted
    if job.emitted and job.params.seed is not None:
        brought[DONE] = len(job.emitted)
    return brought


def _bias(job: Job, sampling: Sampling) -> dict[int, float]:
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(job.emitted).items():
            penalty = sampling.presence_penalty + count * sampling.frequency_penalty
            bias[token] = bias.get(token, 0.0) - penalty
    return bias


def is_plain(output: Any) -> bool:
    """Whether an `EngineCoreOutput` brings tokens and nothing else, as most of most steps do."""
    told = output.finish_reason is None and output.new_logprobs is None
    return told and output.prefill_stats is None


def output_of(
    job_id: int, output: Any, eos: Collection[int], piece: Callable[[int], bytes]
) -> StepOutput:
    """What an `EngineCoreOutput` brings to a job; `piece` has the bytes of a token."""
    ids: list[int] = output.new_token_ids
    logprobs = None
    if output.new_logprobs is not None:
        logprobs = scores(output.new_logprobs, len(ids), piece)
    stats = output.prefill_stats  # told once, with the first token
    cached = 0 if stats is None else int(stats.num_cached_tokens)
    match output.finish_reason:
        case None:
            return StepOutput(job_id, ids, logprobs=logprobs, cached_tokens=cached)
        case reason if reason == _LENGTH:
            return StepOutput(job_id, ids, "length", logprobs=logprobs, cached_tokens=cached)
        case reason if reason == _STOP:
            if ids and ids[-1] in eos:
                ids, logprobs = ids[:-1], logprobs and logprobs[:-1]
            return StepOutput(job_id, ids, "stop", logprobs=logprobs, cached_tokens=cached)
    return StepOutput(job_id, [], error="vLLM gave the request up; its log says why.")


def scores(found: Any, count: int, piece: Callable[[int], bytes]) -> list[TokenLogprob]:
    """From vLLM's `LogprobsLists`: of each token its own first, and then the best."""
    rows = zip(found.logprob_token_ids[:count], found.logprobs[:count], strict=True)
    return [
        _score(np.asarray(ids).tolist(), np.asarray(logs).tolist(), piece) for ids, logs in rows
    ]


def _score(
    ids: Sequence[int], logs: Sequence[float], piece: Callable[[int], bytes]
) -> TokenLogprob:
    told = [max(log, LEAST) if math.isfinite(log) else LEAST for log in logs]
    best = tuple((piece(token), log) for token, log in zip(ids[1:], told[1:], strict=True))
    return TokenLogprob(piece(ids[0]), told[0], best)
