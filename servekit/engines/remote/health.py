"""Health of an idle endpoint, found out without spending money.

    last observation                             in trouble         next request, when idle
    an answer                                    no                 GET /models
    GET /models: 404, 405 and the like           no                 none: it has no such list
    GET /models: no answer, 401, 403, 5xx        yes                GET /models
    a request: no answer, 5xx                    yes                GET /models, or a greeting
    a request: refused, as others would be       yes                a greeting, less and less often

A greeting is a request for a few tokens: if it is refused, it costs nothing; otherwise the trouble
is over. Requests of clients tell more, and any answer ends the trouble at once.
"""

from __future__ import annotations

import time
from typing import Literal

from servekit.engines.remote.errors import Refused

#: Interval between two checks.
LOOK_EVERY_S = 15.0
#: First and longest interval between two greetings.
_GREET_S, _GREET_MOST_S = 15.0, 600.0

Next = Literal["nothing", "list", "greet"]


class HealthWatcher:
    """The health of the endpoint. All times are of a monotonic clock, in seconds."""

    def __init__(self, *, lists: bool, now_s: float | None = None) -> None:
        self.trouble = ""
        self._lists = lists  # the endpoint has GET /models
        self._greet = False  # only an answered request proves that it serves
        self._greeting_s = _GREET_S
        self._seen_s = time.monotonic() if now_s is None else now_s

    def answered(self, now_s: float) -> None:
        """Record the first byte of an answer."""
        self.trouble, self._greet, self._seen_s = "", False, now_s
        self._greeting_s = _GREET_S

    def refused(self, refusal: Refused, now_s: float) -> None:
        """Record a request that failed after all attempts."""
        self._seen_s = now_s
        if refusal.trouble:
            self.trouble = refusal.error.message
            down = refusal.status == 0 or refusal.status >= 500
            self._greet = not (down and self._lists)

    def listed(self, refusal: Refused | None, now_s: float) -> None:
        """Record the result of GET /models."""
        self._seen_s = now_s
        if refusal is None:
            self.trouble = ""
        elif refusal.status in (0, 401, 403) or refusal.status >= 500:
            self.trouble = refusal.error.message
        else:
            self._lists, self.trouble = False, ""

    def greeted_in_vain(self) -> None:
        """Double the interval to the next greeting."""
        self._greeting_s = min(_GREET_MOST_S, 2 * self._greeting_s)

    def due_request(self, now_s: float) -> Next:
        """Return the request that is due now."""
        idle_s = now_s - self._seen_s
        if self._greet:
            return "greet" if idle_s >= self._greeting_s else "nothing"
        return "list" if self._lists and idle_s >= LOOK_EVERY_S else "nothing"
