"""Text that keeps to a grammar: which tokens may come next, by llguidance.

A grammar is compiled once, in a thread of the worker's, and kept; each request gets a copy of its
own state. A new one is tried in another process before (`grammar_trial`). In every step the
engine's thread asks for the set of tokens that may come next, for those rows alone that have a
grammar. That takes a tenth of a millisecond and needs no device, so on a GPU it is done while the
forward pass is still being computed.

Why llguidance rather than xgrammar, which does the same: it has no dependencies (xgrammar needs
torch, triton and tvm-ffi; an engine without torch could not use it), a schema compiles in about 1
ms where xgrammar took 132 (vocabulary of 49 000), it bounds the work that a regular expression can
make in units of its own rather than in time, and it works without the GIL.

What explodes does so at compile time or, mostly, in the first steps, which are tried at compile
time too. The limits below keep all that under about 0.1 s, and later steps too.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from servekit.engines.grammar_trial import KEPT_BYTES as MOST_KEPT_BYTES
from servekit.engines.grammar_trial import Trials, explain
from servekit.errors import RequestError
from servekit.wire.messages import Grammar

#: Longest grammar, in bytes of its text.
MAX_BYTES = 256 * 1024
#: Compiled grammars kept: their number, and their memory, of which each counts LEAST_KEPT_BYTES.
KEPT = 64
KEPT_BYTES = 64 * 2**20
LEAST_KEPT_BYTES = 64 * 1024
#: Grammars that are known to be refused, so that nobody tries them twice.
REFUSALS = 256
#: Steps of a compiled grammar that are tried, and CPU time that one of them may take, in s.
STEPS_TRIED = 8
STEP_S = 0.1
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
_UNUSABLE = "cannot be used"
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
        self.trials = Trials(tokenizer)
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # by digest: sentences
        self._turns: dict[Grammar, threading.Lock] = {}
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar, emitted: Sequence[int] = ()) -> Constraint:
        """A constraint that has taken the tokens `emitted`.

        Raises RequestError, and ModelUnavailable where others' grammars keep the worker busy;
        that is no answer to a text that has begun, which waits.
        """
        matcher = self._compiled(grammar, patient=bool(emitted)).deep_copy()
        if emitted and matcher.try_consume_tokens(list(emitted)) != len(emitted):
            raise RequestError(
                "The text so far does not keep to the grammar it is to go on with.",
                param=grammar.param,
            )
        return Constraint(matcher, grammar, self._eos, self._vocab_size)

    def _compiled(self, grammar: Grammar, *, patient: bool) -> LLMatcher:
        if (known := self._known(grammar)) is not None:
            return known
        with self._lock:
            turn = self._turns.setdefault(grammar, threading.Lock())
        try:
            with turn:  # of those that bring the same one, one compiles it
                return self._known(grammar) or self._compile(grammar, patient=patient)
        finally:
            with self._lock:
                self._turns.pop(grammar, None)

    def _known(self, grammar: Grammar) -> LLMatcher | None:
        """Raises RequestError if it was refused before."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept.matcher
            refusal = self._refused.get(_digest(grammar))
        if refusal is not None:
            raise RequestError(refusal, param=grammar.param)
        return None

    def _keep(self, grammar: Grammar, made: _Kept) -> None:
        if (before := self._kept.pop(grammar, None)) is not None:
            self._kept_bytes -= before.bytes
        self._kept[grammar] = made
        self._kept_bytes += made.bytes
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes

    def _compile(self, grammar: Grammar, *, patient: bool) -> LLMatcher:
        """Compile it here if that went well elsewhere."""
        if len(grammar.text.encode()) > MAX_BYTES:
            raise _refusal(grammar, f"it is longer than {MAX_BYTES} bytes")
        verdict = self.trials.judge(grammar, patient=patient)
        refusal = verdict.refusal
        if verdict.signal:
            refusal = _sentence(grammar, explain(verdict, grammar), _UNUSABLE)
        elif verdict.kept_bytes > MOST_KEPT_BYTES:
            size = f"compiled, it takes {verdict.kept_bytes / 2**20:.0f} MiB"
            refusal = _sentence(grammar, size, _UNUSABLE)
        if refusal:
            with self._lock:
                self._refused[_digest(grammar)] = refusal
                while len(self._refused) > REFUSALS:
                    self._refused.popitem(last=False)
            raise RequestError(refusal, param=grammar.param)
        matcher = compile_grammar(self._tokenizer, grammar)
        with self._lock:
            self._keep(grammar, _Kept(matcher, max(verdict.kept_bytes, LEAST_KEPT_BYTES)))
        return matcher


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind} {grammar.param} {grammar.text}".encode()).digest()


class _Kept(NamedTuple):
    """A compiled grammar, and the memory that it is taken to have."""

    matcher: LLMatcher
    bytes: int


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar and try some of its steps. Raises RequestError.

    It may take any time and memory, and end this process: `grammar_trial` is to be first.
    """
    try:
        matcher = LLMatcher(tokenizer, serialized(grammar), log_level=0, limits=_LIMITS)
    except ValueError as error:  # no JSON, or no object
        raise _refusal(grammar, str(error)) from None
    if reason := matcher.get_error() or _try(matcher, tokenizer.vocab_size):
        raise _refusal(grammar, reason)
    return matcher


def _try(matcher: LLMatcher, vocab_size: int) -> str:
    """Take the first step, and some more in a copy; says what is wrong with them."""
    mask = np.zeros(mask_words(vocab_size), np.int32)
    copy = matcher
    for step in range(STEPS_TRIED):
        before_s = time.thread_time()
        copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if time.thread_time() - before_s > STEP_S:
            return f"finding the tokens that may come next takes more than {STEP_S:g} s"
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if copy.is_error() or not len(allowed):
            return copy.get_error() or (_UNSATISFIABLE if not step else "")
        copy = matcher.deep_copy() if copy is matcher else copy
        copy.consume_token(int(allowed[-1 - step % 2 * (len(allowed) // 2)]))
        if copy.is_stopped():
            break
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
    return RequestError(_sentence(grammar, reason, _UNUSABLE), param=grammar.param)


def _sentence(grammar: Grammar, reason: str, what: str) -> str:
    for mark, plainly in _PLAINLY.items():
        if mark in reason:
            reason = plainly
    cleaned = " ".join(_NOISE.sub("", reason).split())
    name = "grammar of the tools" if grammar.param == "tools" else _NAMES[grammar.kind]
    return f"The {name} {what}: {cleaned[:300] or 'it is not valid'}."
