"""Verification of API keys: a dictionary lookup for known keys, bounded work for all others.

known                 lookup by keyed digest, so that timing reveals nothing about a key
given in the clear    (from a file or the environment) lookup by the supervisor's digest
hashed in the file    scrypt in a thread, for the hashes with the key's prefix; then known
unknown               nothing to compute without a hash with its prefix; else scrypt, then
                      remembered as wrong

scrypt runs for one key at a time and pauses after each wrong key, and few keys may wait for it. A
flood of wrong keys costs at most a quarter of a core, and requests with known keys never wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from servekit.config import keys
from servekit.errors import RequestError
from servekit.protocol.messages import AccessRules

#: Wrong keys that are remembered (16 bytes each), so that a repeated one costs no scrypt.
MAX_WRONG = 4096
#: Keys that may wait for verification; further ones get Busy.
MAX_WAITING = 32
#: Pause after a wrong key, as a multiple of the time of its verification.
PAUSE = 3.0


Candidates = Sequence[tuple[keys.Hash, str]]


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
        self._verifying: dict[bytes, asyncio.Task[str | None]] = {}
        self._one_at_a_time = asyncio.Lock()

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
            found = await asyncio.shield(self._begin(key, digest, candidates))
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

    def _begin(self, key: bytes, digest: bytes, candidates: Candidates) -> asyncio.Task[str | None]:
        """Return the task that verifies this key; start it if there is none. Raises Busy."""
        task = self._verifying.get(digest)
        if task is None:
            if len(self._verifying) >= MAX_WAITING:
                raise Busy("too many unknown keys are being checked; try later", retry_after_s=2)
            verifying = self._verify(key, digest, candidates, self._rules)
            task = self._verifying[digest] = asyncio.get_running_loop().create_task(verifying)
            task.add_done_callback(partial(_forget, self._verifying, digest))
        return task

    async def _verify(
        self, key: bytes, digest: bytes, candidates: Candidates, rules: AccessRules
    ) -> str | None:
        """Verify a key by the given rules; the result is dropped if the rules have changed."""
        async with self._one_at_a_time:
            if rules is not self._rules:
                return None
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            name = await asyncio.to_thread(_matching, key, candidates)
            if name is None:
                await asyncio.sleep(PAUSE * (loop.time() - began_s))
        if rules is self._rules:
            self._remember(digest, name)
        return name

    def _remember(self, digest: bytes, name: str | None) -> None:
        if name is not None:
            self._known[digest] = name
            return
        self._wrong[digest] = None
        if len(self._wrong) > MAX_WRONG:
            self._wrong.popitem(last=False)


def _forget(verifying: dict[bytes, Any], digest: bytes, _: Any) -> None:
    verifying.pop(digest, None)


def _matching(key: bytes, candidates: Candidates) -> str | None:
    return next((name for known, name in candidates if known.matches(key)), None)


def _unchanged(old: AccessRules, new: AccessRules) -> set[str]:
    """Return the names of keys whose hash and digest have not changed."""
    before = {(rule.name, rule.hash, rule.digest) for rule in old.keys}
    return {rule.name for rule in new.keys if (rule.name, rule.hash, rule.digest) in before}
