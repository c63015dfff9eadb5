"""API keys: creation, hashes for the file, and verification.

    sk-alice-Zr3…            a key: an identifying prefix, and 32 random characters
    sk-alice-$scrypt$ln=14,r=8,p=1$SALT$HASH
                             its hash in the file: the prefix, and scrypt (RFC 7914) of the whole

scrypt is in Python's hashlib, costs an attacker as much memory as argon2, and releases the GIL. The
prefix selects the hash, so that checking a key costs one scrypt, and a foreign key none. The prefix
is part of the hash: renaming an entry does not invalidate its key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass

NAME_RULE = (
    "a key's name is letters, digits and . _ - with a letter or digit at both ends,"
    " 63 characters at most"
)
#: 190 bits: safe from tables and guessing, whatever the hash.
_RANDOM_CHARS = 32
_ALPHABET = string.ascii_letters + string.digits
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_HASH = re.compile(
    rf"(?P<prefix>sk-{_NAME}-)\$scrypt\$ln=(?P<ln>\d\d?),r=(?P<r>\d\d?),p=(?P<p>\d\d?)"
    r"\$(?P<salt>[A-Za-z0-9+/]{16,64})\$(?P<hash>[A-Za-z0-9+/]{43})"
)
#: 16 MiB and about 40 ms.
_LN, _R, _P = 14, 8, 1
#: Maximum memory of a hash in the file: 128 MiB.
_MAX_MEMORY_BYTES = 2**27
#: Maximum length of a key that is checked.
MAX_KEY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Hash:
    """A parsed hash of the file."""

    prefix: bytes
    ln: int  # log2 of the cost
    r: int
    p: int
    salt: bytes
    digest: bytes

    def matches(self, key: bytes) -> bool:
        """Return whether this is the key, in constant time. Takes tens of milliseconds: use a
        thread.
        """
        return hmac.compare_digest(_hash_key(key, self.salt, self.ln, self.r, self.p), self.digest)


def is_name(text: str) -> bool:
    """Return whether a key can have this name."""
    return re.fullmatch(_NAME, text) is not None


def new_key(name: str) -> tuple[str, str]:
    """Return a new key of that name, and its hash for the file."""
    prefix = f"sk-{name}-"
    key = prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))
    salt = secrets.token_bytes(16)
    digest = _hash_key(key.encode(), salt, _LN, _R, _P)
    return (
        key,
        f"{prefix}$scrypt$ln={_LN},r={_R},p={_P}${_encode_base64(salt)}${_encode_base64(digest)}",
    )


def parse_hash(text: str) -> Hash:
    """Parse a hash of the file; raises ValueError with a sentence for the user."""
    found = _HASH.fullmatch(text)
    if found is None:
        if text.startswith("sk-") and "$" not in text:
            raise ValueError(
                "this is a key, not the hash of one; a key belongs in `file` or `environment`,"
                " and `servekit key new` prints a key with its hash"
            )
        raise ValueError("not a hash as `servekit key new` prints it")
    ln, r, p = int(found["ln"]), int(found["r"]), int(found["p"])
    if not (1 <= ln <= 24 and 1 <= r <= 32 and 1 <= p <= 4) or _memory_bytes(ln, r) > (
        _MAX_MEMORY_BYTES
    ):
        raise ValueError("its scrypt parameters are out of bounds: 128 MiB at most")
    salt, digest = _decode_base64(found["salt"]), _decode_base64(found["hash"])
    return Hash(found["prefix"].encode(), ln, r, p, salt, digest)


def prefix_of(key: bytes) -> bytes:
    """Return the identifying prefix of a key; empty if it has none."""
    head, dash, _ = key.rpartition(b"-")
    return head + dash


def fast_digest(key: bytes, salt: bytes) -> bytes:
    """Return a keyed digest, 32 bytes, for keys that are known in the clear.

    `salt` is random per process, so that an attacker cannot compute digests of guesses.
    """
    return hashlib.blake2b(key, key=salt, digest_size=32).digest()


def _hash_key(key: bytes, salt: bytes, ln: int, r: int, p: int) -> bytes:
    limit = 2 * _memory_bytes(ln, r) + 2**20
    return hashlib.scrypt(key, salt=salt, n=1 << ln, r=r, p=p, maxmem=limit, dklen=32)


def _memory_bytes(ln: int, r: int) -> int:
    return 128 * r << ln


def _encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4))
