"""What has to be done inside vLLM's engine core, which imports this by name.

A request that goes on after tokens of another worker has them at the end of its prompt. A grammar
starts anew with each request, and has to be led through them first.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from servekit.engines.vllm.requests import EMITTED


class Ahead(AsyncScheduler):  # type: ignore[misc] # untyped here: vLLM is not installed
    """vLLM's, which schedules a step ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lead(self.structured_output_manager)


class InStep(Scheduler):  # type: ignore[misc] # as above
    """vLLM's for what cannot be scheduled ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lead(self.structured_output_manager)


def lead(grammars: Any) -> None:
    """Have each grammar that is made led through the tokens that its request goes on after."""
    make = grammars._create_grammar

    def make_and_lead(request: Any) -> Any:
        grammar = make(request)
        emitted = (request.sampling_params.extra_args or {}).get(EMITTED)
        if emitted and not grammar.accept_tokens(request.request_id, list(emitted)):
            raise ValueError("the text so far does not keep to the grammar")
        return grammar

    grammars._create_grammar = make_and_lead
