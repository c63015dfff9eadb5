"""Sessions of the web pages: a signed cookie with the key's name and an expiry time.

    1767225600.MAC.alice        Unix time of its end, HMAC-SHA256, the key's name

The key itself is not in the cookie. The HMAC's secret comes from the supervisor and is the same in
all gateways, so that each of them, also a restarted one, recognises a session. The HMAC covers the
key's hash and digest, so that a session ends when its key is changed. Browsers send the cookie to
/ui only.

A one-time link (`protocol.browser_link`) gives the session of `OWNER`, with keys in the file and
without, while the rules allow it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

from servekit.protocol.messages import AccessRules, KeyRule

COOKIE = "servekit-session"
LIFE_S = 7 * 86400.0
#: Scheme of the internal Authorization header that carries a session: `Session TOKEN`.
SCHEME = b"Session "
#: The rule of the browser that has opened a link. No key of a file can have its name.
OWNER = KeyRule("@owner", admin=True, metrics=True)


def issue(rule: KeyRule, rules: AccessRules, now_s: float) -> str:
    """Return the token of a new session for this key. `now_s` is Unix time."""
    until = str(int(now_s + LIFE_S))
    return f"{until}.{_proof(until, rule, rules.sessions)}.{rule.name}"


def name_in(token: str, rules: AccessRules, now_s: float) -> str | None:
    """Return the name of a session's key; None if the token is invalid, expired, or without key."""
    until, _, rest = token.partition(".")
    proof, _, name = rest.partition(".")
    known = (*rules.keys, OWNER) if rules.browser_link else rules.keys
    rule = next((one for one in known if one.name == name), None)
    if rule is None or not rules.sessions or not (until.isascii() and until.isdigit()):
        return None
    expected = _proof(until, rule, rules.sessions)
    if not hmac.compare_digest(expected.encode(), proof.encode()) or len(until) > 12:
        return None
    return name if now_s < int(until) else None


def _proof(until: str, rule: KeyRule, secret: bytes) -> str:
    said = b"\0".join((until.encode(), rule.name.encode(), rule.hash.encode(), rule.digest))
    mac = hmac.digest(secret, said, hashlib.sha256)
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


# ---- the cookie


def cookie_name(port: int) -> str:
    """Return the cookie's name, which has the port because browsers share cookies among ports."""
    return f"{COOKIE}-{port}"


def cookie(port: int, token: str, *, secure: bool) -> bytes:
    """Return the value of Set-Cookie; an empty token deletes the cookie."""
    life_s = int(LIFE_S) if token else 0
    rest = f"Path=/ui; Max-Age={life_s}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
    return f"{cookie_name(port)}={token}; {rest}".encode()


def token_in(headers: Iterable[tuple[bytes, bytes]], port: int) -> str:
    """Return the unverified token of the request's cookie; "" without one."""
    wanted = cookie_name(port).encode()
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, token = pair.strip().partition(b"=")
                if key == wanted:
                    return token.decode("latin-1")
    return ""
