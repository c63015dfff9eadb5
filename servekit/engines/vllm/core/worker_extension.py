"""vLLM's worker with servekit's extensions, for the processes that run the model.

vLLM imports it by name; one runs on each GPU, or on the CPU. vLLM's own worker cannot tell whether
there is enough memory to wake up, and cannot continue exactly where another worker stopped, neither
with a seed nor with penalties or bad words, which do not count tokens of the prompt. vLLM has two
model runners, which draw the noise of a seeded request differently:

    V1      from a generator that is seeded once and advances by a fixed amount per token. It is
            advanced to the position of the next token
    V2      by seed and position in the text, so the noise continues by itself
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from servekit.engines.api.base import TOLD_TO_FAIL
from servekit.engines.vllm.core import causes
from servekit.engines.vllm.requests import DONE

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


def take_up_begun_texts() -> None:
    """Make the second model runner count another worker's tokens for penalties and bad words.

    Its kernels count tokens, and compare them with bad words, from the end of the prompt on. Here
    that starts earlier, by the number of another worker's tokens. Other code sees the real prompt
    length.
    """
    from vllm.v1.worker.gpu.sample import sampler

    for name in ("BadWordsState", "PenaltiesState"):
        setattr(sampler, name, _with_begun_texts(getattr(sampler, name)))


def _with_begun_texts(kind: Any) -> Any:
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    class Begun(kind):  # type: ignore[misc] # untyped here
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.req_states: Any
            self._prompt_len = self.req_states.prompt_len
            self._begin = UvaBackedTensor(len(self._prompt_len.np), dtype=torch.int32)
            self.req_states = copy.copy(self.req_states)
            # from 0.31 on it is a frozen dataclass
            object.__setattr__(self.req_states, "prompt_len", self._begin)

        def add_request(self, at: int, params: Any) -> Any:
            done = (params.extra_args or {}).get(DONE, 0)
            self._begin.np[at] = self._prompt_len.np[at] - done
            return super().add_request(at, params)

        def apply_staged_writes(self) -> None:
            self._begin.copy_to_uva()
            super().apply_staged_writes()

    return Begun


def skip_rows_of_base() -> None:
    """Make LoRA on a CPU leave rows without an adapter alone; their index is -1.

    vLLM's function takes that for the last slot, whose adapter would change the text of requests
    without one that share its batch.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_adapted(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        adapted = inputs * (indices >= 0).unsqueeze(1)
        shrink(adapted, weights, output, indices, scaling)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_adapted


def keep_seeds(sampler: Any) -> None:
    """Make a `TopKTopPSampler` on a CPU draw by the seeds of all requests that have one.

    Up to 0.28 its way for CPUs ignores them if another request of the batch has none, and up to
    0.31 it compiles a function. Later it is right, and takes a third of the time of the other way.
    """
    if "compiled_random_sample" in sampler.forward_cpu.__code__.co_names:
        sampler.forward = sampler.forward_native


def expand_to_drafts() -> None:
    """Make the sampler of drafts on a CPU use each request's temperature, top-k and top-p.

    vLLM's function for CPUs writes them into a copy, and leaves uninitialised memory. In a step
    without drafts it looks for the largest top-k of none, and the error loses all requests.
    """
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def apply_sampling_constraints(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        if not len(logits):
            return logits
        constrained: torch.Tensor = constrain(logits, cu_num_draft_tokens, sampling_metadata)
        return constrained

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        lengths = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        values = x.masked_fill(x == replace_from, replace_to)
        return values.repeat_interleave(lengths, output_size=num_tokens)

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


class Rank(Worker):  # type: ignore[misc] # untyped here: vLLM is not installed
    """vLLM's worker of one GPU, or of the CPU."""

    _fails = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: dict[str, list[int]] = {}  # by request: tokens of another worker

    def lacking_bytes(self) -> int:
        """Return how many bytes of GPU memory are missing for the wake-up; 0 if there is enough.

        Called during sleep.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        free, _ = torch.cuda.mem_get_info()
        return max(0, int(CuMemAllocator.get_instance().get_current_usage()) - int(free))

    def fail_next_step(self) -> None:
        """Make the next step raise, for `servekit chaos`."""
        self._fails = True

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._fails:
            raise RuntimeError(TOLD_TO_FAIL)
        output = super().execute_model(scheduler_output)  # draws nothing: `sample_tokens` does
        if not self.use_v2_model_runner:
            self._take_up(scheduler_output)
        return output

    def _take_up(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            self._begun.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            brought = new.sampling_params and new.sampling_params.extra_args
            if brought and (done := brought.get(DONE)):
                self._begun[new.req_id] = new.prompt_token_ids[-done:]
                self._go_on(new.req_id, done)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self._unread_draw_nothing():
            return super().sample_tokens(grammar_output)

    def init_device(self) -> None:
        causes.report_errors(self.vllm_config)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        if self.use_v2_model_runner:
            take_up_begun_texts()
        if self._on_cpu and self.vllm_config.lora_config is not None:
            skip_rows_of_base()
        loaded = super().load_model(*args, **kwargs)
        if not self.use_v2_model_runner:
            for name in ("sampler", "rejection_sampler"):  # the latter of drafts, if there are any
                if (sampler := getattr(self.model_runner, name, None)) is not None:
                    whole = self._with_begun(sampler.apply_logits_processors)
                    sampler.apply_logits_processors = whole
        if self._on_cpu:
            keep_seeds(self.model_runner.sampler.topk_topp_sampler)
            expand_to_drafts()
        if self._on_cpu and self.vllm_config.lora_config is not None:
            runner = self.model_runner
            runner._get_prompt_logprobs_dict = self._one_prompt_at_a_time(
                runner._get_prompt_logprobs_dict
            )
        return loaded

    def _one_prompt_at_a_time(self, score: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
        """Wrap the scoring of prompts for adapters on a CPU.

        vLLM computes the logits of all prompt tokens while the adapter mapping has one token per
        request: the lengths differ, and the error loses all requests. So the mapping is set for
        each prompt before it is scored.
        """
        runner = self.model_runner

        def score_each(hidden: torch.Tensor, scheduled: Mapping[str, int]) -> dict[str, Any]:
            wanted: dict[str, int] = runner.num_prompt_logprobs
            scored: dict[str, Any] = {}
            for name in [name for name in wanted if name in scheduled]:
                request = runner.requests[name]
                left = len(request.prompt_token_ids) - 1 - request.num_computed_tokens
                if (rows := min(int(scheduled[name]), left)) > 0:
                    lora = request.lora_request
                    mapping = (lora.lora_int_id if lora else 0,) * rows
                    runner._set_active_loras(mapping, mapping, {lora} if lora else set())
                runner.num_prompt_logprobs = {name: wanted[name]}
                scored |= score(hidden, scheduled)
                if name not in runner.num_prompt_logprobs:  # the prompt is scored completely
                    del wanted[name]
            runner.num_prompt_logprobs = wanted
            return scored

        return score_each

    @property
    def _on_cpu(self) -> bool:
        return bool(current_platform.is_cpu())

    @contextmanager
    def _unread_draw_nothing(self) -> Iterator[None]:
        """Hide the generators of partly read prompts from a step, on a CPU.

        vLLM draws for them too and then rewinds the generator, which a CPU generator does not
        support: the error loses all requests.
        """
        if not self._on_cpu or self.use_v2_model_runner:
            yield
            return
        batch = self.model_runner.input_batch
        unread = np.nonzero(self.model_runner.discard_request_mask.np[: batch.num_reqs])[0]
        kept = {
            int(at): batch.generators.pop(int(at)) for at in unread if int(at) in batch.generators
        }
        try:
            yield
        finally:
            batch.generators.update(kept)

    def _with_begun(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that counts tokens for penalties and bad words: count another worker's."""

        def apply_to_whole_texts(logits: Any, metadata: Any, *more: Any) -> Any:
            if self._begun and metadata.output_token_ids:
                names = self.model_runner.input_batch.req_ids
                rows = zip(names, metadata.output_token_ids, strict=True)
                whole = [[*self._begun.get(name, ()), *row] for name, row in rows]
                metadata = dataclasses.replace(metadata, output_token_ids=whole)
            return apply(logits, metadata, *more)

        return apply_to_whole_texts

    def _go_on(self, name: str, done: int) -> None:
        generator = self.model_runner.requests[name].generator
        if generator is None:  # greedy
            return
        if not self._on_cpu:
            generator.set_offset(done * self._stride)
            return
        logits = torch.zeros(1, int(self.model_config.get_vocab_size()))
        for _ in range(done):  # draw as the sampler does: the amount is its implementation detail
            self.model_runner.sampler.topk_topp_sampler(logits.clone(), {0: generator}, None, None)

    @cached_property
    def _stride(self) -> int:
        """Amount by which one token's noise advances a generator; depends on vocabulary and GPU."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        size = int(self.model_config.get_vocab_size())
        torch.empty(size, device=self.device).exponential_(generator=generator)
        return int(generator.get_offset())
