"""Continuous batching on llama.cpp, with chunked prefill.

Each step is one pass: one token of every generating sequence, and as many prompt tokens as the
batch has room for, oldest request first. The sequences share one KV cache.

When the cache is full, ended sequences (`sequences.py`) are evicted first, least recently used
first; then the youngest request loses its place and is recomputed later.

A step that reads nothing but the last token of each request may also read proposed tokens
(`api.speculation`). Those that are rejected are removed from the cache.

An image or a recording of a prompt is read in passes of its own, beside those of tokens: at most
one in a step, and as much of it as there is room for. Its embeddings are made by a thread beside
the passes; a request waits for them in its place.

A sequence whose values are NaN spoils all others: attention multiplies masked values by 0, and
0 × NaN is NaN. Then the cache is zeroed and each request is tried alone: if its logits still have
NaN, it fails; else it continues with the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import structlog

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.api.speculation import Counts, Speculator, join_outputs
from servekit.engines.llamacpp.library.bindings import PROMPT_OUTPUTS, PROPOSED_OUTPUTS
from servekit.engines.llamacpp.media.chunk_encoder import ChunkEncoder
from servekit.engines.llamacpp.media.mtmd import MediaChunk, Projector
from servekit.engines.llamacpp.model import Context, InsufficientMemory
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sampling_params import choose_token, score_prompt
from servekit.engines.llamacpp.sequences import Place, Sequences

log: Any = structlog.get_logger(__name__)

#: Free tokens that a request needs in addition to its prompt before it starts.
HEADROOM_TOKENS = 32
#: How long a step waits for embeddings if there is nothing else to do.
WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` tokens of an image or a recording, to be read in a pass."""

    place: Place
    chunk: MediaChunk
    count: int


@dataclass(slots=True)
class PassPlan:
    """What a step reads: texts, then perhaps a piece of an image or a recording."""

    texts: list[tuple[Place, list[int]]] = field(default_factory=list)
    piece: Piece | None = None
    proposals: Mapping[str, list[int]] = field(default_factory=dict)  # by row's key

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self.texts) + (
            self.piece.count if self.piece else 0
        )

    @property
    def decodes(self) -> bool:
        """True if it reads the last tokens of requests, and nothing else."""
        rows = [(_row_of(place), len(place.cached)) for place, _ in self.texts]
        alone = self.piece is None and bool(rows)
        return alone and all(row.length == read + 1 and not row.unscored for row, read in rows)


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
        speculator: Speculator | None = None,
    ) -> None:
        """Store the limit `step_tokens` of one pass; `rewinds`: sequences can be cut anywhere.

        `projector` is for prompts with images or recordings. With a `speculator` the context has
        room for PROPOSED_OUTPUTS more outputs, and its sequences can be cut.
        """
        self._context = context
        self._projector = projector
        self._encoder = None if projector is None else ChunkEncoder(projector)
        #: The last step only waited for embeddings, which do not come.
        self.hangs = False
        self._step_tokens = step_tokens
        self._speculator = speculator
        self._waiting: deque[LlamaRow] = deque()
        self._suspects: deque[LlamaRow] = deque()  # to be tried alone, because there was a NaN
        self._trial: LlamaRow | None = None  # runs alone
        self._sequences = Sequences(context, rewinds=rewinds)
        self._clock = count(1)
        self._now = 0

    @property
    def running(self) -> int:
        return len(self._sequences.active)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._suspects)

    @property
    def kv_used(self) -> float:
        used = sum(len(place.cached) for place in self._sequences.active)
        return min(1.0, used / self._context.capacity)

    @property
    def speculated(self) -> Counts:
        """Return the numbers of tokens that were proposed and accepted so far."""
        return Counts() if self._speculator is None else self._speculator.counts

    def add(self, row: LlamaRow) -> None:
        self._waiting.append(row)

    def cancel(self, row: LlamaRow) -> None:
        self._waiting = deque(other for other in self._waiting if other is not row)
        self._suspects = deque(other for other in self._suspects if other is not row)
        if self._trial is row:
            self._trial = None
        for place in self._sequences.active:
            if place.row is row:
                self._sequences.free(place)
        self._forget_proposals(row)
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
        began_s = time.perf_counter()
        self._now = next(self._clock)
        self._admit_waiting()
        outputs = self._end_unreadable()
        plan, wanted, read = self._run_texts()
        decodes = self._speculator is not None and plan.decodes
        numbers = [
            score_prompt(_row_of(place), len(place.cached), len(tokens), at, self._context.logits)
            for place, tokens, at in read
        ]
        for place, tokens in plan.texts:
            self._note_read(place, tokens)
        sane = self._push_tokens(wanted, outputs, plan.proposals) and all(numbers)
        if sane and plan.piece is not None:
            wanted = self._read_piece(plan.piece)
            sane = self._push_tokens(wanted, outputs, {})
        if not sane:
            return outputs + self._suspect_rows()
        if self._speculator is not None and decodes:
            made = sum(len(output.token_ids) for _, output in outputs)
            self._speculator.note_step(len(plan.texts), made, time.perf_counter() - began_s)
        if outputs:
            self._end_trial()
        idle = not (plan.tokens or outputs)
        self.hangs = idle and self._wait_for_embeddings()
        return outputs

    def _run_texts(self) -> tuple[PassPlan, list[_At], list[_Read]]:
        """Plan and run a pass over tokens; make room if the cache is too full for it."""
        proposing = True
        while True:
            plan = self._plan_pass()
            if proposing:
                plan.proposals = self._find_proposals(plan)
            try:
                return plan, *self._run_pass(plan)
            except InsufficientMemory:
                if plan.proposals:  # nothing is evicted for what would only have been faster
                    proposing = False
                else:
                    self._make_room()

    def _push_tokens(
        self,
        wanted: list[_At],
        outputs: list[tuple[LlamaRow, StepOutput]],
        proposals: Mapping[str, list[int]],
    ) -> bool:
        """Choose the next tokens by the logits of the last pass, and append them to `outputs`.

        Returns False if there is a NaN among the logits.
        """
        sane = True
        for place, at in wanted:
            proposed = proposals.get(_row_of(place).key, [])
            sane &= self._push_verified(place, at, proposed, outputs)
        return sane

    def _push_verified(
        self,
        place: Place,
        first: int,
        proposed: Sequence[int],
        outputs: list[tuple[LlamaRow, StepOutput]],
    ) -> bool:
        """Choose a row's next token, and another one as long as it is the proposed one.

        `first` is the place of its last token in the batch, and the proposed ones follow. Returns
        False at the first NaN.
        """
        row, read, accepted = _row_of(place), len(place.cached), 0
        place.cached += proposed
        made: StepOutput | None = None
        sane = True
        while True:
            token = choose_token(row, self._context.logits(first + accepted))
            if token == NOT_A_NUMBER:
                sane = False
                break
            output = self._push_token(place, token)
            if made is None or output.error:
                outputs.append((row, output))
                made = made or output
            else:
                join_outputs(made, output)
            if place.row is None or accepted == len(proposed) or proposed[accepted] != token:
                break
            accepted += 1
        self._sequences.cut(place, read + accepted)
        if self._speculator is not None:
            self._speculator.note_proposal(row.key, len(proposed), accepted)
        return sane

    def _note_read(self, place: Place, tokens: list[int]) -> None:
        place.cached += tokens
        place.used = self._now

    def _run_pass(self, plan: PassPlan) -> tuple[list[_At], list[_Read]]:
        """Compute a pass; return the places to sample, with their positions in the batch.

        Also returns the prompts whose log probabilities are wanted, with their last positions.
        """
        wanted: list[_At] = []
        read: list[_Read] = []
        self._context.clear_batch()
        for place, tokens in plan.texts:
            row = _row_of(place)
            last, every = len(place.cached) + len(tokens) == row.length, row.unscored
            start = place.positions.find(len(place.cached))
            proposed = plan.proposals.get(row.key, [])
            at = self._context.put(
                *(place.id, start, tokens + proposed), output=last, every=every or bool(proposed)
            )
            if last:
                wanted.append((place, at - len(proposed)))
            if every:
                read.append((place, tokens, at))
        if plan.texts:
            self._context.decode_batch()
        return wanted, read

    def _push_token(self, place: Place, token: int) -> StepOutput:
        row = _row_of(place)
        output = row.push(token)
        output.cached_tokens = row.cached_tokens or 0
        if row.prompt_scores:
            row.tell_prompt(output)
        if output.finish is not None or output.error is not None:
            self._sequences.free(place)
            self._forget_proposals(row)
        return output

    def _plan_pass(self) -> PassPlan:
        """Choose the tokens of each sequence for this step: generation first, then prompts."""
        active = self._sequences.active
        left = {place.id: _row_of(place).length - len(place.cached) for place in active}
        room, scored, plan = self._step_tokens, PROMPT_OUTPUTS, PassPlan()
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
                    plan.texts.append((place, row.tokens_between(start, start + taken)))
            room = max(0, self._step_tokens - plan.tokens)
        if self._sequences.count_cached() + plan.tokens > self._context.capacity:
            self._make_room()
            return self._plan_pass()
        return plan

    # ---------------------------------------------------------------- proposals

    def _find_proposals(self, plan: PassPlan) -> dict[str, list[int]]:
        """Return proposed tokens for a step, by row's key; none beside prompts.

        All together fit into a pass, and into what is free of the cache.
        """
        rows = [_row_of(place) for place, _ in plan.texts]
        if self._speculator is None or not plan.decodes or any(row.suspected for row in rows):
            return {}  # a row that is tried alone is suspected, too
        free = self._context.capacity - self._sequences.count_cached()
        room = min(self._step_tokens, len(rows) + PROPOSED_OUTPUTS, free)
        return self._speculator.make_proposals(rows, room)

    def _forget_proposals(self, row: LlamaRow) -> None:
        """Forget what is known of a row that has no place any more."""
        if self._speculator is not None:
            self._speculator.forget_row(row.key)

    # ---------------------------------------------------------------- images and recordings

    def _plan_piece(self, place: Place, plan: PassPlan) -> Piece | None:
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
            ChunkEncoder.drop_embeddings(chunk)
        return [(place, piece.count - 1)] if last else []

    def _end_unreadable(self) -> list[tuple[LlamaRow, StepOutput]]:
        """End the requests whose image or recording could not be encoded."""
        ended = []
        for place in self._sequences.active:
            row = _row_of(place)
            chunk = row.find_chunk(len(place.cached))
            if chunk is not None and chunk.failure:
                why = f"messages: the model cannot read these images or recordings: {chunk.failure}"
                ended.append((row, StepOutput(row.job.id, [], error=why, param="messages")))
                self.cancel(row)  # no more of it is encoded
        return ended

    def _wait_for_embeddings(self) -> bool:
        """Wait a little for what every running request waits for; return whether that hangs."""
        if self._encoder is None:
            return False
        active = self._sequences.active
        chunks = [_row_of(place).find_chunk(len(place.cached)) for place in active]
        self._encoder.wait([one for one in chunks if one is not None], WAIT_S)
        return self._encoder.hangs

    # ---------------------------------------------------------------- coming and going

    def _admit_waiting(self) -> None:
        if self._suspects and self._trial is None:
            self._zero_cache()
            self._trial = self._suspects.popleft()
            self._enter_place(self._trial)
        if self._trial is not None:
            return
        while self._waiting and self._sequences.has_free:
            row = self._waiting[0]
            busy = sum(_row_of(place).length for place in self._sequences.active)
            if busy and busy + row.length + HEADROOM_TOKENS > self._context.capacity:
                return
            self._enter_place(self._waiting.popleft())

    def _enter_place(self, row: LlamaRow) -> None:
        row.note_cached(len(self._sequences.enter(row, self._now).cached))

    # ---------------------------------------------------------------- values that are not numbers

    def _suspect_rows(self) -> list[tuple[LlamaRow, StepOutput]]:
        """Handle a pass with NaN: fail the row that ran alone, or have each row tried alone."""
        rows = [_row_of(place) for place in self._sequences.active]
        for row in rows:
            row.suspected = True
        alone, self._trial = self._trial is not None, None
        self._zero_cache()
        if alone:
            return [(row, row.push(NOT_A_NUMBER)) for row in rows]
        log.warning("logits_not_a_number", requests=[row.job.id for row in rows])
        self._suspects.extend(rows)
        return []

    def _end_trial(self) -> None:
        """Let the row that ran alone continue with the others."""
        for place in self._sequences.active:
            if self._trial is not None and place.row is self._trial:
                place.row = None
                self._waiting.appendleft(self._trial)
        self._trial = None

    def _zero_cache(self) -> None:
        for place in self._sequences.active:
            self._forget_proposals(_row_of(place))
        self._sequences.empty_cache()

    # ---------------------------------------------------------------- room

    def _make_room(self) -> None:
        """Evict one sequence from the cache. Raises RuntimeError if only one is left."""
        if self._sequences.evict_ended():
            return
        active = self._sequences.active
        if len(active) < 2:
            raise RuntimeError("llama.cpp has no room in its cache for a single sequence")
        youngest = active[-1]
        row = _row_of(youngest)
        log.info("request_preempted", request=row.job.id)
        self._waiting.appendleft(row)
        self._forget_proposals(row)
        youngest.row = None
        self._sequences.cut(youngest, 0)


def _row_of(place: Place) -> LlamaRow:
    if place.row is None:
        raise RuntimeError(f"sequence {place.id} has no request")
    return place.row
