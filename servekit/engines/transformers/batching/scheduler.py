"""The requests that may share a step, and those that may share blocks of the cache.

The library's scheduler knows a single model. Adapters that cannot be mixed into the base's steps
have their own models, so a step belongs to one group of requests. Groups take turns: each step is
the next group's that has something to run. Within a step, requests of one adapter are adjacent, as
`lora.batched_lora` requires.

The library shares blocks of equal tokens between requests. But keys and values differ between
adapters, so the tokens that identify a block are changed in an adapter-specific way at every lookup
and registration. The same separates requests with different salts, which must not learn of each
other, and those before and after a request with NaN logits (`Epochs`). Tokens that stand for images
are replaced by marks of their content.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers.generation.continuous_batching.scheduler import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
)

from servekit.engines.transformers.request_row import Row

#: The name under which the library finds this scheduler.
NAME = "servekit_groups"
#: Number of changed tokens of a prompt: at most the size of the smallest block.
_SALTED = 8
#: Number of hash buckets of adapters and salts that have separate epochs.
_EPOCHS = 1024
_SALT = 0x9E3779B1  # odd, with well mixed bits
_MASK30 = 0x3FFFFFFF  # the library hashes tokens as signed 32-bit numbers

Scheduled = tuple[Any, bool, int, int]


class GroupScheduler(FIFOScheduler):
    """The library's scheduler, with one group per step; `rows` are the running ones by key.

    Requests in `elsewhere` are run by the decode loop, and keep their blocks. Besides them requests
    are begun only while `ample` returns True, and a full cache is waited for: the others are not
    preempted.
    """

    rows: Mapping[str, Row] = {}
    elsewhere: Mapping[str, Any] = {}
    _last = 0  # the group that ran last

    def ample(self) -> bool:
        return True

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Scheduled:
        if not self.elsewhere:
            return self._schedule_all(token_budget, cache_budget)
        away = {k: s for k, s in self.active_requests.items() if k in self.elsewhere}
        self.active_requests = {k: s for k, s in self.active_requests.items() if k not in away}
        blocked, self.block_new_requests = self.block_new_requests, not self.ample()
        try:
            self.block_new_requests |= blocked
            found = self._schedule_all(token_budget, cache_budget)
        finally:
            self.active_requests = away | self.active_requests
            self.block_new_requests = blocked
        return ([], *found[1:]) if found[0] is None else found

    def _schedule_all(self, token_budget: int, cache_budget: int) -> Scheduled:
        groups = {self.rows[key].group for key in (*self.active_requests, *self.waiting_requests)}
        if len(groups) < 2:
            return self._side_by_side(super().schedule_batch(token_budget, cache_budget))
        return self._in_turn(sorted(groups), token_budget, cache_budget)

    def _in_turn(self, groups: list[int], token_budget: int, cache_budget: int) -> Scheduled:
        """Schedule the next group that can run; as in the library, None means a full cache.

        The library then preempts one of the starved requests, which are of all groups since all
        were tried.
        """
        starved: list[Any] = []
        found: Scheduled = ([], False, 0, 0)
        full = False
        after = [group for group in groups if group > self._last]
        for group in (*after, *groups[: len(groups) - len(after)]):
            found = self._schedule_group(group, token_budget, cache_budget)
            starved += self.starved_requests
            full = full or found[0] is None
            if found[0]:
                self._last = group
                break
        self.starved_requests = starved
        return (None if full else [], *found[1:]) if not found[0] else self._side_by_side(found)

    def _schedule_group(self, group: int, token_budget: int, cache_budget: int) -> Scheduled:
        """Schedule with only this group visible to the library."""
        active, waiting = self.active_requests, self.waiting_requests
        order = self.waiting_requests_order
        self.active_requests = self._states_of(group, active)
        self.waiting_requests = self._states_of(group, waiting)
        self.waiting_requests_order = deque(key for key in order if key in self.waiting_requests)
        try:
            return super().schedule_batch(token_budget, cache_budget)
        finally:
            left = self.waiting_requests
            hidden = {k: s for k, s in active.items() if k not in self.active_requests}
            self.active_requests = hidden | self.active_requests
            self.waiting_requests = {
                k: s for k, s in waiting.items() if k in left or self.rows[k].group != group
            }
            self.waiting_requests_order = deque(k for k in order if k in self.waiting_requests)

    def _states_of(self, group: int, states: dict[str, Any]) -> dict[str, Any]:
        return {key: state for key, state in states.items() if self.rows[key].group == group}

    def _side_by_side(self, found: Scheduled) -> Scheduled:
        batch = found[0]
        if batch and any(self.rows[future.state.request_id].adapter for future in batch):
            batch.sort(key=lambda future: self.rows[future.state.request_id].adapter_uid)
        return found


SCHEDULER_MAPPING[NAME] = GroupScheduler


# ---------------------------------------------------------------- blocks of the cache


class Epochs:
    """Generations of cache sharing among rows with the same adapter and salt.

    If a request's logits are NaN, the blocks that it shared may hold NaN, even before the token
    that caused it: masked values are multiplied by 0, and NaN times 0 is NaN. So no later row finds
    blocks of earlier epochs any more; the library evicts them when it needs room.
    """

    def __init__(self) -> None:
        self._last = 0
        self._now = [0] * _EPOCHS

    def join(self, row: Row) -> None:
        """Set a row's epoch, so that it shares blocks with later rows unless it runs alone."""
        row.epoch = row.alone or self._now[self._bucket_of(row)]

    def end_epoch(self, row: Row) -> int:
        """End the epoch of a row's blocks; return a number that no other row has."""
        self._now[self._bucket_of(row)] = self._last + 1
        self._last += 2
        return self._last

    @staticmethod
    def _bucket_of(row: Row) -> int:
        return hash((row.adapter_uid, row.job.cache_salt)) % _EPOCHS


def keep_prefixes_apart(cache: Any, rows: Mapping[str, Row], epochs: Epochs) -> None:
    """Restrict the cache's block sharing to one adapter and salt; record cached tokens in rows."""
    search = cache.search_prefix_match

    def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
        row = rows[request_id]
        epochs.join(row)
        if row.unscored:  # its whole prompt has to be read
            return 0
        found: int = search(request_id, _disguise_tokens(row, prompt_ids))
        row.note_cached(found)
        return found

    cache.search_prefix_match = search_prefix_match
    for name in ("mark_complete_blocks", "mark_shareable_blocks_as_complete"):  # 5.23, 5.17
        if hasattr(cache, name):
            setattr(cache, name, _mark_disguised(getattr(cache, name), rows))


def _mark_disguised(mark: Any, rows: Mapping[str, Row]) -> Any:
    def mark_complete_blocks(state: Any, complete_blocks: Any) -> None:
        row = rows.get(state.request_id)
        if complete_blocks and row is not None and (row.images is not None or _changes_of(row)):
            state = _Disguised(state, row)
        mark(state, complete_blocks)

    return mark_complete_blocks


class _Disguised:
    """A request's state as read by the cache, with other tokens."""

    def __init__(self, state: Any, row: Row) -> None:
        self.request_id = state.request_id
        self.status = state.status
        self.initial_tokens = _disguise_tokens(row, state.initial_tokens + state.generated_tokens)
        self.generated_tokens: list[int] = []


def _disguise_tokens(row: Row, tokens: list[int]) -> list[int]:
    """Return the tokens that identify blocks of the row: with its images, adapter and salt."""
    known = tokens if row.images is None else row.images.mark_tokens(tokens)
    changes = _changes_of(row)
    return _salt_tokens(known, changes) if changes else known


def _changes_of(row: Row) -> Sequence[int]:
    salt = row.job.cache_salt
    return _token_changes(row.adapter_uid, f"{row.epoch}\0{salt}" if row.epoch else salt)


def _token_changes(uid: int, salt: str) -> Sequence[int]:
    """Return the 30-bit changes of the first tokens; none for the base without a salt."""
    if not uid and not salt:
        return ()
    changes = [uid * _SALT * (2 * place + 1) & _MASK30 for place in range(_SALTED)]
    return changes if not salt else [a ^ b for a, b in zip(changes, _salt_words(salt), strict=True)]


@lru_cache(1024)
def _salt_words(salt: str) -> tuple[int, ...]:
    digest = hashlib.sha256(salt.encode()).digest()
    return tuple(word & _MASK30 for word in struct.unpack(f"<{_SALTED}I", digest))


def _salt_tokens(tokens: Iterable[int], changes: Sequence[int]) -> list[int]:
    """Return the tokens with the first eight changed by adapter and salt.

    Equal tokens remain equal, and different ones different. Eight tokens of thirty bits make a
    collision of two adapters' prompts practically impossible; a single changed token might be
    another's.
    """
    changed = list(tokens)
    changed[: len(changes)] = [a ^ b for a, b in zip(changed, changes, strict=False)]
    return changed
