"""Who sits where in the batch: what a step reads and changes on the device, and its mirror here.

Nothing of it moves, so that a CUDA graph finds it. The host writes to a seat when somebody takes
it or leaves it, and to its row of the page table when the request has got another page; tokens
and positions of those who stay seated are the device's own, and a step ahead of the host.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servekit.engines.text.sampling_params import Sampling, noise_base
from servekit.engines.transformers.request_row import Row

#: Columns of `ints`. POSITION and COUNT go on by ALIVE with each step: an empty seat stays put.
TOKEN, POSITION, COUNT, NOISE, LIMIT, KIND, ALIVE = range(7)
#: Columns of `floats`; FLOOR is the logarithm of min-p.
TEMPERATURE, TOP_P, FLOOR = range(3)
#: How a seat's token is chosen.
GREEDY, PLAIN, RANKED = range(3)


@dataclass(slots=True, eq=False)
class BatchSlot:
    """One request in the batch. `started` and `done` count the tokens in its cache."""

    index: int
    row: Row
    state: Any  # the library's record of it
    kind: int
    started: int  # with all steps that have been started
    done: int  # with those whose outcome is known
    room: int  # tokens that its pages have room for
    taken: bool = True

    def said(self) -> None:
        """Bring the library's record up to date with what the host knows."""
        whole = self.row.context
        self.state.generated_tokens = whole[len(self.state.initial_tokens) :]
        self.state.position_offset = self.done
        self.state.tokens_to_process = whole[-1:]


@dataclass(slots=True)
class BatchSlots:
    """`count` seats of `pages` pages each; `trash` is a page that is no one's."""

    count: int
    pages: int
    trash: int
    vocab_size: int
    device: torch.device
    taken: dict[str, BatchSlot] = field(default_factory=dict)  # by key, in the order they came
    ints: Tensor = field(init=False)  # [seats, 7] int64
    floats: Tensor = field(init=False)  # [seats, 3]
    table: Tensor = field(init=False)  # [seats, pages] int32
    _table: Any = field(init=False)
    _free: list[int] = field(init=False)
    _moved: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    _paged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ints = torch.zeros(self.count, 7, dtype=torch.int64, device=self.device)
        self.floats = torch.ones(self.count, 3, device=self.device)
        shape = (self.count, self.pages)
        self.table = torch.full(shape, self.trash, dtype=torch.int32, device=self.device)
        self._table = np.full(shape, self.trash, np.int32)
        self._free = list(range(self.count))

    def take(self, row: Row, state: Any, kind: int, pages: list[int], size: int) -> BatchSlot:
        """Seat a request whose last token has been chosen and not read yet."""
        index = heapq.heappop(self._free)
        cached = row.length - 1
        seat = BatchSlot(index, row, state, kind, cached, cached, len(pages) * size)
        self.taken[row.key] = seat
        self._moved[index] = _values(row, cached, kind, self.vocab_size)
        self.lay(seat, pages)
        return seat

    def lay(self, seat: BatchSlot, pages: list[int]) -> None:
        """These are the pages of its tokens, in order."""
        self._table[seat.index, : len(pages)] = pages
        self._table[seat.index, len(pages) :] = self.trash
        self._paged.add(seat.index)

    def leave(self, key: str) -> BatchSlot | None:
        """Its pages may be another's: no step that is started from now on touches them."""
        seat = self.taken.pop(key, None)
        if seat is not None:
            seat.taken = False
            heapq.heappush(self._free, seat.index)
            self._moved[seat.index] = ([0] * 7, [1.0] * 3)
            self.lay(seat, [])
        return seat

    @property
    def reach(self) -> int:
        """Seats from the first to the last that is taken."""
        return max((seat.index for seat in self.taken.values()), default=-1) + 1

    def upload(self) -> None:
        """Have the device know of what has changed; in order with the steps, without waiting."""
        if self._moved:
            where = self._index(self._moved)
            ints, floats = zip(*self._moved.values(), strict=True)
            self.ints.index_copy_(0, where, self._sent(np.array(ints, np.int64)))
            self.floats.index_copy_(0, where, self._sent(np.array(floats, np.float32)))
            self._moved.clear()
        if self._paged:
            rows = sorted(self._paged)
            self.table.index_copy_(0, self._index(rows), self._sent(self._table[rows]))
            self._paged.clear()

    def _index(self, seats: Iterable[int]) -> Tensor:
        return self._sent(np.fromiter(seats, np.int64))

    def _sent(self, values: Any) -> Tensor:
        made = torch.from_numpy(values)
        if self.device.type == "cpu":
            return made
        return made.pin_memory().to(self.device, non_blocking=True)


def _values(row: Row, cached: int, kind: int, vocab_size: int) -> tuple[list[int], list[float]]:
    sampling: Sampling = row.sampling
    noise = noise_base(sampling.seed)
    token = row.context[-1]
    limit = sampling.top_k or vocab_size
    ints = [token, cached, row.position, noise, limit, kind, 1]
    floor = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return ints, [1.0 if kind == GREEDY else sampling.temperature, sampling.top_p, floor]
