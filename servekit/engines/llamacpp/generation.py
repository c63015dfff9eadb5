"""Continuous batching on llama.cpp, with chunked prefill.

Each step is one pass: one token of every generating sequence, and as many prompt tokens as the
batch has room for, oldest request first. The sequences share one KV cache.

An ended sequence stays in the cache until its place or memory is needed: a request whose prompt has
the same beginning continues from there. Beginnings of running sequences are shared too, without a
copy. When the cache is full, ended sequences are evicted first, least recently used first; then the
youngest request loses its place and is recomputed later.

A sequence whose values are NaN spoils all others: attention multiplies masked values by 0, and
0 × NaN is NaN. Then the cache is zeroed and each request is tried alone: if its logits still have
NaN, it fails; else it continues with the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import structlog

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.llamacpp.bindings import PROMPT_OUTPUTS
from servekit.engines.llamacpp.model import Context, InsufficientMemory
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sampling_params import choose_token, score_prompt

log: Any = structlog.get_logger(__name__)

#: Shorter common beginnings are not shared.
LEAST_SHARED = 8
#: Free tokens that a request needs in addition to its prompt before it starts.
HEADROOM_TOKENS = 32


@dataclass(slots=True, eq=False)
class Place:
    """A sequence of llama.cpp: its request, and its tokens in the cache."""

    id: int
    row: LlamaRow | None = None
    cached: list[int] = field(default_factory=list)
    salt: str = ""  # only requests of this salt may share the cached tokens
    used: int = 0  # step of its last use
    born: int = 0  # step in which its row was admitted


_At = tuple[Place, int]
_Read = tuple[Place, list[int], int]


class GenerationRunner:
    """A runner of generation jobs, step by step; all calls come from the engine's thread."""

    def __init__(self, context: Context, step_tokens: int, *, rewinds: bool) -> None:
        """Store the limit `step_tokens` of one pass; `rewinds`: sequences can be cut anywhere."""
        self._context = context
        self._step_tokens = step_tokens
        self._rewinds = rewinds
        self._waiting: deque[LlamaRow] = deque()
        self._suspects: deque[LlamaRow] = deque()  # to be tried alone, because there was a NaN
        self._trial: LlamaRow | None = None  # runs alone
        self._places = [Place(index) for index in range(context.sequences)]
        self._clock = count(1)
        self._now = 0

    @property
    def running(self) -> int:
        return sum(place.row is not None for place in self._places)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._suspects)

    @property
    def kv_used(self) -> float:
        used = sum(len(place.cached) for place in self._places if place.row is not None)
        return min(1.0, used / self._context.capacity)

    def add(self, row: LlamaRow) -> None:
        self._waiting.append(row)

    def cancel(self, row: LlamaRow) -> None:
        self._waiting = deque(other for other in self._waiting if other is not row)
        self._suspects = deque(other for other in self._suspects if other is not row)
        if self._trial is row:
            self._trial = None
        for place in self._places:
            if place.row is row:
                self._free_place(place)

    def close(self) -> None:
        self._waiting.clear()
        self._suspects.clear()
        self._context.close()

    # ---------------------------------------------------------------- a step

    def step(self) -> list[tuple[LlamaRow, StepOutput]]:
        """Run one pass; return its outputs."""
        self._now = next(self._clock)
        self._admit_waiting()
        while True:
            plan = self._plan_pass()
            try:
                wanted, read = self._run_pass(plan)
                break
            except InsufficientMemory:
                self._make_room()
        numbers = [
            score_prompt(_row_of(place), len(place.cached), len(tokens), at, self._context.logits)
            for place, tokens, at in read
        ]
        for place, tokens in plan:
            place.cached += tokens
            place.used = self._now
        chosen = [
            (place, choose_token(_row_of(place), self._context.logits(at))) for place, at in wanted
        ]
        outputs = [self._push_token(*one) for one in chosen if one[1] != NOT_A_NUMBER]
        if len(outputs) < len(chosen) or not all(numbers):
            return outputs + self._suspect_rows()
        if chosen:
            self._end_trial()
        return outputs

    def _run_pass(self, plan: list[tuple[Place, list[int]]]) -> tuple[list[_At], list[_Read]]:
        """Compute a pass; return the places to sample, with their positions in the batch.

        Also returns the prompts whose log probabilities are wanted, with their last positions.
        """
        wanted: list[_At] = []
        read: list[_Read] = []
        self._context.clear_batch()
        for place, tokens in plan:
            last = len(place.cached) + len(tokens) == _row_of(place).length
            every = _row_of(place).unscored
            at = self._context.put(place.id, len(place.cached), tokens, output=last, every=every)
            if last:
                wanted.append((place, at))
            if every:
                read.append((place, tokens, at))
        self._context.decode_batch()
        return wanted, read

    def _push_token(self, place: Place, token: int) -> tuple[LlamaRow, StepOutput]:
        row = _row_of(place)
        output = row.push(token)
        output.cached_tokens = row.cached_tokens or 0
        if row.prompt_scores:
            row.tell_prompt(output)
        if output.finish is not None or output.error is not None:
            self._free_place(place)
        return row, output

    def _plan_pass(self) -> list[tuple[Place, list[int]]]:
        """Choose the tokens of each sequence for this pass: generation first, then prompts."""
        active = sorted((p for p in self._places if p.row is not None), key=lambda p: p.born)
        left = {place.id: _row_of(place).length - len(place.cached) for place in active}
        order = sorted(active, key=lambda place: left[place.id] > 1)
        room, scored, plan = self._step_tokens, PROMPT_OUTPUTS, []
        for place in order:
            taken = min(left[place.id], room)
            if _row_of(place).unscored:
                taken = min(taken, scored)
                scored -= taken
            if taken:
                start = len(place.cached)
                plan.append((place, _row_of(place).context(start, start + taken)))
                room -= taken
        if self._count_cached() + self._step_tokens - room > self._context.capacity:
            self._make_room()
            return self._plan_pass()
        return plan

    # ---------------------------------------------------------------- coming and going

    def _admit_waiting(self) -> None:
        if self._suspects and self._trial is None:
            self._zero_cache()
            self._trial = self._suspects.popleft()
            self._enter_place(self._trial, self._places)
        if self._trial is not None:
            return
        while self._waiting and (free := [p for p in self._places if p.row is None]):
            row = self._waiting[0]
            busy = sum(_row_of(p).length for p in self._places if p.row is not None)
            if busy and busy + row.length + HEADROOM_TOKENS > self._context.capacity:
                return
            self._enter_place(self._waiting.popleft(), free)

    def _enter_place(self, row: LlamaRow, free: list[Place]) -> None:
        """Give `row` one of the `free` places, with as much of its beginning as the cache has."""
        source, shared = self._find_shared(row)
        oldest = min(free, key=lambda place: (bool(place.cached), place.used))
        place = source if source is not None and source.row is None else oldest
        if place is not source:
            self._cut_cache(place, 0)
            if source is not None:
                self._context.share_prefix(source.id, place.id, shared)
                place.cached = source.cached[:shared]
        place.salt = row.job.cache_salt
        self._cut_cache(place, shared)
        row.note_cached(shared)
        place.row, place.born = row, self._now

    def _find_shared(self, row: LlamaRow) -> tuple[Place | None, int]:
        """Return the place with the longest beginning in common with `row`, and its length.

        The last token is never shared, because its logits are wanted.
        """
        best: tuple[Place | None, int] = (None, 0)
        if not self._rewinds or row.unscored:
            return best
        tokens = row.context(0, row.length)[:-1]
        for place in self._places:
            if place.salt != row.job.cache_salt:
                continue
            shared = _common_length(place.cached, tokens)
            longer = shared >= LEAST_SHARED and shared > best[1]
            if longer and self._context.can_continue(place.id, shared):
                best = (place, shared)
        return best

    def _free_place(self, place: Place) -> None:
        """Free a place whose row has ended; its cached tokens stay if they can be shared."""
        place.row = None
        if not self._rewinds:
            self._cut_cache(place, 0)

    def _cut_cache(self, place: Place, start: int) -> None:
        if len(place.cached) > start:
            self._context.cut_sequence(place.id, start)
            del place.cached[start:]

    # ---------------------------------------------------------------- values that are not numbers

    def _suspect_rows(self) -> list[tuple[LlamaRow, StepOutput]]:
        """Handle a pass with NaN: fail the row that ran alone, or have each row tried alone."""
        active = sorted((p for p in self._places if p.row is not None), key=lambda p: p.born)
        rows = [_row_of(place) for place in active]
        alone, self._trial = self._trial is not None, None
        self._zero_cache()
        if alone:
            return [(row, row.push(NOT_A_NUMBER)) for row in rows]
        log.warning("logits_not_a_number", requests=[row.job.id for row in rows])
        self._suspects.extend(rows)
        return []

    def _end_trial(self) -> None:
        """Let the row that ran alone continue with the others."""
        for place in self._places:
            if self._trial is not None and place.row is self._trial:
                place.row = None
                self._waiting.appendleft(self._trial)
        self._trial = None

    def _zero_cache(self) -> None:
        """Empty the cache and its memory: values of removed tokens would still be multiplied."""
        for place in self._places:
            place.row = None
            place.cached.clear()
        self._context.clear_cache()

    # ---------------------------------------------------------------- room

    def _count_cached(self) -> int:
        """Return the number of cached tokens; shared tokens count for each sequence."""
        return sum(len(place.cached) for place in self._places)

    def _make_room(self) -> None:
        """Evict one sequence from the cache. Raises RuntimeError if only one is left."""
        ended = [place for place in self._places if place.row is None and place.cached]
        if ended:
            self._cut_cache(min(ended, key=lambda place: place.used), 0)
            return
        active = [place for place in self._places if place.row is not None]
        if len(active) < 2:
            raise RuntimeError("llama.cpp has no room in its cache for a single sequence")
        youngest = max(active, key=lambda place: place.born)
        log.info("request_preempted", request=_row_of(youngest).job.id)
        self._waiting.appendleft(_row_of(youngest))
        youngest.row = None
        self._cut_cache(youngest, 0)


def _row_of(place: Place) -> LlamaRow:
    if place.row is None:
        raise RuntimeError(f"sequence {place.id} has no request")
    return place.row


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    return next(at for at in range(end) if one[at] != other[at])
