"""A call that its caller runs in steps, though the library runs it in one go."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stopped(BaseException):
    """The call is given up. Not an Exception, so that no library handles it."""


class SteppedCall:
    """A call in a thread of its own, which runs only while `resume` waits for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        """Take a call that calls `pause` between its steps."""
        self._call = call
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self.done = False

    def resume(self) -> None:
        """Run the next step; raises what the call raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transcription", daemon=True)
            self._thread.start()
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()
        if (error := self._error) is not None:
            self._error = None
            raise error

    def abandon(self) -> None:
        """Give the call up, between two steps."""
        self._stopped = True
        if self._thread is not None and not self.done:
            self.resume()

    def pause(self) -> None:
        """Wait for the next `resume`; called by the call."""
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise Stopped

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._call()
        except Stopped:
            pass
        except BaseException as error:  # it is the caller's
            self._error = error
        self.done = True
        self._back.release()
