"""The slots of the batch: the data that a step reads and changes on the device, and its mirror.

The tensors keep their addresses, as CUDA graphs require. The host writes to a slot when a request
takes or leaves it, and to its row of the page table when the request gets another page; the device
advances the tokens and positions itself, one step ahead of the host.

A step that verifies proposed tokens (`speculative`) has a slot for each of them: `lend` overwrites
the slots, and the next `upload` restores them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servekit.engines.text.sampling_params import Sampling, noise_base
from servekit.engines.transformers.request_row import Row

#: Columns of `ints`. A step advances POSITION and COUNT by ALIVE, so empty slots stay unchanged.
#: SHIFT is what the model's position is ahead of POSITION, the place in the cache. ADAPTER is the
#: number of the request's adapter, as in `Adapter`.
_COLUMNS = 9
TOKEN, POSITION, COUNT, NOISE, LIMIT, KIND, SHIFT, ADAPTER, ALIVE = range(_COLUMNS)
#: Columns of `floats`; FLOOR is the logarithm of min-p.
TEMPERATURE, TOP_P, FLOOR = range(3)
#: Pages beyond a row's own that a draft may reach into: of 32 tokens, 8 to a page.
_BEYOND = 5
#: How a slot's token is chosen.
GREEDY, PLAIN, RANKED = range(3)


@dataclass(slots=True, eq=False)
class BatchSlot:
    """A request in the batch; `started` and `done` count the tokens in its cache."""

    index: int
    row: Row
    state: Any  # the library's record of it
    kind: int
    started: int  # including all started steps
    done: int  # including only steps whose result is known
    room: int  # tokens that fit into its pages
    taken: bool = True
    pages: int = 0

    def update_state(self) -> None:
        """Update the library's record to the host's state."""
        whole = self.row.context
        self.state.generated_tokens = whole[len(self.state.initial_tokens) :]
        self.state.position_offset = self.done
        self.state.tokens_to_process = whole[-1:]


@dataclass(slots=True)
class BatchSlots:
    """The `count` slots of `pages` pages each; `trash` is an unused page."""

    count: int
    pages: int
    trash: int
    vocab_size: int
    device: torch.device
    taken: dict[str, BatchSlot] = field(default_factory=dict)  # by key, in order of arrival
    ints: Tensor = field(init=False)  # [slots, columns] int64
    floats: Tensor = field(init=False)  # [slots, 3]
    table: Tensor = field(init=False)  # [slots, pages] int32
    _table: Any = field(init=False)
    _free: list[int] = field(init=False)
    _moved: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    _paged: set[int] = field(default_factory=set)
    _lent: int = 0  # slots from the first on that `lend` has overwritten

    def __post_init__(self) -> None:
        self.ints = torch.zeros(self.count, _COLUMNS, dtype=torch.int64, device=self.device)
        self.floats = torch.ones(self.count, 3, device=self.device)
        shape = (self.count, self.pages)
        self.table = torch.full(shape, self.trash, dtype=torch.int32, device=self.device)
        self._table = np.full(shape, self.trash, np.int32)
        self._free = list(range(self.count))

    def assign(self, row: Row, state: Any, kind: int, pages: list[int], size: int) -> BatchSlot:
        """Give a slot to a request whose last token has been chosen but not read yet."""
        index = heapq.heappop(self._free)
        cached = row.length - 1
        slot = BatchSlot(index, row, state, kind, cached, cached, len(pages) * size)
        self.taken[row.key] = slot
        self._moved[index] = slot_values(row, cached, kind, self.vocab_size)
        self.set_pages(slot, pages)
        return slot

    def set_pages(self, slot: BatchSlot, pages: list[int]) -> None:
        """Set the pages of a slot's tokens, in order."""
        slot.pages = len(pages)
        self._table[slot.index, : len(pages)] = pages
        self._table[slot.index, len(pages) :] = self.trash
        self._paged.add(slot.index)

    def free_slot(self, key: str) -> BatchSlot | None:
        """Free a slot; later steps do not touch its pages, which another request may get."""
        slot = self.taken.pop(key, None)
        if slot is not None:
            slot.taken = False
            heapq.heappush(self._free, slot.index)
            self._moved[slot.index] = ([0] * _COLUMNS, [1.0] * 3)
            self.set_pages(slot, [])
        return slot

    @property
    def reach(self) -> int:
        """Return the number of slots up to the last taken one."""
        return max((slot.index for slot in self.taken.values()), default=-1) + 1

    def upload(self) -> None:
        """Send changes to the device, in order with the steps and without waiting."""
        if self._lent:
            self._restore_slots()
        if self._moved:
            where = self._index_tensor(self._moved)
            ints, floats = zip(*self._moved.values(), strict=True)
            self.ints.index_copy_(0, where, self._send_values(np.array(ints, np.int64)))
            self.floats.index_copy_(0, where, self._send_values(np.array(floats, np.float32)))
            self._moved.clear()
        if self._paged:
            rows = sorted(self._paged)
            self.table.index_copy_(
                0, self._index_tensor(rows), self._send_values(self._table[rows])
            )
            self._paged.clear()

    def lend(self, proposals: Mapping[str, Sequence[int]], size: int) -> list[int]:
        """Fill the first `size` slots with all tokens that a step reads: of each row its last one
        and those proposed, in the order of `taken`. Return the number of tokens of each row.

        No step may be running: the device's tokens and positions are replaced by the host's.
        """
        ints: list[list[int]] = []
        floats: list[list[float]] = []
        owners: list[int] = []
        spans = []
        for key, slot in self.taken.items():
            own, numbers = slot_values(slot.row, slot.done, slot.kind, self.vocab_size)
            proposed = proposals.get(key, ())
            ints += follow_tokens(own, (own[TOKEN], *proposed))
            spans.append(1 + len(proposed))
            floats += [numbers] * spans[-1]
            owners += [slot.index] * spans[-1]
        used = max(slot.pages for slot in self.taken.values())
        self.fill_slots(ints, floats, self._table[owners, :used], size)
        self._lent = max(self._lent, size)
        return spans

    def fill_slots(
        self, ints: list[list[int]], floats: list[list[float]], pages: Any, size: int
    ) -> None:
        """Overwrite the first `size` slots: with these, and the rest of them empty."""
        spare = size - len(ints)
        width = min(self.pages, pages.shape[1] + _BEYOND)  # what lies beyond is never read
        table = np.full((size, width), self.trash, np.int32)
        table[: len(ints), : pages.shape[1]] = pages
        all_ints = np.array(ints + [[0] * _COLUMNS] * spare, np.int64)
        all_floats = np.array(floats + [[1.0] * 3] * spare, np.float32)
        self.ints[:size].copy_(self._send_values(all_ints))
        self.floats[:size].copy_(self._send_values(all_floats))
        self.table[:size, :width].copy_(self._send_values(table))

    def _restore_slots(self) -> None:
        for index in range(self._lent):
            self._moved[index] = ([0] * _COLUMNS, [1.0] * 3)
        for slot in self.taken.values():
            self._moved[slot.index] = slot_values(slot.row, slot.done, slot.kind, self.vocab_size)
        self._paged.update(range(self._lent))
        self._lent = 0

    def _index_tensor(self, slots: Iterable[int]) -> Tensor:
        return self._send_values(np.fromiter(slots, np.int64))

    def _send_values(self, values: Any) -> Tensor:
        made = torch.from_numpy(values)
        if self.device.type == "cpu":
            return made
        return made.pin_memory().to(self.device, non_blocking=True)


def follow_tokens(first: list[int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the integers of slots with tokens in sequence, from those of the first one's slot."""
    slots = []
    for ahead, token in enumerate(tokens):
        one = first.copy()
        one[TOKEN] = token
        one[POSITION] += ahead
        one[COUNT] += ahead
        slots.append(one)
    return slots


def slot_values(row: Row, cached: int, kind: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """Return the integers and floats of a slot whose row has `cached` tokens in the cache."""
    sampling: Sampling = row.sampling
    noise = noise_base(sampling.seed)
    token = (row.completion or row.job.prompt_ids)[-1]
    limit = sampling.top_k or vocab_size
    number = 0 if row.adapter is None else row.adapter.number
    ints = [token, cached, row.position, noise, limit, kind, row.shift, number, 1]
    floor = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return ints, [1.0 if kind == GREEDY else sampling.temperature, sampling.top_p, floor]
