"""The sequences of a context: whose they are, and which tokens each has in the KV cache.

An ended sequence stays in the cache until its place or memory is needed: a request whose prompt has
the same beginning continues from there. Beginnings of running sequences are shared too, without a
copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from servekit.engines.api.job_state import find_common_length
from servekit.engines.llamacpp.media.mtmd import PLAIN, Positions
from servekit.engines.llamacpp.model import Context
from servekit.engines.llamacpp.request_row import LlamaRow

#: Shorter common beginnings are not shared.
LEAST_SHARED = 8


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


class Sequences:
    """All sequences of a context. `rewinds`: they can be cut anywhere."""

    def __init__(self, context: Context, *, rewinds: bool) -> None:
        self._context = context
        self._rewinds = rewinds
        self.places = [Place(index) for index in range(context.sequences)]

    @property
    def active(self) -> list[Place]:
        """Return the places that have a request, oldest request first."""
        taken = [place for place in self.places if place.row is not None]
        return sorted(taken, key=lambda place: place.born)

    @property
    def has_free(self) -> bool:
        return any(place.row is None for place in self.places)

    def count_cached(self) -> int:
        """Return the number of cached tokens; shared tokens count for each sequence."""
        return sum(len(place.cached) for place in self.places)

    def enter(self, row: LlamaRow, now: int) -> Place:
        """Give `row` a free place, with as much of its beginning as the cache has."""
        source, shared = self._find_shared(row)
        free = [place for place in self.places if place.row is None]
        oldest = min(free, key=lambda place: (bool(place.cached), place.used))
        place = source if source is not None and source.row is None else oldest
        if place is not source:
            self.cut(place, 0)
            if source is not None:
                self._context.share_prefix(source.id, place.id, row.positions.find(shared))
                place.cached = source.cached[:shared]
        self.cut(place, shared)
        place.salt, place.positions = row.job.cache_salt, row.positions
        place.row, place.born = row, now
        return place

    def _find_shared(self, row: LlamaRow) -> tuple[Place | None, int]:
        """Return the place with the longest beginning in common with `row`, and its length.

        The last token is never shared, because its logits are wanted.
        """
        best: tuple[Place | None, int] = (None, 0)
        if not self._rewinds or row.unscored:
            return best
        tokens, positions = row.marked()[:-1], row.positions
        for place in self.places:
            if place.salt != row.job.cache_salt:
                continue
            shared = find_common_length(place.cached, tokens)
            if (chunk := row.find_chunk(shared)) is not None:
                shared = chunk.start
            longer = shared >= LEAST_SHARED and shared > best[1]
            if longer and self._context.can_continue(place.id, positions.find(shared)):
                best = (place, shared)
        return best

    def free(self, place: Place) -> None:
        """Free a place whose row has ended; its cached tokens stay if they can be shared."""
        place.row = None
        if not self._rewinds:
            self.cut(place, 0)

    def cut(self, place: Place, start: int) -> None:
        """Remove the tokens of a place from number `start` on from the cache."""
        if len(place.cached) > start:
            self._context.cut_sequence(place.id, place.positions.find(start))
            del place.cached[start:]

    def evict_ended(self) -> bool:
        """Remove the ended sequence that was used least recently; return whether there was one."""
        ended = [place for place in self.places if place.row is None and place.cached]
        if ended:
            self.cut(min(ended, key=lambda place: place.used), 0)
        return bool(ended)

    def empty_cache(self) -> None:
        """Empty the cache and its memory: values of removed tokens would still be multiplied."""
        for place in self.places:
            place.row = None
            place.cached.clear()
        self._context.clear_cache()
