"""Continuous batching on llama.cpp, with chunked prefill.

Each step is one pass: one token of every generating sequence, and as many prompt tokens as the
batch has room for, oldest request first. The sequences share one KV cache.

An ended sequence stays in the cache until its place or memory is needed: a request whose prompt has
the same beginning continues from there. Beginnings of running sequences are shared too, without a
copy. When the cache is full, ended sequences are evicted first, least recently used first; then the
youngest request loses its place and is recomputed later.

An image or a recording of a prompt is read in passes of its own, beside those of tokens: at most
one in a step, and as much of it as there is room for. Its embeddings are made by a thread beside
the passes; a request waits for them in its place.

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
from servekit.engines.llamacpp.chunk_encoder import ChunkEncoder
from servekit.engines.llamacpp.model import Context, InsufficientMemory
from servekit.engines.llamacpp.mtmd import PLAIN, MediaChunk, Positions, Projector
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sampling_params import choose_token, score_prompt

log: Any = structlog.get_logger(__name__)

#: Shorter common beginnings are not shared.
LEAST_SHARED = 8
#: Free tokens that a request needs in addition to its prompt before it starts.
HEADROOM_TOKENS = 32
#: How long a step waits for embeddings if there is nothing else to do.
WAIT_S = 0.02


@dataclass(slots=True, eq=False)
class Place:
    """A sequence of llama.cpp: its request, and its tokens in the cache."""

    id: int
    row: LlamaRow | None = None
    cached: list[int] = field(default_factory=list)  # with the marks of images and recordings
    positions: Positions = PLAIN  # of the cached tokens
    salt: str = ""  # only requests of this salt may share the cached tokens
    used: int = 0  # step of its last use
    born: int = 0  # step in which its row was admitted


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` tokens of an image or a recording, to be read in a pass."""

    place: Place
    chunk: MediaChunk
    count: int


@dataclass(slots=True)
class Plan:
    """What a step reads: texts, then perhaps a piece of an image or a recording."""

    texts: list[tuple[Place, list[int]]] = field(default_factory=list)
    piece: Piece | None = None

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self.texts) + (
            self.piece.count if self.piece else 0
        )


_At = tuple[Place, int]
_Read = tuple[Place, list[int], int]


class GenerationRunner:
    """A runner of generation jobs, step by step; all calls come from the engine's thread."""

    def __init__(
        self,
        context: Context,
        step_tokens: int,
        *,
        rewinds: bool,
        projector: Projector | None = None,
    ) -> None:
        """Store the limit `step_tokens` of one pass; `rewinds`: sequences can be cut anywhere.

        `projector` is for prompts with images or recordings.
        """
        self._context = context
        self._projector = projector
        self._encoder = None if projector is None else ChunkEncoder(projector)
        #: The last step only waited for embeddings, which do not come.
        self.hangs = False
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
        if self._encoder is not None and row.media is not None:
            self._encoder.drop(row.media)

    def close(self) -> None:
        self._waiting.clear()
        self._suspects.clear()
        if self._encoder is not None:
            self._encoder.close()
        self._context.close()

    # ---------------------------------------------------------------- a step

    def step(self) -> list[tuple[LlamaRow, StepOutput]]:
        """Run one pass over tokens, and perhaps one over embeddings; return their outputs."""
        self._now = next(self._clock)
        self._admit_waiting()
        outputs = self._end_unreadable()
        while True:
            plan = self._plan_pass()
            try:
                wanted, read = self._run_pass(plan.texts)
                break
            except InsufficientMemory:
                self._make_room()
        numbers = [
            score_prompt(_row_of(place), len(place.cached), len(tokens), at, self._context.logits)
            for place, tokens, at in read
        ]
        for place, tokens in plan.texts:
            self._note_read(place, tokens)
        sane = self._push_tokens(wanted, outputs) and all(numbers)
        if sane and plan.piece is not None:
            wanted = self._read_piece(plan.piece)
            sane = self._push_tokens(wanted, outputs)
        if not sane:
            return outputs + self._suspect_rows()
        if outputs:
            self._end_trial()
        idle = not (plan.tokens or outputs)
        self.hangs = idle and self._wait_for_embeddings()
        return outputs

    def _push_tokens(self, wanted: list[_At], outputs: list[tuple[LlamaRow, StepOutput]]) -> bool:
        """Choose the next tokens by the logits of the last pass, and append them to `outputs`.

        Returns False if there is a NaN among the logits.
        """
        chosen = [
            (place, choose_token(_row_of(place), self._context.logits(at))) for place, at in wanted
        ]
        outputs += [self._push_token(*one) for one in chosen if one[1] != NOT_A_NUMBER]
        return all(token != NOT_A_NUMBER for _, token in chosen)

    def _note_read(self, place: Place, tokens: list[int]) -> None:
        place.cached += tokens
        place.used = self._now

    def _run_pass(self, texts: list[tuple[Place, list[int]]]) -> tuple[list[_At], list[_Read]]:
        """Compute a pass; return the places to sample, with their positions in the batch.

        Also returns the prompts whose log probabilities are wanted, with their last positions.
        """
        wanted: list[_At] = []
        read: list[_Read] = []
        self._context.clear_batch()
        for place, tokens in texts:
            last = len(place.cached) + len(tokens) == _row_of(place).length
            every = _row_of(place).unscored
            start = place.positions.find(len(place.cached))
            at = self._context.put(place.id, start, tokens, output=last, every=every)
            if last:
                wanted.append((place, at))
            if every:
                read.append((place, tokens, at))
        if texts:
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

    def _plan_pass(self) -> Plan:
        """Choose the tokens of each sequence for this step: generation first, then prompts."""
        active = sorted((p for p in self._places if p.row is not None), key=lambda p: p.born)
        left = {place.id: _row_of(place).length - len(place.cached) for place in active}
        room, scored, plan = self._step_tokens, PROMPT_OUTPUTS, Plan()
        for place in sorted(active, key=lambda place: left[place.id] > 1):
            row, start = _row_of(place), len(place.cached)
            if self._encoder is not None and row.media is not None:
                self._encoder.request(row.media, start)
            if row.find_chunk(start) is not None:
                plan.piece = plan.piece or self._plan_piece(place, plan)
            else:
                taken = min(row.text_end(start) - start, room)
                if row.unscored:
                    taken = min(taken, scored)
                    scored -= taken
                if taken:
                    plan.texts.append((place, row.context(start, start + taken)))
            room = max(0, self._step_tokens - plan.tokens)
        if self._count_cached() + plan.tokens > self._context.capacity:
            self._make_room()
            return self._plan_pass()
        return plan

    # ---------------------------------------------------------------- images and recordings

    def _plan_piece(self, place: Place, plan: Plan) -> Piece | None:
        """Return the next piece of an image, if its embeddings are there and the plan has room."""
        row, start = _row_of(place), len(place.cached)
        chunk = row.find_chunk(start)
        if chunk is None or chunk.embeddings is None:
            return None
        room, left = self._step_tokens - plan.tokens, chunk.end - start
        if chunk.whole and left > room:
            # it fits into a pass, but not beside other prompts
            return Piece(place, chunk, left) if all(len(t) == 1 for _, t in plan.texts) else None
        return Piece(place, chunk, min(left, room)) if room > 0 else None

    def _read_piece(self, piece: Piece) -> list[_At]:
        """Read a piece of an image; return its place if a token comes after it."""
        place, chunk = piece.place, piece.chunk
        row, start = _row_of(place), len(place.cached) - chunk.start
        if chunk.embeddings is None or self._projector is None:
            raise RuntimeError(f"sequence {place.id} has no embeddings")
        span = slice(start, start + piece.count)
        last = len(place.cached) + piece.count == row.length
        positions = self._projector.locate(chunk, place.positions.find(chunk.start))
        try:
            self._context.decode_embeddings(
                place.id,
                positions[:, span],
                chunk.embeddings[span],
                output=last,
                causal=not chunk.whole,
            )
        except InsufficientMemory:
            self._make_room()
            return []
        self._note_read(place, chunk.marks[span])
        if span.stop == chunk.count:
            ChunkEncoder.release(chunk)
        return [(place, piece.count - 1)] if last else []

    def _end_unreadable(self) -> list[tuple[LlamaRow, StepOutput]]:
        """End the requests whose image or recording could not be encoded."""
        ended = []
        for place in self._places:
            row = place.row
            chunk = row.find_chunk(len(place.cached)) if row is not None else None
            if row is not None and chunk is not None and chunk.failure:
                why = f"messages: the model cannot read these images or recordings: {chunk.failure}"
                ended.append((row, StepOutput(row.job.id, [], error=why, param="messages")))
                self.cancel(row)  # no more of it is encoded
        return ended

    def _wait_for_embeddings(self) -> bool:
        """Wait a little for what every running request waits for; return whether that hangs."""
        if self._encoder is None:
            return False
        rows = [(place.row, place) for place in self._places if place.row is not None]
        chunks = [row.find_chunk(len(place.cached)) for row, place in rows]
        self._encoder.wait([one for one in chunks if one is not None], WAIT_S)
        return self._encoder.hangs

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
                self._context.share_prefix(source.id, place.id, row.positions.find(shared))
                place.cached = source.cached[:shared]
        self._cut_cache(place, shared)
        place.salt, place.positions = row.job.cache_salt, row.positions
        row.note_cached(shared)
        place.row, place.born = row, self._now

    def _find_shared(self, row: LlamaRow) -> tuple[Place | None, int]:
        """Return the place with the longest beginning in common with `row`, and its length.

        The last token is never shared, because its logits are wanted.
        """
        best: tuple[Place | None, int] = (None, 0)
        if not self._rewinds or row.unscored:
            return best
        tokens, positions = row.marked()[:-1], row.positions
        for place in self._places:
            if place.salt != row.job.cache_salt:
                continue
            shared = _common_length(place.cached, tokens)
            if (chunk := row.find_chunk(shared)) is not None:
                shared = chunk.start
            longer = shared >= LEAST_SHARED and shared > best[1]
            if longer and self._context.can_continue(place.id, positions.find(shared)):
                best = (place, shared)
        return best

    def _free_place(self, place: Place) -> None:
        """Free a place whose row has ended; its cached tokens stay if they can be shared."""
        place.row = None
        if not self._rewinds:
            self._cut_cache(place, 0)

    def _cut_cache(self, place: Place, start: int) -> None:
        if len(place.cached) > start:
            self._context.cut_sequence(place.id, place.positions.find(start))
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
