"""A bounded priority queue that is fair to API keys within a priority.

A pure data structure: callers pass the time, and there is no I/O.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Seconds of waiting that one step of priority is worth. An item of priority 0 that has waited this
#: long goes before a new one of priority -1, so that a lasting flood of urgent items cannot starve
#: the others.
STEP_S = 10.0


#: By key: rank, item and size in bytes. The lowest rank leaves first: the time of arrival plus
#: STEP_S for each step of priority.
_Lane = OrderedDict[str, deque[tuple[float, Item, int]]]


class FairQueue(Generic[Item]):
    """A queue whose items leave by priority and age, round robin by key, then in order of arrival.

    Each priority is a lane in which keys take turns; of the next items of all lanes, the one of the
    lowest rank leaves. An item that is given back after its worker died goes to the front, because
    it has waited already. Every operation except `position`, `order`, `remove` and `by_key`
    is O(1) in the number of items; there are as many lanes as priorities in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size_bytes = 0  # of all items except returned ones
        self.size = 0  # number of items: read it, as `len` costs more on the way of each request
        self._returned: deque[Item] = deque()
        self._lanes: dict[int, _Lane[Item]] = {}

    def __len__(self) -> int:
        return self.size

    @property
    def full(self) -> bool:
        return self.size >= self.limit

    def push(
        self,
        item: Item,
        key: str = "",
        priority: int = 0,
        at_s: float = 0.0,
        size_bytes: int = 0,
    ) -> None:
        """Add an item that arrived at `at_s`; the caller has checked `full`."""
        if (lane := self._lanes.get(priority)) is None:
            lane = self._lanes[priority] = OrderedDict()
        if (items := lane.get(key)) is None:
            items = lane[key] = deque()
        items.append((at_s + priority * STEP_S, item, size_bytes))
        self.size += 1
        self.size_bytes += size_bytes

    def requeue(self, item: Item, *, first: bool = False) -> None:
        """Return an item to the front, behind earlier returned items; the limit does not apply.

        `first` puts it before those, too.
        """
        (self._returned.appendleft if first else self._returned.append)(item)
        self.size += 1

    def pop(self) -> Item:
        """Remove and return the next item; raises IndexError when empty."""
        if not self.size:
            raise IndexError("the queue is empty")
        self.size -= 1
        if self._returned:
            return self._returned.popleft()
        lanes = self._lanes
        priority, lane = next(iter(lanes.items()))
        if len(lanes) > 1:
            priority = min(lanes, key=self._rank_next)
            lane = lanes[priority]
        key, items = lane.popitem(last=False)
        _, item, size_bytes = items.popleft()
        self.size_bytes -= size_bytes
        if items:
            lane[key] = items  # moves the key behind all others
        elif not lane:
            del lanes[priority]
        return item

    def _rank_next(self, priority: int) -> tuple[float, int]:
        """Return the rank of a lane's next item and the priority, which decides between equals."""
        items = next(iter(self._lanes[priority].values()))
        return items[0][0], priority

    def crowd_out(self, key: str) -> Item | None:
        """Make room for an item of `key`: remove the newest item of the key with the most items.

        Return that item, or None without a change if the two keys would not get closer to equal.
        A full queue thus refuses only the keys that filled it. O(number of keys).
        """
        waiting: dict[str, int] = {}
        for lane in self._lanes.values():
            for name, items in lane.items():
                waiting[name] = waiting.get(name, 0) + len(items)
        most = max(waiting, key=waiting.__getitem__, default=key)
        if waiting.get(most, 0) < waiting.get(key, 0) + 2:
            return None
        return self.take_newest(most)

    def take_newest(self, key: str) -> Item:
        """Remove and return a key's newest item in its lane of the lowest priority.

        The key must have an item.
        """
        priority = max(p for p, lane in self._lanes.items() if key in lane)
        _, item, size_bytes = self._lanes[priority][key].pop()
        self._forget_empty(priority, key)
        self.size -= 1
        self.size_bytes -= size_bytes
        return item

    def by_key(self) -> dict[str, list[tuple[Item, int]]]:
        """Return all items with their sizes in bytes by key, except returned ones. O(n).

        The last of a key is its newest in its lane of the lowest priority.
        """
        held: dict[str, list[tuple[Item, int]]] = {}
        for _, lane in sorted(self._lanes.items()):
            for key, items in lane.items():
                held.setdefault(key, []).extend((item, size) for _, item, size in items)
        return held

    def remove(self, item: Item, *, turn: bool = False) -> bool:
        """Remove an item wherever it is; return False if it is not there. O(n).

        `turn` counts this as the key's turn, which moves the key behind all others, as `pop` does.
        """
        found = self._take_returned(item) or self._take_waiting(item, turn)
        self.size -= found
        return found

    def _take_returned(self, item: Item) -> bool:
        if item not in self._returned:
            return False
        self._returned.remove(item)
        return True

    def _take_waiting(self, item: Item, turn: bool) -> bool:
        for priority, lane in self._lanes.items():
            for key, items in lane.items():
                for at, (_, other, size_bytes) in enumerate(items):
                    if other is item:
                        del items[at]
                        self.size_bytes -= size_bytes
                        if turn:
                            lane.move_to_end(key)
                        self._forget_empty(priority, key)
                        return True
        return False

    def _forget_empty(self, priority: int, key: str) -> None:
        lane = self._lanes[priority]
        if not lane[key]:
            del lane[key]
        if not lane:
            del self._lanes[priority]

    def heads(self) -> Iterator[Item]:
        """Yield the first item of each key and the first returned one; the oldest is among them."""
        yield from islice(self._returned, 1)
        for lane in self._lanes.values():
            yield from (items[0][1] for items in lane.values())

    def position(self, item: Item) -> int | None:
        """Return how many items would leave before this one; None if it is not there. O(n)."""
        return next((at for at, other in enumerate(self.order()) if other is item), None)

    def order(self) -> list[Item]:
        """Return all items in the order in which they would leave."""
        # heapq.merge compares only the heads of its inputs, exactly as `pop` does.
        lanes = [_in_turns(priority, lane) for priority, lane in self._lanes.items()]
        merged = heapq.merge(*lanes, key=lambda turn: turn[:2])
        return [*self._returned, *(item for _, _, item in merged)]


def _in_turns(priority: int, lane: _Lane[Item]) -> Iterator[tuple[float, int, Item]]:
    """Yield a lane's items as its keys take turns, each with its rank and priority."""
    rest = [list(items) for items in lane.values()]
    for turn in range(max(map(len, rest))):
        for items in rest:
            if turn < len(items):
                yield items[turn][0], priority, items[turn][1]


#: Waiting items that leave, each with its queue.
Leavers = list[tuple[FairQueue[Item], Item]]


def choose_leavers(
    queues: Iterable[FairQueue[Item]], key: str, size_bytes: int, lacking_bytes: int
) -> Leavers[Item]:
    """Return items that leave for one of `key` with `size_bytes`, for which so many bytes lack.

    They are the newest of the keys that hold the most. There are none, so that nothing leaves in
    vain, if `key` itself would hold as much.
    """
    held = [(owner, queue, items) for queue in queues for owner, items in queue.by_key().items()]
    sizes = [sum(size for _, size in items) for _, _, items in held]
    mine = sum(size for size, (owner, *_) in zip(sizes, held, strict=True) if owner == key)
    leavers: Leavers[Item] = []
    while lacking_bytes > 0:
        at = max(range(len(held)), key=sizes.__getitem__, default=-1)
        if at < 0 or held[at][0] == key or sizes[at] <= mine + size_bytes:
            return []
        _, queue, items = held[at]
        leaver, its_bytes = items.pop()
        leavers.append((queue, leaver))
        sizes[at] -= its_bytes
        lacking_bytes -= its_bytes
    return leavers
