"""Which requests may share a step, and which may share blocks of the cache.

The library's scheduler knows one model. Adapters that cannot be mixed into the base's steps have
models of their own, so that a step belongs to one group of requests, and groups take turns: each
step is the next group's that has anything to run. Within a step, requests of one adapter are side
by side, as `adapters.mixing` wants them.

The library shares blocks of equal tokens between requests. Keys and values under one adapter are
not those under another: blocks are told apart by adapter, in that the tokens they are known by are
changed, by something that only this adapter has, wherever they are looked up or written down. So
are those of requests with different salts, which are not to learn of each other, and those of
before and after a request whose logits were NaN (`Epochs`).
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
#: Tokens of a prompt that are changed: no more than the smallest block has.
_SALTED = 8
#: Adapters and salts are told apart by this many places, for the end of what they have shared.
_EPOCHS = 1024
_SALT = 0x9E3779B1  # odd, and its bits well mixed
_MASK30 = 0x3FFFFFFF  # the library hashes tokens as signed 32-bit numbers

Scheduled = tuple[Any, bool, int, int]


class GroupScheduler(FIFOScheduler):
    """The library's own, on one group at a time. `rows` are those under way, by key.

    Those `elsewhere` are run by others, and hold their blocks. Beside them requests are begun only
    while `ample` blocks are left, and a full cache is waited for: room is not made among the rest.
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
        """Schedule the next group that can run. As the library does, None says: the cache is full.

        It then makes room among those who were starved: of all groups, since all were tried.
        """
        starved: list[Any] = []
        found: Scheduled = ([], False, 0, 0)
        full = False
        after = [group for group in groups if group > self._last]
        for group in (*after, *groups[: len(groups) - len(after)]):
            found = self._schedule(group, token_budget, cache_budget)
            starved += self.starved_requests
            full = full or found[0] is None
            if found[0]:
                self._last = group
                break
        self.starved_requests = starved
        return (None if full else [], *found[1:]) if not found[0] else self._side_by_side(found)

    def _schedule(self, group: int, token_budget: int, cache_budget: int) -> Scheduled:
        """Let the library see this group only."""
        active, waiting = self.active_requests, self.waiting_requests
        order = self.waiting_requests_order
        self.active_requests = self._of(group, active)
        self.waiting_requests = self._of(group, waiting)
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

    def _of(self, group: int, states: dict[str, Any]) -> dict[str, Any]:
        return {key: state for key, state in states.items() if self.rows[key].group == group}

    def _side_by_side(self, found: Scheduled) -> Scheduled:
        batch = found[0]
        if batch and any(self.rows[future.state.request_id].adapter for future in batch):
            batch.sort(key=lambda future: self.rows[future.state.request_id].adapter_uid)
        return found


SCHEDULER_MAPPING[NAME] = GroupScheduler


# ---------------------------------------------------------------- blocks of the cache


class Epochs:
    """Which rows share blocks of the cache, of those with one adapter and one salt.

    Where a request's logits are NaN, blocks that it has shared may hold NaN, before the token that
    brought it forth, too: what attention masks out is multiplied with 0. So nobody finds blocks of
    before any more. The library drops them when it needs room.
    """

    def __init__(self) -> None:
        self._last = 0
        self._now = [0] * _EPOCHS

    def join(self, row: Row) -> None:
        """Let a row share blocks with those that are begun from now on, unless it is alone."""
        row.epoch = row.alone or self._now[self._place(row)]

    def leave(self, row: Row) -> int:
        """Let nobody find what a row has shared. Returns a number that no other row has."""
        self._now[self._place(row)] = self._last + 1
        self._last += 2
        return self._last

    @staticmethod
    def _place(row: Row) -> int:
        return hash((row.adapter_uid, row.job.cache_salt)) % _EPOCHS


def keep_prefixes_apart(cache: Any, rows: Mapping[str, Row], epochs: Epochs) -> None:
    """Have the library's cache share blocks within one adapter and one salt only, and tell them."""
    search = cache.search_prefix_match

    def search_prefix_match(request_id: str, prompt_ids: list[int]) -> int:
        row = rows[request_id]
        epochs.join(row)
        if row.unscored:  # all of its prompt has to be read
            return 0
        changes = _changes_of(row)
        found: int = search(request_id, _salted(prompt_ids, changes) if changes else prompt_ids)
        row.note_cached(found)
        return found

    cache.search_prefix_match = search_prefix_match
    for name in ("mark_complete_blocks", "mark_shareable_blocks_as_complete"):  # 5.23, 5.17
        if hasattr(cache, name):
            setattr(cache, name, _marking(getattr(cache, name), rows))


def _marking(mark: Any, rows: Mapping[str, Row]) -> Any:
    def mark_complete_blocks(state: Any, complete_blocks: Any) -> None:
        row = rows.get(state.request_id)
        if complete_blocks and row is not None:
            changes = _changes_of(row)
            state = _Disguised(state, changes) if changes else state
        mark(state, complete_blocks)

    return mark_complete_blocks


class _Disguised:
    """A request's state as the cache reads it, with other tokens."""

    def __init__(self, state: Any, changes: Sequence[int]) -> None:
        self.request_id = state.request_id
        self.status = state.status
        self.initial_tokens = _salted(state.initial_tokens + state.generated_tokens, changes)
        self.generated_tokens: list[int] = []


def _changes_of(row: Row) -> Sequence[int]:
    salt = row.job.cache_salt
    return _changes(row.adapter_uid, f"{row.epoch}\0{salt}" if row.epoch else salt)


def _changes(uid: int, salt: str) -> Sequence[int]:
    """What the first tokens are changed by, 30 bits each; none for the base without a salt."""
    if not uid and not salt:
        return ()
    changes = [uid * _SALT * (2 * place + 1) & _MASK30 for place in range(_SALTED)]
    return changes if not salt else [a ^ b for a, b in zip(changes, _words(salt), strict=True)]


@lru_cache(1024)
def _words(salt: str) -> tuple[int, ...]:
    digest = hashlib.sha256(salt.encode()).digest()
    return tuple(word & _MASK30 for word in struct.unpack(f"<{_SALTED}I", digest))


def _salted(tokens: Iterable[int], changes: Sequence[int]) -> list[int]:
    """Other tokens for each adapter and salt; the same for the same, and different for different
    tokens.

    Eight tokens by thirty bits each: that two adapters' prompts ever look alike is out of the
    question, where a single changed token might be another's.
    """
    changed = list(tokens)
    changed[: len(changes)] = [a ^ b for a, b in zip(changed, changes, strict=False)]
    return changed
