"""Whether the endpoint serves, while nobody asks; and how it is found out without spending money.

    what was last seen of it                     it is in trouble   what is asked next, when idle
    an answer                                    no                 GET /models
    GET /models: 404, 405 and the like           no                 nothing: it has no such list
    GET /models: no answer, 401, 403, 5xx        yes                GET /models
    a request: no answer, 5xx                    yes                GET /models, or a greeting
    a request: refused for what others get, too  yes                a greeting, less and less often

A greeting is a request for a few tokens: one that is refused costs nothing, and one that is not
ends the trouble. Whatever is asked by a client tells more, and any answer ends the trouble at once.
"""

from __future__ import annotations

import time
from typing import Literal

from servekit.engines.remote.errors import Refused

#: Between two looks.
LOOK_EVERY_S = 15.0
#: Between two greetings at first, and at most.
_GREET_S, _GREET_MOST_S = 15.0, 600.0

Next = Literal["nothing", "list", "greet"]


class HealthWatcher:
    """What is known. All times are of a monotonic clock, in seconds."""

    def __init__(self, *, lists: bool, now_s: float | None = None) -> None:
        self.trouble = ""
        self._lists = lists  # it has GET /models
        self._greet = False  # only an answer shows that it serves
        self._greeting_s = _GREET_S
        self._seen_s = time.monotonic() if now_s is None else now_s

    def answered(self, now_s: float) -> None:
        """A byte of an answer has come."""
        self.trouble, self._greet, self._seen_s = "", False, now_s
        self._greeting_s = _GREET_S

    def refused(self, refusal: Refused, now_s: float) -> None:
        """A request brought no answer, however often it was tried."""
        self._seen_s = now_s
        if refusal.trouble:
            self.trouble = refusal.error.message
            down = refusal.status == 0 or refusal.status >= 500
            self._greet = not (down and self._lists)

    def listed(self, refusal: Refused | None, now_s: float) -> None:
        """GET /models was answered, or was not."""
        self._seen_s = now_s
        if refusal is None:
            self.trouble = ""
        elif refusal.status in (0, 401, 403) or refusal.status >= 500:
            self.trouble = refusal.error.message
        else:
            self._lists, self.trouble = False, ""

    def greeted_in_vain(self) -> None:
        """The next greeting takes twice as long to come."""
        self._greeting_s = min(_GREET_MOST_S, 2 * self._greeting_s)

    def next(self, now_s: float) -> Next:
        """What is to be asked now."""
        idle_s = now_s - self._seen_s
        if self._greet:
            return "greet" if idle_s >= self._greeting_s else "nothing"
        return "list" if self._lists and idle_s >= LOOK_EVERY_S else "nothing"
