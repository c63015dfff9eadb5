"""Parameters of a request body that no schema declares.

Clients send parameters of other servers. Silently dropping one may break a client that relies on
it, and refusing one breaks clients that do not need it. Therefore the answer names the parameter in
a header, and the log names it at most every LOG_EVERY_S. The policy is `server.unknown_parameters`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Any, Literal

import msgspec
import structlog

from servekit.errors import RequestError
from servekit.gateway.http.request_context import ORIGIN

log: Any = structlog.get_logger("servekit.gateway")

#: The most names in a header, a log line or a refusal, and the most characters of each name.
MOST_NAMES, MOST_CHARS = 8, 64
#: The least time between two log lines about the same parameter.
LOG_EVERY_S = 600.0
#: The most parameters whose last log time is kept.
MOST_REMEMBERED = 256
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")

Policy = Literal["warn", "refuse", "ignore"]


class UnknownParameters:
    """The unknown parameters of one gateway: the policy, and when each was last logged."""

    def __init__(self) -> None:
        self.policy: Policy = "warn"
        self._logged_s: dict[str, float] = {}

    def meet(self, body: bytes, known: Collection[str]) -> None:
        """Report the parameters of `body` that are not `known`. Raises RequestError by policy."""
        if self.policy == "ignore":
            return
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        names = sorted(_UNFIT.sub("?", name[:MOST_CHARS]) for name in found if name not in known)
        more = len(names) - MOST_NAMES
        told = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        said = f"unknown parameter{'s' if len(names) > 1 else ''}: {told}"
        if self.policy == "refuse":
            raise RequestError(
                f"{said}; leave out unknown parameters (server.unknown_parameters: refuse)",
                param=names[0],
            )
        if (origin := ORIGIN.get()) is not None:
            origin.warning = said.encode()
        self._log(names)

    def _log(self, names: list[str]) -> None:
        now_s = time.monotonic()
        new = [n for n in names if now_s - self._logged_s.get(n, -LOG_EVERY_S) >= LOG_EVERY_S]
        if not new or len(self._logged_s) > MOST_REMEMBERED:
            if new and now_s - max(self._logged_s.values()) >= LOG_EVERY_S:
                self._logged_s.clear()  # full of made-up names from a while ago
            return
        self._logged_s |= dict.fromkeys(new[:MOST_NAMES], now_s)
        log.warning("unknown_parameters_ignored", names=new[:MOST_NAMES])


#: One for the process, which is one gateway.
UNKNOWN = UnknownParameters()
