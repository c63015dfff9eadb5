"""Structured output: the tokens that a grammar allows next, computed by llguidance.

A grammar is compiled once, in a thread of the worker, and cached; each request gets a copy of its
state. A new grammar is tried in another process first (`grammar_trial`). In every step the engine's
thread computes the token mask of the rows that have a grammar. That takes a tenth of a millisecond
and needs no device, so on a GPU it overlaps with the forward pass.

Why llguidance and not xgrammar: it has no dependencies (xgrammar needs torch, triton and tvm-ffi,
which an engine without torch could not use), compiles schemas much faster, bounds the work of
regular expressions in units of its own rather than in time, and releases the GIL.

Explosive grammars explode while they are compiled or, mostly, in the first steps, which are
therefore tried at compile time too. The limits below keep all this, and later steps, under about
0.1 s.

Requests with the same grammar share the states of its lexer, which grow as tokens are matched; at
their limit the lexer fails for all of them, for good. The grammar is then compiled anew, so that no
request fails because of others.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from servekit.engines.text.grammar_trial import KEPT_BYTES as MOST_KEPT_BYTES
from servekit.engines.text.grammar_trial import Trials, explain_verdict
from servekit.errors import RequestError
from servekit.protocol.messages import Grammar
from servekit.units import format_bytes

log: Any = structlog.get_logger(__name__)

#: Longest grammar, in bytes of its text.
MAX_BYTES = 256 * 1024
#: Limits of the cache of compiled grammars, by number and memory; each counts LEAST_KEPT_BYTES or
#: more.
KEPT = 64
KEPT_BYTES = 64 * 2**20
LEAST_KEPT_BYTES = 64 * 1024
#: Cached refusals, so that a refused grammar is not tried again.
REFUSALS = 256
#: Steps of a compiled grammar that are tried, and the CPU time limit of each, in s.
STEPS_TRIED = 8
STEP_S = 0.1
#: Most CPU time, in s, to recompile a grammar between two steps of the engine.
RENEWAL_S = 0.05
_FULL = "too many states"
#: White space between the parts of JSON: enough for indentation, but limited, because small models
#: may otherwise generate it without end.
WHITESPACE = r"[ \n\r\t]{0,40}"
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # an enumeration of ten thousand values fits
    max_items_in_row=10_000,  # an object of a thousand optional properties fits
    step_lexer_fuel=50_000,
    max_lexer_states=30_000,  # one or two kB each
    verbose_errors=False,  # they would repeat the request's text
)
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
#: Parts of llguidance's messages that are useless to a user: positions in generated text and
#: states.
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


def try_grammars(create: Callable[[], Grammars]) -> Grammars | None:
    """Create the grammar compiler; return None if llguidance cannot read the tokenizer."""
    try:
        return create()
    except Exception as error:  # the library raises many types; the model serves without grammars
        log.warning("structured_output_unavailable", reason=str(error))
        return None


def mask_words(vocab_size: int) -> int:
    """Return the length of a token mask in 32-bit words."""
    return -(-vocab_size // 32)


class Constraint:
    """The position of one request in its grammar."""

    def __init__(self, grammars: Grammars, grammar: Grammar, emitted: Sequence[int]) -> None:
        """Compile the grammar if necessary. Raises as `Grammars.constraint` does."""
        self.grammar = grammar
        self.vocab_size = grammars.vocab_size  # bits of a mask, before rounding up to words
        self._grammars = grammars
        self._kept = grammars.compiled(grammar, patient=bool(emitted))
        self._matcher = self._kept.matcher.deep_copy()
        self._taken = list(emitted)
        self._eos = sorted(grammars.eos)
        self.failure = ""  # reason of a failure, for the user

    @property
    def is_complete(self) -> bool:
        """True if the text is complete and cannot be extended."""
        return not self.failure and self._matcher.is_stopped()

    def accept_emitted(self) -> bool:
        """Advance over the tokens emitted before; return whether the grammar allows them."""
        return self._follow_taken() or self._recover_lexer()

    def _follow_taken(self) -> bool:
        taken = self._taken
        return not taken or self._matcher.try_consume_tokens(taken) == len(taken)

    def accept_token(self, token: int) -> None:
        """Advance by a token that the last mask allowed."""
        self._taken.append(token)
        if not self._matcher.consume_token(token) and not self._recover_lexer():
            self._set_failure()

    def _recover_lexer(self) -> bool:
        """Switch to a newly compiled grammar if the shared lexer is full; return whether it did."""
        if _FULL not in self._matcher.get_error():
            return False
        for _ in range(2):  # the new lexer of another request may be full already
            kept = self._grammars.renew(self.grammar, self._kept)
            if kept is None:
                return False
            self._kept, self._matcher = kept, kept.matcher.deep_copy()
            if self._follow_taken():
                return True
        return False

    def fill_mask(self, mask: NDArray[np.int32], *, avoid_end: bool) -> None:
        """Set the bits of the allowed next tokens; `mask` is int32 [vocabulary / 32].

        With `avoid_end` the text continues for as long as it can. After a failure the mask allows
        all tokens, because the request is about to fail.
        """
        if not self.failure:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error() and self._recover_lexer():
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._set_failure()
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

    def _set_failure(self) -> None:
        # no error, but a valid text was not consumed whole: it fills a lexer by itself
        reason = self._matcher.get_error() or _FULL
        self.failure = explain_dead_end(self.grammar, reason)


class Grammars:
    """The grammar compiler and cache of one tokenizer; `compiled` is thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        """Read the vocabulary. Raises ValueError for a tokenizer that is not a fast one."""
        from llguidance.hf import from_tokenizer

        size = max(vocab_size, len(tokenizer))
        try:
            read = from_tokenizer(tokenizer, n_vocab=size, eos_token=sorted(eos) or None)
        except TypeError:  # llguidance 1.3, as vLLM 0.20 and 0.21 need it, knows one such token
            read = from_tokenizer(tokenizer, n_vocab=size)
        self._set_up(read, size, eos)

    @classmethod
    def from_vocabulary(
        cls, tokenizer: LLTokenizer, vocab_size: int, eos: frozenset[int]
    ) -> Grammars:
        """Create an instance for a vocabulary that llguidance has already read."""
        made = cls.__new__(cls)
        made._set_up(tokenizer, vocab_size, eos)
        return made

    def _set_up(self, tokenizer: LLTokenizer, vocab_size: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos = eos
        self.trials = Trials(tokenizer)
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # by digest: sentences
        self._turns: dict[Grammar, threading.Lock] = {}
        self._lock = threading.Lock()

    def constraint(self, grammar: Grammar, emitted: Sequence[int] = ()) -> Constraint:
        """Return a constraint advanced over the tokens `emitted`.

        Raises RequestError, and ModelUnavailable if grammars of other requests keep the worker
        busy. A request that has emitted tokens waits instead.
        """
        constraint = Constraint(self, grammar, emitted)
        if not constraint.accept_emitted():
            raise RequestError(
                "The text so far does not match the grammar that continues it.",
                param=grammar.param,
            )
        return constraint

    def compiled(self, grammar: Grammar, *, patient: bool) -> _Kept:
        """Return the compiled grammar, to be copied for each request. Raises as `constraint`."""
        if (known := self._find_kept(grammar)) is not None:
            return known
        with self._lock:
            turn = self._turns.setdefault(grammar, threading.Lock())
        try:
            with turn:  # the first of several requests with the same grammar compiles it
                return self._find_kept(grammar) or self._compile_tried(grammar, patient=patient)
        finally:
            with self._lock:
                self._turns.pop(grammar, None)

    def renew(self, grammar: Grammar, full: _Kept) -> _Kept | None:
        """Return a replacement for the grammar `full`; None if recompiling takes too long here.

        In that case the grammar leaves the cache, and the next request compiles it in its own time.
        """
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None and kept is not full:
                return kept
            if kept is not None:
                self._kept_bytes -= self._kept.pop(grammar).bytes
        if full.compiled_s > RENEWAL_S:
            return None
        matcher = compile_grammar(self._tokenizer, grammar)
        with self._lock:
            self._keep_compiled(grammar, made := _Kept(matcher, full.bytes, full.compiled_s))
        return made

    def _find_kept(self, grammar: Grammar) -> _Kept | None:
        """Return the cached grammar, if any. Raises RequestError if it was refused before."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
            refusal = self._refused.get(_digest_grammar(grammar))
        if refusal is not None:
            raise RequestError(refusal, param=grammar.param)
        return None

    def _keep_compiled(self, grammar: Grammar, made: _Kept) -> None:
        if (before := self._kept.pop(grammar, None)) is not None:
            self._kept_bytes -= before.bytes
        self._kept[grammar] = made
        self._kept_bytes += made.bytes
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes

    def _compile_tried(self, grammar: Grammar, *, patient: bool) -> _Kept:
        """Compile a grammar in this process after a successful trial."""
        if len(grammar.text.encode()) > MAX_BYTES:
            raise _refuse_grammar(grammar, f"it is longer than {MAX_BYTES} bytes")
        verdict = self.trials.try_grammar(grammar, patient=patient)
        refusal = verdict.refusal
        if verdict.signal:
            refusal = _refusal_sentence(grammar, explain_verdict(verdict, grammar), _UNUSABLE)
        elif verdict.kept_bytes > MOST_KEPT_BYTES:
            size = f"compiled, it takes {format_bytes(verdict.kept_bytes)}"
            refusal = _refusal_sentence(grammar, size, _UNUSABLE)
        if refusal:
            with self._lock:
                self._refused[_digest_grammar(grammar)] = refusal
                while len(self._refused) > REFUSALS:
                    self._refused.popitem(last=False)
            raise RequestError(refusal, param=grammar.param)
        before_s = time.thread_time()
        matcher = compile_grammar(self._tokenizer, grammar)
        made = _Kept(
            matcher, max(verdict.kept_bytes, LEAST_KEPT_BYTES), time.thread_time() - before_s
        )
        with self._lock:
            self._keep_compiled(grammar, made)
        return made


def _digest_grammar(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind} {grammar.param} {grammar.text}".encode()).digest()


class _Kept(NamedTuple):
    """A compiled grammar, with its estimated memory."""

    matcher: LLMatcher
    bytes: int
    compiled_s: float  # CPU time of the compilation


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar and try some of its steps. Raises RequestError.

    May take any time and memory, or end this process: try the grammar in `grammar_trial` first.
    """
    try:
        matcher = LLMatcher(tokenizer, serialize_grammar(grammar), log_level=0, limits=LIMITS)
    except ValueError as error:  # not JSON, or not an object
        raise _refuse_grammar(grammar, str(error)) from None
    if reason := matcher.get_error() or _try_steps(matcher, tokenizer.vocab_size):
        raise _refuse_grammar(grammar, reason)
    return matcher


def _try_steps(matcher: LLMatcher, vocab_size: int) -> str:
    """Try the first steps, all but the first in a copy; return the error, or ""."""
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


def serialize_grammar(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own JSON format."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def explain_dead_end(grammar: Grammar, reason: str = _FULL) -> str:
    """Return why a text cannot go on in its grammar, which llguidance has found to explode."""
    return _refusal_sentence(grammar, reason, "cannot be followed")


def _refuse_grammar(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(_refusal_sentence(grammar, reason, _UNUSABLE), param=grammar.param)


def _refusal_sentence(grammar: Grammar, reason: str, what: str) -> str:
    for mark, plainly in _PLAINLY.items():
        if mark in reason:
            reason = plainly
    cleaned = " ".join(_NOISE.sub("", reason).split())
    name = "grammar of the tools" if grammar.param == "tools" else _NAMES[grammar.kind]
    return f"The {name} {what}: {cleaned[:300] or 'it is not valid'}."
