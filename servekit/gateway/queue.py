"""The queue of one model: bounded, by priority, and fair to every API key within a priority.

A pure data structure; no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items leave by priority (lower first), then round robin by key, then in order of arrival.

    An item that comes back after its worker died goes to the front: it has waited already.
    Every operation but `position` and `remove` is O(1) in the number of items.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._size = 0
        self._returned: deque[Item] = deque()
        self._lanes: dict[int, OrderedDict[str, deque[Item]]] = {}

    def __len__(self) -> int:
        return self._size

    @property
    def full(self) -> bool:
        return self._size >= self.limit

    def push(self, item: Item, key: str = "", priority: int = 0) -> None:
        """Add an item; the caller has looked at `full`."""
        self._lanes.setdefault(priority, OrderedDict()).setdefault(key, deque()).append(item)
        self._size += 1

    def give_back(self, item: Item) -> None:
        """Put an item before all others; the limit does not apply to it."""
        self._returned.append(item)
        self._size += 1

    def pop(self) -> Item:
        """Take the next item; raises IndexError when empty."""
        if self._returned:
            self._size -= 1
            return self._returned.popleft()
        if not self._size:
            raise IndexError("the queue is empty")
        priority = min(self._lanes)
        lane = self._lanes[priority]
        key, items = next(iter(lane.items()))
        item = items.popleft()
        del lane[key]
        if items:
            lane[key] = items  # this key's next turn comes after all others
        elif not lane:
            del self._lanes[priority]
        self._size -= 1
        return item

    def remove(self, item: Item) -> bool:
        """Take an item out wherever it is; False if it is not there. O(n)."""
        if item in self._returned:
            self._returned.remove(item)
            self._size -= 1
            return True
        for priority, lane in self._lanes.items():
            for key, items in lane.items():
                if item in items:
                    items.remove(item)
                    self._forget_empty(priority, key)
                    self._size -= 1
                    return True
        return False

    def _forget_empty(self, priority: int, key: str) -> None:
        lane = self._lanes[priority]
        if not lane[key]:
            del lane[key]
        if not lane:
            del self._lanes[priority]

    def position(self, item: Item) -> int | None:
        """How many items leave before this one, as things stand; None if it is not there. O(n)."""
        return next((at for at, other in enumerate(self.order()) if other is item), None)

    def order(self) -> list[Item]:
        """All items in the order they would leave."""
        order = list(self._returned)
        for priority in sorted(self._lanes):
            rest = [list(items) for items in self._lanes[priority].values()]
            depth = max(map(len, rest))
            order += [items[i] for i in range(depth) for items in rest if i < len(items)]
        return order
