"""`python -m tests.integration.cable FD FD`: carry packets between two TUN devices until EOF.

Each line on standard input is a JSON object that says how from then on: see `network.Cable.say`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import sys
import time
from typing import Any

_MTU_BYTES = 65536
#: What a slow link keeps waiting each way before it drops packets.
_QUEUE_S = 0.3


def carry(one: int, other: int) -> None:
    """Until standard input ends."""
    to = {one: other, other: one}
    free_at = dict.fromkeys(to, 0.0)  # when a slow link has sent what was given to it
    late: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()
    how: dict[str, Any] = {"delay_s": 0.0, "bytes_per_s": 0.0, "cut": False}
    selector = selectors.DefaultSelector()
    for fd in (one, other):
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for key, _ in selector.select(wait_s):
            if key.fd == 0:
                if not (said := os.read(0, 4096)):
                    return
                how = json.loads(said.splitlines()[-1])  # the last word holds
                continue
            packet = _read(key.fd)
            if packet is None or how["cut"]:
                continue
            now = time.monotonic()
            at = now
            if how["bytes_per_s"]:
                begins = max(now, free_at[key.fd])
                if begins - now > _QUEUE_S:
                    continue
                at = free_at[key.fd] = begins + len(packet) / how["bytes_per_s"]
            heapq.heappush(late, (at + how["delay_s"], next(number), to[key.fd], packet))
        while late and late[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(late)
            if not how["cut"]:
                _write(fd, packet)


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, _MTU_BYTES)
    except OSError:  # nothing there, or the device is down
        return None


def _write(fd: int, packet: bytes) -> None:
    try:
        os.write(fd, packet)
    except OSError:  # down, or its process has ended and its network with it
        return


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]))
