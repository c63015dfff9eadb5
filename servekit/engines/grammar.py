"""Text that keeps to a grammar: which tokens may come next, by llguidance.

A grammar is compiled once, in a thread of the worker's, and kept; each request gets a copy of its
own state. In every step the engine's thread asks for the set of tokens that may come next, for
those rows alone that have a grammar. That takes a tenth of a millisecond and needs no device, so on
a GPU it is done while the forward pass is still being computed.

Why llguidance rather than xgrammar, which does the same: it has no dependencies (xgrammar needs
torch, triton and tvm-ffi; an engine without torch could not use it), a schema compiles in about 1
ms where xgrammar took 132 (vocabulary of 49 000), it bounds the work that a regular expression can
make in units of its own rather than in time, and it works without the GIL.

What explodes does so at compile time or, mostly, in the first steps, which are tried at compile
time too. The limits below keep all that under about 0.1 s, and later steps too.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from servekit.errors import RequestError
from servekit.wire.messages import Grammar

#: Longest grammar, in bytes of its text.
MAX_BYTES = 256 * 1024
#: Compiled grammars kept.
KEPT = 64
#: White space between the parts of JSON: enough to indent it, too little for a small model to go
#: on with for ever.
WHITESPACE = r"[ \n\r\t]{0,40}"
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # an enumeration of ten thousand values fits
    max_items_in_row=10_000,  # an object of a thousand optional properties fits
    step_lexer_fuel=50_000,
    max_lexer_states=30_000,  # one or two kB each
    verbose_errors=False,  # they would repeat the request's text
)
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
#: What llguidance says of its own: places in a text that it has made, states, nothing of use.
_NOISE = re.compile(
    r"<non-verbose/>|^at \d+\(\d+\): |\(in regex\)|json-schema:///|^\s*\d+ \|.*$|^\s*\^\s*$",
    re.MULTILINE,
)
_UNSATISFIABLE = "no text fits it"
_PLAINLY = {
    "NoExtensionBias": _UNSATISFIABLE,
    "NoExtension": _UNSATISFIABLE,
    "too many expressions": "it is too complex",
    "too many states": "it is too complex",
    "fuel": "it is too complex",
    "items; max is": "it is too complex",
    "Too many items": "it is too complex",
    "too big": "it is too large",
}


def mask_words(vocab_size: int) -> int:
    """Length of a mask, in words of 32 bits."""
    return -(-vocab_size // 32)


class Constraint:
    """Where one request is in its grammar."""

    def __init__(
        self, matcher: LLMatcher, grammar: Grammar, eos: frozenset[int], vocab_size: int
    ) -> None:
        self.grammar = grammar
        self.vocab_size = vocab_size  # bits of a mask, before they are rounded up to words
        self._matcher = matcher
        self._eos = sorted(eos)
        self.failure = ""  # why it cannot go on, for the user

    @property
    def ended(self) -> bool:
        """The text is complete, and nothing can be added to it."""
        return not self.failure and self._matcher.is_stopped()

    def take(self, token: int) -> None:
        """Go on by a token that the last mask allowed."""
        if not self._matcher.consume_token(token):
            self._fail()

    def fill(self, mask: NDArray[np.int32], *, avoid_end: bool) -> None:
        """Set the bits of the tokens that may come next; `mask` is int32 [vocabulary / 32].

        With `avoid_end` the text goes on as long as it can. A failure allows everything: the row
        is about to be told.
        """
        if not self.failure:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._fail()
        if self.failure:
            mask.fill(-1)
        elif avoid_end:
            self._without_end(mask)

    def _without_end(self, mask: NDArray[np.int32]) -> None:
        other = mask.copy()
        bits = other.view(np.uint32)
        for token in self._eos:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
        if other.any():
            mask[:] = other

    def _fail(self) -> None:
        self.failure = _sentence(self.grammar, self._matcher.get_error(), "cannot be followed")


class Grammars:
    """Compiles grammars for one tokenizer; `compiled` may be called from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        """Raises ValueError for a tokenizer that is not of the library's fast kind."""
        from llguidance.hf import from_tokenizer

        size = max(vocab_size, len(tokenizer))
        self._begin(
            from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(eos) or None), size, eos
        )

    @classmethod
    def over(cls, tokenizer: LLTokenizer, vocab_size: int, eos: frozenset[int]) -> Grammars:
        """The same for a vocabulary that llguidance has already read."""
        made = cls.__new__(cls)
        made._begin(tokenizer, vocab_size, eos)
        return made

    def _begin(self, tokenizer: LLTokenizer, vocab_size: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar, emitted: Sequence[int] = ()) -> Constraint:
        """A constraint that has taken the tokens `emitted`. Raises RequestError."""
        matcher = self._compiled(grammar).deep_copy()
        if emitted and matcher.try_consume_tokens(list(emitted)) != len(emitted):
            raise RequestError(
                "The text so far does not keep to the grammar it is to go on with.",
                param=grammar.param,
            )
        return Constraint(matcher, grammar, self._eos, self._vocab_size)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            matcher = self._kept.get(grammar)
            if matcher is not None:
                self._kept.move_to_end(grammar)
                return matcher
        matcher = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text.encode()) > MAX_BYTES:
            raise _refusal(grammar, f"it is longer than {MAX_BYTES} bytes")
        try:
            matcher = LLMatcher(self._tokenizer, serialized(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:  # no JSON, or no object
            raise _refusal(grammar, str(error)) from None
        reason = matcher.get_error() or self._try(matcher)
        if reason:
            raise _refusal(grammar, reason)
        return matcher

    def _try(self, matcher: LLMatcher) -> str:
        """Take the first step, and a second one in a copy; says what is wrong with them."""
        mask = np.zeros(mask_words(self._vocab_size), np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if matcher.is_error() or not len(allowed):
            return matcher.get_error() or _UNSATISFIABLE
        copy = matcher.deep_copy()
        copy.consume_token(int(allowed[-1]))
        if not copy.is_stopped():
            copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return copy.get_error()


def serialized(grammar: Grammar) -> str:
    """A grammar in llguidance's own JSON, whatever it was written in."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(_sentence(grammar, reason, "cannot be used"), param=grammar.param)


def _sentence(grammar: Grammar, reason: str, what: str) -> str:
    for mark, plainly in _PLAINLY.items():
        if mark in reason:
            reason = plainly
    cleaned = " ".join(_NOISE.sub("", reason).split())
    name = "grammar of the tools" if grammar.param == "tools" else _NAMES[grammar.kind]
    return f"The {name} {what}: {cleaned[:300] or 'it is not valid'}."
