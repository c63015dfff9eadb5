"""Schedulers with servekit's extensions, imported by name in vLLM's engine core.

Grammars arrive in llguidance's own format, for which vLLM has no parameter. If a request continues
after tokens of another worker, these are at the end of its prompt, and its grammar is advanced over
them first.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from servekit.engines.vllm.core import causes
from servekit.engines.vllm.requests import EMITTED, GRAMMAR


class Ahead(AsyncScheduler):  # type: ignore[misc] # untyped here: vLLM is not installed
    """vLLM's scheduler that plans one step ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_grammars(self.structured_output_manager)
        causes.report_errors(self.vllm_config)


class InStep(Scheduler):  # type: ignore[misc] # as above
    """vLLM's scheduler for models that cannot be scheduled ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_grammars(self.structured_output_manager)
        causes.report_errors(self.vllm_config)


def take_grammars(manager: Any) -> None:
    """Make a `StructuredOutputManager` create grammars from a request's `extra_args`."""

    def create(request: Any) -> Any:
        brought = request.sampling_params.extra_args
        matcher = LLMatcher(manager.backend.ll_tokenizer, brought[GRAMMAR], log_level=0)
        size = manager.backend.vocab_size
        grammar = GuidanceGrammar(matcher, manager.backend.ll_tokenizer, size)
        if emitted := brought.get(EMITTED):
            grammar.accept_tokens(request.request_id, list(emitted))
        return grammar

    manager._create_grammar = create
