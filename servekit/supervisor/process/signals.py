"""Signal handling: signals become requests on the event loop.

This avoids asyncio's own handlers. In a storm of signals they never leave the loop that reads the
wake-up pipe, since each signal read may be followed by another; and to remove them makes a signal
deadly for a moment.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Literal

SignalRequest = Literal["signal", "hangup"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: The second signal means "now"; a third adds nothing.
_MOST_PENDING = 2


class Signals:
    """Signal handlers that post "hangup" for SIGHUP and "signal" for SIGINT and SIGTERM.

    They post on the event loop.
    """

    def __init__(self, post: Callable[[SignalRequest], None]) -> None:
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._pending = dict.fromkeys(_NUMBERS, 0)

    def catch(self) -> None:
        for number in _NUMBERS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the instance is to outlive its terminal
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Ignore all signals: the end is under way, and a late signal must do no harm."""
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        kind = signal.Signals(number)
        if self._pending[kind] < _MOST_PENDING:
            self._pending[kind] += 1
            self._loop.call_soon_threadsafe(self._deliver, kind)

    def _deliver(self, kind: signal.Signals) -> None:
        self._pending[kind] -= 1
        self._post("hangup" if kind == signal.SIGHUP else "signal")
