"""Quarantine of requests, and of sources of requests, that have killed workers.

A client that numbers its requests, or adds the time, evades an exact fingerprint. Once ALIKE
requests that differ only in their numbers are quarantined, all such requests are refused, unless
one of them has come through.

Times are monotonic and differ between processes, so messages carry the remaining duration.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import structlog

from servekit.errors import RequestError, RequestQuarantined, SourceQuarantined
from servekit.gateway.routing.failures.suspect_sources import in_words, source_of
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import ModelStatus, Quarantined

log: Any = structlog.get_logger("servekit.gateway")

_encode = msgspec.msgpack.Encoder().encode
_to_json = msgspec.json.Encoder().encode
#: A word with a digit; possessive, so that long words take linear time.
_NUMBER = re.compile(rb"\b[^\W\d]*+\d\w*+")
#: Quarantined requests with the same likeness from which on all requests of it are refused.
ALIKE = 3
#: Displayed characters of a fingerprint.
SHOWN = 16


def fingerprint(model: str, call: InflightRequest) -> str:
    """Return the SHA-256 of the model and the request's content, in hex."""
    asked = (model, call.params, call.prompt, call.messages, call.more)
    return hashlib.sha256(_encode(asked)).hexdigest()


def text_fingerprint(model: str, call: InflightRequest) -> str:
    """Return the fingerprint without the request's numbers; "" for a call without text."""
    if not isinstance(call.prompt, str) and call.messages is None:
        return ""
    asked = (call.params, call.prompt, call.messages, call.more)
    return hashlib.sha256(model.encode() + _NUMBER.sub(b"0", _to_json(asked))).hexdigest()


class QuarantineEntry(NamedTuple):
    """A quarantine entry and the monotonic time at which it ends.

    `like` is the likeness if this gateway has quarantined the request; it is "" for entries of
    other gateways, and after a request of that likeness has come through.
    """

    entry: Quarantined
    until_s: float
    like: str = ""

    def is_active(self, status: ModelStatus, now_s: float) -> bool:
        """Return whether the entry is for the model's present generation and has not ended."""
        fits = self.entry.generation in ("", generation_of(status))
        return fits and self.entry.model == status.name and self.until_s > now_s


def refusal(entry: Quarantined, left_s: float) -> RequestError:
    """Return the error for a quarantined request or source, with `left_s` to go."""
    if is_source(entry):
        return SourceQuarantined(
            f"requests from {in_words(entry.fingerprint)} have taken workers of {entry.model!r}"
            f" down again and again; they are refused for {left_s:.0f} s",
            retry_after_s=max(1.0, left_s),
        )
    held = f"; it is refused for {left_s:.0f} s" if left_s > 0 else ""
    return RequestQuarantined(
        f"workers died each time they ran this request, in the end alone{held}. Change it, or tell"
        f" the operator its fingerprint: {entry.fingerprint[:SHOWN]}"
    )


def is_source(entry: Quarantined) -> bool:
    """Return whether an entry is for a source (a key or an address), not for a request."""
    return ":" in entry.fingerprint


class Quarantine:
    """The quarantine entries of this gateway, by model and fingerprint. `now_s` is monotonic."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], QuarantineEntry] = {}
        self._harmless: set[str] = set()  # likenesses that have come through meanwhile

    def adopt_entries(self, entries: Iterable[Quarantined], now_s: float) -> list[Quarantined]:
        """Add entries and drop expired ones; return those that are new.

        Of two entries for the same request the longer one counts.
        """
        new = []
        for entry in entries:
            at = entry.model, entry.fingerprint
            known, until_s = self.held.get(at), now_s + entry.for_s
            changed = known is not None and known.entry.generation != entry.generation
            if known is None or changed or known.until_s < until_s:
                self.held[at] = QuarantineEntry(entry, until_s, known.like if known else "")
                new += [entry] if known is None else []
        self.held = {at: held for at, held in self.held.items() if held.until_s > now_s}
        if not self.held:
            self._harmless.clear()
        return new

    def commit(self, status: ModelStatus, call: InflightRequest, now_s: float) -> Quarantined:
        """Quarantine a call of this model for the model's `quarantine_s`."""
        mark = fingerprint(status.name, call)
        log.error(
            "request_quarantined", model=status.name, fingerprint=mark[:SHOWN],
            deaths=call.deaths_in_all, for_s=status.quarantine_s,
            request="" if call.origin is None else call.origin.name,
        )  # fmt: skip
        entry = self._commit(status, mark, status.quarantine_s, now_s)
        if (held := self.held.get(at := (status.name, mark))) is not None:
            like = text_fingerprint(status.name, call)
            self.held[at] = held._replace(like="" if like in self._harmless else like)
        return entry

    def clear_likeness(self, model: str, call: InflightRequest) -> None:
        """Stop refusing requests by a likeness of which this call has come through."""
        if any(held.like for held in self.held.values()):
            like = text_fingerprint(model, call)
            for at, held in self.held.items():
                if held.like == like:
                    self._harmless.add(like)
                    self.held[at] = held._replace(like="")

    def commit_source(
        self, status: ModelStatus, source: str, for_s: float, now_s: float
    ) -> Quarantined:
        """Quarantine all requests of a key or an address to this model."""
        log.error("source_quarantined", model=status.name, source=source, for_s=for_s)
        return self._commit(status, source, for_s, now_s)

    def _commit(self, status: ModelStatus, mark: str, for_s: float, now_s: float) -> Quarantined:
        entry = Quarantined(mark, status.name, time.time() + for_s, for_s, generation_of(status))
        self.adopt_entries([entry], now_s)
        return entry

    def error(
        self, status: ModelStatus, call: InflightRequest, now_s: float
    ) -> RequestError | None:
        """Return the error if this call is refused, else None."""
        if not self.held:
            return None
        for mark in (source_of(call), fingerprint(status.name, call)):
            held = self.held.get((status.name, mark))
            if held is not None and held.is_active(status, now_s):
                return refusal(held.entry, held.until_s - now_s)
        likes = [held for held in self.held.values() if held.like and held.is_active(status, now_s)]
        if len(likes) < ALIKE:
            return None
        like = text_fingerprint(status.name, call)
        until_s = sorted(held.until_s for held in likes if held.like == like)
        if len(until_s) < ALIKE:
            return None
        return RequestQuarantined(
            f"workers died of {len(until_s)} requests that differ from this one in their numbers"
            f" alone; all such requests are refused for {until_s[-ALIKE] - now_s:.0f} s. Change it"
        )


def generation_of(status: ModelStatus) -> str:
    """Return the model's present generation, that of its newest loaded replica; "" if unknown."""
    return "" if status.info is None else status.info.generation
