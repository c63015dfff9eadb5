"""What has to be done inside the processes that run the model, which import this by name.

One runs on each GPU. Of vLLM's own worker two things are wanting: to say whether there is memory
to wake up in, and to go on with a seed where another worker stopped. vLLM draws a request's noise
from a generator that is seeded once; each token moves it on by the same step, so that it can be
put where the next token finds the very noise that it would have had.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from servekit.engines.vllm.requests import DONE


class Rank(Worker):  # type: ignore[misc] # untyped here: vLLM is not installed
    """vLLM's worker of one GPU."""

    def lacking_bytes(self) -> int:
        """How much less is free on the GPU than was given back by sleeping; 0 where it is enough.

        Asked for while it sleeps.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        free, _ = torch.cuda.mem_get_info()
        return max(0, int(CuMemAllocator.get_instance().get_current_usage()) - int(free))

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)  # draws nothing: `sample_tokens` does
        for new in scheduler_output.scheduled_new_reqs:
            brought = new.sampling_params and new.sampling_params.extra_args
            if brought and (done := brought.get(DONE)):
                self._go_on(new.req_id, int(done))
        return output

    def _go_on(self, name: str, done: int) -> None:
        if self.use_v2_model_runner:
            return  # vLLM's next one, off by default, draws by seed and position
        generator = self.model_runner.requests[name].generator
        if generator is not None:  # not greedy
            generator.set_offset(done * self._stride)

    @cached_property
    def _stride(self) -> int:
        """How far one token's noise moves a generator: it depends on the vocabulary and the GPU."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        size = int(self.model_config.get_vocab_size())
        torch.empty(size, device=self.device).exponential_(generator=generator)
        return int(generator.get_offset())
