"""Requests that have taken workers down, by fingerprint, and until when they are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from servekit.errors import RequestQuarantined
from servekit.gateway.call import Call
from servekit.wire.messages import ModelStatus, Quarantined

log: Any = structlog.get_logger("servekit.gateway")

_encode = msgspec.msgpack.Encoder().encode
#: How much of a fingerprint people are shown.
SHOWN = 16


def fingerprint(model: str, call: Call) -> str:
    """sha256 over the model and all that the request asks of it, in hex."""
    asked = (model, call.params, call.prompt, call.messages, call.more)
    return hashlib.sha256(_encode(asked)).hexdigest()


def refusal(entry: Quarantined, now: float) -> RequestQuarantined:
    """The error of a request that is quarantined."""
    held = f"; it is refused for {entry.until - now:.0f} s" if entry.until > now else ""
    return RequestQuarantined(
        f"workers died each time they ran this request, in the end alone{held}. Change it, or tell"
        f" the operator its fingerprint: {entry.fingerprint[:SHOWN]}"
    )


class Quarantine:
    """What this gateway refuses; false while that is nothing. Times are Unix times, in s."""

    def __init__(self) -> None:
        self._held: dict[str, Quarantined] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, entries: Iterable[Quarantined], now: float) -> None:
        """Hold these too, and forget those whose time is over. The later `until` counts."""
        for entry in entries:
            known = self._held.get(entry.fingerprint)
            if known is None or known.until < entry.until:
                self._held[entry.fingerprint] = entry
        self._held = {mark: entry for mark, entry in self._held.items() if entry.until > now}

    def commit(self, status: ModelStatus, call: Call, now: float) -> Quarantined:
        """Quarantine a call of this model, for as long as the model's configuration says."""
        mark = fingerprint(status.name, call)
        entry = Quarantined(mark, status.name, now + status.quarantine_s)
        log.error(
            "quarantined", model=status.name, fingerprint=mark[:SHOWN],
            deaths=call.deaths_in_all, for_s=status.quarantine_s,
            request="" if call.origin is None else call.origin.name,
        )  # fmt: skip
        self.add([entry], now)
        return entry

    def error(self, model: str, call: Call, now: float) -> RequestQuarantined | None:
        """Why this call is refused; None where it is not."""
        if not self._held:
            return None
        entry = self._held.get(fingerprint(model, call))
        return None if entry is None or entry.until <= now else refusal(entry, now)
