"""Grammars in vLLM's engine core."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer

from servekit.config.engines.installed import is_there
from servekit.engines.text.structured_output import mask_words
from tests.unit.engines.harness import byte_level_tokenizer

pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.skipif(not is_there("vllm"), reason="no vLLM"),
]


def test_the_end_is_no_end_where_llguidance_gives_up() -> None:
    """Its mask then allows nothing but the end, which would pass for a complete text."""
    from servekit.engines.vllm.core.scheduler import StrictGrammar

    tokenizer = from_tokenizer(byte_level_tokenizer())
    limits = LLParserLimits(max_lexer_states=3000, verbose_errors=False)
    letters = LLMatcher.grammar_from_regex(r"\p{L}{1,100000}")
    matcher = LLMatcher(tokenizer, letters, log_level=0, limits=limits)
    grammar = StrictGrammar(matcher, tokenizer, tokenizer.vocab_size)
    mask = np.zeros(mask_words(tokenizer.vocab_size), np.int32)

    def allowed() -> set[int]:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return {*np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()}

    end, chance, followed = tokenizer.eos_token, random.Random(1), 0
    while others := sorted(allowed() - {end}):
        assert grammar.accept_tokens("a", [chance.choice(others)])
        followed += 1
    assert followed > 10 and allowed() == {end}
    assert not grammar.accept_tokens("a", [end])
