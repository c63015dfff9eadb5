"""Verification of API keys: a dictionary lookup for known keys, bounded work for all others.

known                 lookup by keyed digest, so that timing reveals nothing about a key
given in the clear    (from a file or the environment) lookup by the supervisor's digest
hashed in the file    scrypt in a thread, for the hashes with the key's prefix; then known
unknown               nothing to compute without a hash with its prefix; else scrypt, then
                      remembered as wrong

scrypt runs for one key at a time and pauses after each wrong key, and few keys may wait for it. A
flood of wrong keys costs at most a quarter of a core, and requests with known keys never wait. The
addresses of clients take turns, and share the places: a flood keeps others' keys out for two turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from servekit.config import keys
from servekit.errors import RequestError
from servekit.gateway.http.request_context import ORIGIN
from servekit.gateway.routing.fair_queue import FairQueue
from servekit.protocol.messages import AccessRules

#: Wrong keys that are remembered (16 bytes each), so that a repeated one costs no scrypt.
MAX_WRONG = 4096
#: Keys that may wait for verification; further ones get Busy.
MAX_WAITING = 32
#: Pause after a wrong key, as a multiple of the time of its verification.
PAUSE = 3.0


Candidates = Sequence[tuple[keys.Hash, str]]


@dataclass(frozen=True, slots=True, eq=False)
class _Check:
    """A key that waits for scrypt, by the rules of its arrival."""

    key: bytes
    digest: bytes
    candidates: Candidates
    rules: AccessRules
    name: asyncio.Future[str | None]


class Busy(RequestError):
    """Too many unknown keys wait for verification. Send the request again after `Retry-After`."""

    status = 503
    code = "busy"


class Verifier:
    """Finds the names of keys. Everything but `_matching` runs on the event loop."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._rules = AccessRules()
        self._known: dict[bytes, str] = {}
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._clear: dict[bytes, str] = {}
        self._hashes: dict[bytes, list[tuple[keys.Hash, str]]] = {}
        self._verifying: dict[bytes, _Check] = {}
        self._waiting: FairQueue[_Check] = FairQueue(MAX_WAITING)  # by address
        self._running: asyncio.Task[None] | None = None

    def apply_rules(self, rules: AccessRules) -> None:
        """Adopt these rules; unchanged keys stay known."""
        same = _unchanged(self._rules, rules)
        self._known = {digest: name for digest, name in self._known.items() if name in same}
        self._wrong.clear()
        self._verifying = {}  # their waiters start again, see `verify`
        self._rules = rules
        self._clear = {rule.digest: rule.name for rule in rules.keys if rule.digest}
        self._hashes = {}
        for rule in rules.keys:
            if rule.hash:
                parsed = keys.parse_hash(rule.hash)
                self._hashes.setdefault(parsed.prefix, []).append((parsed, rule.name))

    def find_verified(self, key: bytes) -> str | None:
        """Return the name of a key that has been verified before, else None."""
        return self._known.get(self._digest(key))

    async def verify(self, key: bytes) -> str | None:
        """Return the name of a key, None if it is wrong. Raises Busy."""
        digest = self._digest(key)
        while True:
            rules = self._rules
            found = self._known.get(digest) or self._look_up(key, digest)
            if found is not None or digest in self._wrong:
                return found
            candidates = self._hashes.get(keys.prefix_of(key))
            if not candidates or len(key) > keys.MAX_KEY_BYTES:
                return None
            found = await asyncio.shield(self._begin(key, digest, candidates).name)
            if rules is self._rules:
                return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).digest()

    def _look_up(self, key: bytes, digest: bytes) -> str | None:
        if not self._clear or len(key) > keys.MAX_KEY_BYTES:
            return None
        name = self._clear.get(keys.fast_digest(key, self._rules.salt))
        if name is not None:
            self._known[digest] = name
        return name

    def _begin(self, key: bytes, digest: bytes, candidates: Candidates) -> _Check:
        """Return the check of this key; begin it if there is none. Raises Busy."""
        if (check := self._verifying.get(digest)) is not None:
            return check
        source = _find_source()
        if len(self._verifying) >= MAX_WAITING:
            if (crowded := self._waiting.crowd_out(source)) is None:
                raise _busy()
            self._end(crowded, error=_busy())
        loop = asyncio.get_running_loop()
        check = _Check(key, digest, candidates, self._rules, loop.create_future())
        self._verifying[digest] = check
        self._waiting.push(check, source)
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return check

    async def _run(self) -> None:
        while self._waiting:
            check = self._waiting.pop()
            try:
                name = await self._find_name(check)
            except Exception as error:
                self._end(check, error=error)
            else:
                self._end(check, name)

    async def _find_name(self, check: _Check) -> str | None:
        """Verify a key by the rules of its arrival; None at once if these have changed."""
        if check.rules is not self._rules:
            return None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        name = await asyncio.to_thread(_matching, check.key, check.candidates)
        if name is None:
            await asyncio.sleep(PAUSE * (loop.time() - began_s))
        if check.rules is self._rules:
            self._remember(check.digest, name)
        return name

    def _end(
        self, check: _Check, name: str | None = None, *, error: Exception | None = None
    ) -> None:
        if self._verifying.get(check.digest) is check:
            del self._verifying[check.digest]
        if error is None:
            check.name.set_result(name)
        else:
            check.name.set_exception(error)
            check.name.exception()  # all who waited for it may have left

    def _remember(self, digest: bytes, name: str | None) -> None:
        if name is not None:
            self._known[digest] = name
            return
        self._wrong[digest] = None
        if len(self._wrong) > MAX_WRONG:
            self._wrong.popitem(last=False)


def _busy() -> Busy:
    return Busy("too many unknown keys are being checked; try later", retry_after_s=2)


def _find_source() -> str:
    """Return the address of the client in this context; of IPv6, the network that a client has."""
    origin = ORIGIN.get()
    address = "" if origin is None else origin.address
    if ":" in address:
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


def _matching(key: bytes, candidates: Candidates) -> str | None:
    return next((name for known, name in candidates if known.matches(key)), None)


def _unchanged(old: AccessRules, new: AccessRules) -> set[str]:
    """Return the names of keys whose hash and digest have not changed."""
    before = {(rule.name, rule.hash, rule.digest) for rule in old.keys}
    return {rule.name for rule in new.keys if (rule.name, rule.hash, rule.digest) in before}
