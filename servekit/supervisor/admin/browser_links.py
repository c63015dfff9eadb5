"""The tokens of one-time links that nobody has opened yet; see `protocol.browser_link`.

They are in the supervisor's memory alone: they outlive gateways, hold at each of them, and end with
the instance.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from servekit.protocol.browser_link import make_token

#: How long a link may be opened.
LINK_LIFE_S = 600.0
#: Links that may be open; a further one replaces the oldest.
MOST_LINKS = 16


class BrowserLinks:
    """Makes tokens, and takes each of them once."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._ends_s: dict[str, float] = {}  # by token, the oldest first

    def create(self) -> str:
        """Return a new token."""
        self._drop_old(keep=MOST_LINKS - 1)
        token = make_token(self._secret)
        self._ends_s[token] = self._clock() + LINK_LIFE_S
        return token

    def redeem(self, token: str) -> bool:
        """Return whether the token is valid; from now on it is not."""
        self._drop_old(keep=MOST_LINKS)
        given = token.encode()
        found = [one for one in self._ends_s if hmac.compare_digest(one.encode(), given)]
        for one in found:
            del self._ends_s[one]
        return bool(found)

    def _drop_old(self, keep: int) -> None:
        now_s = self._clock()
        valid = [item for item in self._ends_s.items() if item[1] > now_s]
        self._ends_s = dict(valid[max(0, len(valid) - keep) :])
