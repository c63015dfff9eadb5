"""Search for GPUs where workers share GPUs or use several GPUs each.

Workers that are loaded on start must fit side by side. A worker that is loaded on demand must fit
beside those; it may overlap with other workers of its kind, as little as possible: the ledger of
reservations decides which of them are loaded when. Two workers of one model share a GPU only where
the configuration requires it: where it names more replicas than there are GPUs, and says how much
memory each may take.

The search is a backtracking bin packing: largest claims first, equivalent GPUs tried once. The
first attempt keeps all workers where they are; the next attempts start from empty GPUs, first with
the emptiest GPU preferred (a GPU of one's own is faster), then with the fullest that has room. Each
attempt gives up after STEPS tries, far more than tens of workers need; a plan that needs more is
refused. The search uses neither clock nor random numbers: the same configuration gets the same
places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from servekit.system.gpu.gpus import Gpu, Slot

STEPS = 4_000
#: Up to this many combinations of GPUs for one worker are all tried; beyond, only neighbours.
_MOST_WAYS = 256

_Order = Literal["emptiest", "fullest"]


@dataclass(frozen=True, slots=True)
class Want:
    """The GPUs that one model requires: `least` workers on `width` GPUs each."""

    name: str
    least: int
    width: int
    claims: Mapping[Gpu, int]  # bytes, by GPU that it may use
    stays: bool  # loaded on start
    grows: bool  # takes more workers where there is room
    held: tuple[Slot, ...] = ()  # the current places of its workers
    shares: bool = False  # whether two of its workers may share a GPU


class Unplaceable(Exception):
    """No placement was found for `want`; `board` is the furthest partial placement."""

    def __init__(self, want: Want, board: Board, *, gave_up: bool) -> None:
        super().__init__(want.name)
        self.want = want
        self.board = board
        self.gave_up = gave_up


class Board:
    """A placement in progress. `rooms` are the bytes of each GPU that models may claim."""

    def __init__(self, rooms: Mapping[Gpu, int]) -> None:
        self.rooms = rooms
        self.placed: list[tuple[Want, Slot]] = []

    def copy(self) -> Board:
        other = Board(self.rooms)
        other.placed = list(self.placed)
        return other

    def slots_of(self, want: Want) -> list[Slot]:
        return [slot for other, slot in self.placed if other.name == want.name]

    def claims_on(self, gpu: Gpu, *, stays: bool) -> list[tuple[str, int]]:
        """Return the claims on a GPU: of models loaded on start, or of models loaded on demand."""
        return [
            (want.name, want.claims[gpu])
            for want, slot in self.placed
            if gpu in slot and want.stays is stays
        ]

    def left(self, want: Want, gpu: Gpu) -> int:
        """Return the bytes of a GPU that `want` could claim."""
        staying = sum(size for _, size in self.claims_on(gpu, stays=True))
        passing = [size for _, size in self.on_demand_bytes(gpu)] if want.stays else []
        own = 0 if want.stays else self.count_workers(want, gpu) * want.claims[gpu]
        return self.rooms[gpu] - staying - max(passing, default=0) - own

    def on_demand_bytes(self, gpu: Gpu) -> list[tuple[str, int]]:
        """Return the bytes of each on-demand model on a GPU; its workers load together."""
        taken: dict[str, int] = {}
        for name, size in self.claims_on(gpu, stays=False):
            taken[name] = taken.get(name, 0) + size
        return list(taken.items())

    def count_workers(self, want: Want, gpu: Gpu) -> int:
        """Return how many workers of `want` are on a GPU."""
        return sum(gpu in slot for slot in self.slots_of(want))

    def fits(self, want: Want, slot: Slot) -> bool:
        return all(
            gpu in want.claims
            and (want.shares or not self.count_workers(want, gpu))
            and want.claims[gpu] <= self.left(want, gpu)
            for gpu in slot
        )

    def overlap(self, want: Want, gpu: Gpu) -> int:
        """Return the bytes that a GPU lacks if all its models and `want` are loaded."""
        taken = sum(size for stays in (True, False) for _, size in self.claims_on(gpu, stays=stays))
        return max(0, taken + want.claims[gpu] - self.rooms[gpu])

    def symmetry_key(self, gpu: Gpu, wants: Sequence[Want]) -> tuple[object, ...]:
        """Return a key that is equal for two GPUs if they are interchangeable in the search."""
        on = sorted(want.name for want, slot in self.placed if gpu in slot)
        return self.rooms[gpu], gpu.name, *on, *(want.claims.get(gpu) for want in wants)


def pack(wants: Sequence[Want], rooms: Mapping[Gpu, int]) -> dict[str, list[Slot]]:
    """Return the slots of each model, in NVML's order. Raises Unplaceable."""
    board = _found(sorted(wants, key=lambda want: _difficulty(want, rooms)), rooms)
    _grow(board, [want for want in wants if want.grows])
    return {want.name: sorted(board.slots_of(want), key=_indexes) for want in wants}


def _found(wants: list[Want], rooms: Mapping[Gpu, int]) -> Board:
    kept = _kept(wants, rooms, beyond_least=True)
    if all(len(kept.slots_of(want)) >= want.least for want in wants):
        return kept  # no worker is new, so none has to move
    kept = _kept(wants, rooms)
    attempts: list[tuple[Board, _Order]] = [(Board(rooms), "emptiest"), (Board(rooms), "fullest")]
    if kept.placed:
        attempts.insert(0, (kept, "emptiest"))
    failure: Unplaceable | None = None
    for board, order in attempts:
        try:
            return _Search(wants, board, order).find_board()
        except Unplaceable as error:
            failure = error
            if not board.placed and not error.gave_up:
                break  # all combinations were tried
    assert failure is not None
    raise failure


def _difficulty(want: Want, rooms: Mapping[Gpu, int]) -> tuple[object, ...]:
    share = max((size / max(1, rooms[gpu]) for gpu, size in want.claims.items()), default=0.0)
    return not want.stays, -want.width, -share, len(want.claims)


def _kept(wants: Sequence[Want], rooms: Mapping[Gpu, int], *, beyond_least: bool = False) -> Board:
    """Place workers where they are now, if that is still valid.

    Each model keeps up to its minimum; with `beyond_least`, models that grow keep all workers.
    """
    board = Board(rooms)
    for want in wants:
        for slot in want.held:
            wanted = math.inf if beyond_least and want.grows else want.least
            enough = len(board.slots_of(want)) >= wanted
            if not enough and len(slot) == want.width and board.fits(want, slot):
                board.placed.append((want, slot))
    return board


class _Search:
    """Depth-first search for the workers that `board` does not place yet."""

    def __init__(self, wants: Sequence[Want], board: Board, order: _Order) -> None:
        self._wants = wants
        self._board = board.copy()
        self._order = order
        self._steps = STEPS
        self._todo = [want for want in wants for _ in range(want.least - len(board.slots_of(want)))]
        self._stuck: tuple[int, Want, Board] | None = None  # the furthest state so far

    def find_board(self) -> Board:
        if self._place(0):
            return self._board
        assert self._stuck is not None
        _, want, board = self._stuck
        raise Unplaceable(want, board, gave_up=self._steps <= 0)

    def _place(self, at: int) -> bool:
        if at == len(self._todo):
            return True
        want, tried = self._todo[at], set[object]()
        if self._stuck is None or at > self._stuck[0]:
            self._stuck = at, want, self._board.copy()
        for slot in candidates(self._board, want, self._order):
            alike = tuple(sorted(repr(self._board.symmetry_key(gpu, self._wants)) for gpu in slot))
            if alike in tried:
                continue
            tried.add(alike)
            self._steps -= 1
            if self._steps <= 0:
                return False
            self._board.placed.append((want, slot))
            if self._place(at + 1):
                return True
            self._board.placed.pop()
        return False


def candidates(board: Board, want: Want, order: _Order = "emptiest") -> list[Slot]:
    """Return the slots where one more worker of `want` fits, best first."""
    gpus = sorted(
        (gpu for gpu in want.claims if board.fits(want, (gpu,))), key=lambda gpu: gpu.index
    )
    slots = [slot for slot in want.held if len(slot) == want.width and board.fits(want, slot)]
    slots += [slot for slot in _ways(gpus, want.width) if slot not in slots]
    return sorted(slots, key=lambda slot: _rank(board, want, slot, order))


def _ways(gpus: Sequence[Gpu], width: int) -> Iterator[Slot]:
    if math.comb(len(gpus), width) <= _MOST_WAYS:
        yield from itertools.combinations(gpus, width)
        return
    for at in range(len(gpus) - width + 1):
        yield tuple(gpus[at : at + width])


def _rank(board: Board, want: Want, slot: Slot, order: _Order) -> tuple[object, ...]:
    """Return the sort key of a slot; the least is the best.

    Without other differences, GPUs linked by NVLink come first, then neighbours.
    """
    apart = sum(b.uuid not in a.linked for a, b in itertools.combinations(slot, 2))
    extent = slot[-1].index - slot[0].index
    overlap = 0 if want.stays else sum(board.overlap(want, gpu) for gpu in slot)
    passing = 0 if want.stays else sum(len(board.claims_on(gpu, stays=False)) for gpu in slot)
    left = sum(board.left(want, gpu) for gpu in slot)
    room = left if order == "fullest" else -left
    astride = slot[0].index % len(slot) != 0
    own = sum(board.count_workers(want, gpu) for gpu in slot)
    near = apart, extent, astride, room, _indexes(slot)
    return own, slot not in want.held, overlap, passing, *near


def _grow(board: Board, wants: Sequence[Want]) -> None:
    """Place extra workers one at a time, each for the model with the fewest."""
    growing = list(wants)
    while growing:
        want = min(growing, key=lambda one: len(board.slots_of(one)))
        if slots := candidates(board, want):
            board.placed.append((want, slots[0]))
        else:
            growing.remove(want)


def _indexes(slot: Slot) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in slot)
