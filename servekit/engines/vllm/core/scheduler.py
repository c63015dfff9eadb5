"""Schedulers with servekit's extensions, imported by name in vLLM's engine core.

Grammars arrive in llguidance's own format, for which vLLM has no parameter. If a request continues
after tokens of another worker, these are at the end of its prompt, and its grammar is advanced over
them first.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLParserLimits
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from servekit.engines.text import structured_output
from servekit.engines.vllm.core import causes
from servekit.engines.vllm.requests import DONE, GRAMMAR

#: As wide as the worker's, which has accepted the grammar. The lexer may have more states, as its
#: text cannot go on with another one.
LIMITS = LLParserLimits(
    max_items_in_row=structured_output.LIMITS.max_items_in_row, verbose_errors=False
)


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


class StrictGrammar(GuidanceGrammar):  # type: ignore[misc] # as above
    """vLLM's grammar, whose request fails where llguidance gives up.

    vLLM would end the text there as if it were complete: the only token that a matcher in error
    allows is the end.
    """

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return super().accept_tokens(request_id, tokens) and not self.ll_matcher.is_error()


def take_grammars(manager: Any) -> None:
    """Make a `StructuredOutputManager` create grammars from a request's `extra_args`."""

    def create(request: Any) -> Any:
        brought = request.sampling_params.extra_args
        tokenizer = manager.backend.ll_tokenizer
        matcher = LLMatcher(tokenizer, brought[GRAMMAR], log_level=0, limits=LIMITS)
        grammar = StrictGrammar(matcher, tokenizer, manager.backend.vocab_size)
        if done := brought.get(DONE):
            grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-done:]))
        return grammar

    manager._create_grammar = create
