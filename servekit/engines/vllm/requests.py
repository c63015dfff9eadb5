"""Conversion of jobs into requests of vLLM's engine core, and of its outputs into StepOutputs.

The core identifies a request by a string. It handles only the sampling that servekit does not do
itself: no stop strings and no text, which are the worker's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from servekit.engines.api.base import EmbedJob, Job, StepOutput
from servekit.engines.text.sampling_params import LEAST, Sampling
from servekit.engines.text.structured_output import Constraint, serialize_grammar
from servekit.errors import RequestError
from servekit.protocol.messages import PromptToken, TokenLogprob

#: Keys of a request's `extra_args`: its grammar, and how many tokens at the end of its prompt were
#: emitted by another worker.
GRAMMAR, DONE = "servekit_grammar", "servekit_done"
#: Values of `vllm.v1.engine.FinishReason`; the others are failures.
_STOP, _LENGTH, ABORT = 0, 1, 2
_MASK = 2**63 - 1
#: Limits of vLLM's second model runner per request; beyond them its core dies.
MOST_BIASES = 1024
MOST_STOP_TOKENS = 128
MOST_BAD_WORDS, MOST_BAD_WORD_TOKENS = 128, 1024
#: Leaves the best token alone, as 0 does in other engines; vLLM refuses that.
_LEAST_TOP_P = 1e-6
_TWICE = "each counts twice, with a space before it and without"


def make_request(name: str, ids: list[int], lora: Any, salt: str = "", **params: Any) -> Any:
    """Create an `EngineCoreRequest`, which shares prefixes with requests of the same `salt`.

    `params` is one of `sampling_params` and `pooling_params`, and `mm_features` of images.
    """
    from vllm.v1.engine import EngineCoreRequest

    fields = {"mm_features": None, "sampling_params": None, "pooling_params": None} | params
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=ids,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=salt or None,
        data_parallel_rank=None,
        **fields,
    )


class PoolingRequests:
    """A maker of the core's requests for the texts of a job, for the one task of the model."""

    def __init__(self, task: str, config: Any) -> None:
        """Store the task, "embed" or "classify", and whether the model has token types."""
        self.task = task
        types = getattr(config.get_text_config(), "type_vocab_size", None) or 0
        self._has_types = task == "classify" and types > 1

    def __call__(self, name: str, job: EmbedJob, place: int) -> Any:
        """Return the request for the text at `place` of a job."""
        from vllm.pooling_params import PoolingParams

        kind: Any = PoolingParams
        params = kind(task=self.task)
        if self.task == "classify":
            params.use_activation = not job.raw
        if self._has_types and job.types and (types := job.types[place]):
            # as vLLM's own front end sends them: the place of the first token of type 1
            first = types.index(1) if 1 in types else len(types)
            params.extra_kwargs = {"compressed_token_type_ids": first}
        return make_request(name, job.inputs[place], None, pooling_params=params)


def sampling_arguments(
    job: Job, sampling: Sampling, eos: Collection[int], primary_eos: int | None
) -> dict[str, Any]:
    """Return keyword arguments for `vllm.SamplingParams`.

    Tokens that another worker generated are a part of the prompt here; see `worker_extension`.
    Raises RequestError if too many tokens have a bias.
    """
    done = len(job.emitted)
    made: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": max(sampling.top_p, _LEAST_TOP_P),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": (job.params.max_tokens or 1) - done,
        "min_tokens": max(0, sampling.min_tokens - done),
        "ignore_eos": job.params.ignore_eos and job.constraint is None,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": job.params.prompt_logprobs,
        "detokenize": False,
        "skip_clone": True,
    }
    if job.params.seed is not None:
        made["seed"] = job.params.seed & _MASK  # -1 means no seed in vLLM
    own = set(job.params.stop_token_ids)
    ends = own if made["ignore_eos"] else own | (set(eos) - {primary_eos})
    if ends:
        made["stop_token_ids"] = sorted(ends)
    if bias := dict(sampling.logit_bias):
        if len(bias) > MOST_BIASES:
            raise RequestError(
                f"vLLM takes a logit_bias of at most {MOST_BIASES} tokens, and these are "
                f"{len(bias)}.",
                param="logit_bias",
            )
        made["logit_bias"] = bias
    if brought := _extra_arguments(job):
        made["extra_args"] = brought
    return made


def _extra_arguments(job: Job) -> dict[str, Any]:
    """Return the `extra_args` for servekit's extensions in the core."""
    brought: dict[str, Any] = {}
    if isinstance(job.constraint, Constraint):
        brought[GRAMMAR] = serialize_grammar(job.constraint.grammar)
    if job.emitted:
        brought[DONE] = len(job.emitted)
    return brought


def check_room(params: Any) -> None:
    """Raise RequestError for `SamplingParams` that exceed the limits of the second model runner."""
    words = params.bad_words_token_ids or ()
    for name, what, count, most in (
        ("stop_token_ids", "tokens", len(params.all_stop_token_ids), MOST_STOP_TOKENS),
        ("bad_words", f"words ({_TWICE})", len(words), MOST_BAD_WORDS),
        ("bad_words", "tokens", sum(map(len, words)), MOST_BAD_WORD_TOKENS),
    ):
        if count > most:
            sentence = f"vLLM takes {name} of at most {most} {what}, and these are {count}."
            raise RequestError(sentence, param=name)


def is_plain(output: Any) -> bool:
    """Return whether an `EngineCoreOutput` has only tokens, as most outputs do."""
    told = output.finish_reason is None and output.new_logprobs is None
    return told and output.prefill_stats is None and output.new_prompt_logprobs_tensors is None


def output_of(
    job_id: int, output: Any, eos: Collection[int], piece: Callable[[int], bytes]
) -> StepOutput:
    """Convert an `EngineCoreOutput` of a job; `piece` returns the bytes of a token."""
    ids: list[int] = output.new_token_ids
    logprobs = None
    if output.new_logprobs is not None:
        logprobs = convert_scores(output.new_logprobs, len(ids), piece)
    stats = output.prefill_stats  # reported once, with the first token
    cached = 0 if stats is None else int(stats.num_cached_tokens)
    match output.finish_reason:
        case None:
            return StepOutput(job_id, ids, logprobs=logprobs, cached_tokens=cached)
        case reason if reason == _LENGTH:
            return StepOutput(job_id, ids, "length", logprobs=logprobs, cached_tokens=cached)
        case reason if reason == _STOP:
            # vLLM names the token that ended it unless it was the primary one
            ended = output.stop_reason if isinstance(output.stop_reason, int) else -1
            if ids and (ids[-1] in eos or ids[-1] == ended):
                ids, logprobs = ids[:-1], logprobs and logprobs[:-1]
            return StepOutput(
                job_id, ids, "stop", logprobs=logprobs, cached_tokens=cached, stop_token=ended
            )
    return StepOutput(job_id, [], error=explain_end(output))


def explain_end(output: Any) -> str:
    """Return why vLLM gave a request up; before 0.33 only its log says so."""
    error = getattr(output, "error", None)
    if error is None:
        return "vLLM gave the request up; its log says why."
    return f"vLLM gave the request up: {error.message}"


def convert_scores(found: Any, count: int, piece: Callable[[int], bytes]) -> list[TokenLogprob]:
    """Convert vLLM's `LogprobsLists`, which has the chosen token first, then the best ones."""
    rows = zip(found.logprob_token_ids[:count], found.logprobs[:count], strict=True)
    return [
        _convert_score(np.asarray(ids).tolist(), np.asarray(logs).tolist(), piece)
        for ids, logs in rows
    ]


def prompt_scores(
    found: Any, prompt_ids: Sequence[int], piece: Callable[[int], bytes]
) -> list[PromptToken]:
    """Convert vLLM's `LogprobsTensors`, which begins with the second token of vLLM's prompt.

    That prompt includes tokens emitted by another worker, which are not part of the prompt here.
    """
    count = len(prompt_ids) - 1
    told = [PromptToken(prompt_ids[0], piece(prompt_ids[0]))]
    columns = (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
    for ids, logs, rank in zip(*(column[:count].tolist() for column in columns), strict=True):
        logs = [max(log, LEAST) if math.isfinite(log) else LEAST for log in logs]
        best = [(token, piece(token), log) for token, log in zip(ids[1:], logs[1:], strict=True)]
        told.append(PromptToken(ids[0], piece(ids[0]), logs[0], rank, tuple(best)))
    return told


def _convert_score(
    ids: Sequence[int], logs: Sequence[float], piece: Callable[[int], bytes]
) -> TokenLogprob:
    told = [max(log, LEAST) if math.isfinite(log) else LEAST for log in logs]
    best = tuple((piece(token), log) for token, log in zip(ids[1:], told[1:], strict=True))
    return TokenLogprob(piece(ids[0]), told[0], best)
