"""Proposals of a draft model: a smaller model with the same tokens, in a context of its own.

A draft's token is chosen with the noise of its place, as the model's will be: with equal
distributions both draw the same token, and with similar ones mostly. Penalties, biases and grammars
are the model's alone.

    pass 1       tokens that the draft has not read yet, the row's last one included
    pass 2 …     the token of the pass before

A pass reads at most the tokens of a batch: what is not read of a long prompt is read in later
steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from servekit.engines.api.job_state import find_common_length
from servekit.engines.api.speculation import Proposer, Wanted
from servekit.engines.llamacpp.model import Context, InsufficientMemory, Model
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sampling_params import draw_token
from servekit.engines.llamacpp.sequences import Place, Sequences
from servekit.engines.llamacpp.vocabulary import Vocabulary
from servekit.errors import LoadError


@dataclass(frozen=True)
class Draft:
    """A loaded draft model with its context; `own_context` is the longest it was made for."""

    model: Model
    context: Context
    own_context: int

    def close(self) -> None:
        self.context.close()
        self.model.close()


def check_draft(draft: Model, vocabulary: Vocabulary, name: str) -> None:
    """Raise LoadError if a draft model cannot propose tokens of `vocabulary`.

    The end of a vocabulary may be padded: such tokens have no text.
    """
    if not draft.rewinds:
        raise LoadError(f"{name} cannot draft: it is recurrent, and tokens cannot be taken back.")
    tables = [
        {(token, piece) for token in range(one.size) if (piece := one.piece(token))}
        for one in (vocabulary, draft.vocabulary)
    ]
    if differing := len({token for token, _ in tables[0] ^ tables[1]}):
        raise LoadError(
            f"{name} cannot draft: its vocabulary is not the model's, {differing} tokens differ."
        )


@dataclass(slots=True)
class _Reading:
    """What the draft has read of a row: the first `known` tokens in its place are the row's."""

    place: Place
    known: int


@dataclass(slots=True)
class _Drafting:
    """A row whose next tokens are drafted: `at` is its last token's place in the batch."""

    row: LlamaRow
    place: Place
    wanted: int
    at: int
    tokens: list[int]


class DraftProposer(Proposer[LlamaRow]):
    """A proposer of a draft model's tokens, for rows without media and within its context."""

    #: To go on, it reads all that the rows have said meanwhile, which takes as long as 100 steps.
    pause = 1024

    def __init__(self, draft: Draft, tokens: int) -> None:
        """`tokens` is the size of the model's vocabulary."""
        self._context = draft.context
        self._longest = min(draft.own_context, draft.context.capacity)
        self._own_tokens, self._tokens = draft.model.vocabulary.size, tokens
        self._sequences = Sequences(draft.context, rewinds=True)
        self._readings: dict[str, _Reading] = {}
        self._clock = count(1)

    def forget(self, key: str) -> None:
        reading = self._readings.pop(key, None)
        if reading is not None:
            self._sequences.free(reading.place)

    def propose(self, wanted: Wanted[LlamaRow]) -> dict[str, list[int]]:
        now = next(self._clock)
        try:
            drafting = self._read_rows(wanted, now)
            going = drafting
            while going:
                for one in going:
                    one.tokens.append(self._choose_token(one))
                going = self._read_drafted(going)
        except InsufficientMemory:  # although there was to be room: start afresh
            self._readings.clear()
            self._sequences.empty_cache()
            return {}
        return {one.row.key: one.tokens for one in drafting}

    # ---------------------------------------------------------------- what it reads

    def _read_rows(self, wanted: Wanted[LlamaRow], now: int) -> list[_Drafting]:
        """Read more of the rows; return those that are read to their end."""
        unread = []
        for row, most in wanted.values():
            if row.media is None and row.length < self._longest:
                place = self._find_place(row, now)
                unread.append((row.length - len(place.cached), row, most, place))
        unread.sort(key=lambda one: one[0])  # a long prompt holds up no other row
        self._make_room(sum(left + most for left, _, most, _ in unread))
        room = min(self._context.batch_tokens, self._count_free())
        self._context.clear_batch()
        read, drafting = [], []
        for left, row, most, place in unread:
            start, taken = len(place.cached), min(left, room)
            if not taken:
                break
            tokens = row.tokens_between(start, start + taken)
            at = self._put(place, tokens, output=taken == left)
            read.append((place, tokens))
            room -= taken
            if taken == left:
                most = min(most, self._longest - row.length)
                drafting.append(_Drafting(row, place, most, at, []))
        if read:
            self._decode_batch(read)
        return drafting

    def _read_drafted(self, going: Sequence[_Drafting]) -> list[_Drafting]:
        """Read the last drafted tokens of those rows that want more; return these."""
        more = [
            one
            for one in going
            if len(one.tokens) < one.wanted and one.tokens[-1] not in one.row.eos
        ]
        if not more or len(more) > self._count_free():
            return []
        self._context.clear_batch()
        for one in more:
            one.at = self._put(one.place, one.tokens[-1:], output=True)
        self._decode_batch([(one.place, one.tokens[-1:]) for one in more])
        return more

    def _find_place(self, row: LlamaRow, now: int) -> Place:
        """Return the place of a row, without tokens that turned out otherwise.

        The row's last token is always read anew.
        """
        reading = self._readings.get(row.key)
        if reading is None:
            place = self._sequences.enter(row, now)
            reading = self._readings[row.key] = _Reading(place, len(place.cached))
        place = reading.place
        end = min(len(place.cached), row.length - 1)
        said = row.tokens_between(reading.known, end)
        reading.known += find_common_length(place.cached[reading.known : end], said)
        self._sequences.cut(place, reading.known)
        place.used = now
        return place

    def _put(self, place: Place, tokens: Sequence[int], *, output: bool) -> int:
        known = [min(token, self._own_tokens - 1) for token in tokens]
        return self._context.put(place.id, len(place.cached), known, output=output)

    def _decode_batch(self, read: Sequence[tuple[Place, list[int]]]) -> None:
        self._context.decode_batch()
        for place, tokens in read:
            place.cached += tokens

    def _count_free(self) -> int:
        return self._context.capacity - self._sequences.count_cached()

    def _make_room(self, tokens: int) -> None:
        """Evict ended sequences until there is room for so many tokens, or none is left."""
        while self._count_free() < tokens and self._sequences.evict_ended():
            pass

    # ---------------------------------------------------------------- what it says

    def _choose_token(self, one: _Drafting) -> int:
        """Return the draft's next token of a row. Raises RuntimeError for NaN."""
        logits = self._context.logits(one.at)[: self._tokens]
        best = int(logits.argmax())
        if math.isnan(logits[best]):
            raise RuntimeError("the draft model computed values that are not numbers (NaN)")
        sampling = one.row.sampling
        if sampling.greedy:
            return best
        return draw_token(logits.copy(), sampling, one.row.position + len(one.tokens))
