"""Parameters of a body that no schema declares.

Clients send what other servers know. To pass such a parameter over in silence may break what they
rely on, and to refuse it breaks clients that send it in vain: so the answer names it in a header,
and the log says it now and then. `server.unknown_parameters` has the say.
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

#: Names that a header, a line of the log, or a refusal tells, and characters of each.
MOST_NAMES, MOST_CHARS = 8, 64
#: A parameter that has been logged is not logged again for so long.
LOG_EVERY_S = 600.0
#: Parameters whose last mention in the log is remembered.
MOST_REMEMBERED = 256
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")

Policy = Literal["warn", "refuse", "ignore"]


class UnknownParameters:
    """What becomes of them in this gateway."""

    def __init__(self) -> None:
        self.policy: Policy = "warn"
        self._logged_s: dict[str, float] = {}

    def meet(self, body: bytes, known: Collection[str]) -> None:
        """Tell of the parameters in a body that are not `known`. Raises RequestError by policy."""
        if self.policy == "ignore":
            return
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        names = sorted(_UNFIT.sub("?", name[:MOST_CHARS]) for name in found if name not in known)
        more = len(names) - MOST_NAMES
        told = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        said = f"unknown parameter{'s' if len(names) > 1 else ''}: {told}"
        if self.policy == "refuse":
            raise RequestError(
                f"{said}; leave out what is not known here (server.unknown_parameters: refuse)",
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
                self._logged_s.clear()  # full of names that somebody made up, a while ago
            return
        self._logged_s |= dict.fromkeys(new[:MOST_NAMES], now_s)
        log.warning("unknown parameters in a body have no effect", names=new[:MOST_NAMES])


#: A gateway is a process.
UNKNOWN = UnknownParameters()
